"""Comparison of what must be equal on every rank, before a difference leads to a wrong result or a hang."""

import hashlib
from itertools import islice

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from vpipe.communication import World, agree, agree_on
from vpipe.errors import VPipeError
from vpipe.pipeline.assembly import TrainingOptions
from vpipe.pipeline.layout import Layout
from vpipe.runtime import Feed
from vpipe.schedule import Schedule
from vpipe.weights.optimizers import NamedParameters, make_optimizers

REFUSE = "refuse"
INITIAL_WEIGHTS = ("rank 0", REFUSE)
SAME_ARGUMENTS = "give every rank the same arguments"


def agree_on_run(world: World, layout: Layout, model: nn.Module, options: TrainingOptions) -> None:
    """The ranks have the same model, cut alike, trained alike in the same order."""
    schedule = layout.schedule
    order = "/".join(map(str, (schedule.name, schedule.minibatches, schedule.placement)))
    for what, value, fix in (
        ("version of torch", torch.__version__, "install the same on every host"),
        ("model", layout.graph.fingerprint[:16], "build the same model on every rank"),
        ("schedule", order, SAME_ARGUMENTS),
        ("update_interval", schedule.update_interval, SAME_ARGUMENTS),
        ("order of actions", _programs_digest(schedule), "give every rank the same schedule"),
        ("clip_norm", options.clip_norm, SAME_ARGUMENTS),
        ("partition", list(layout.partition), SAME_ARGUMENTS),
        ("seed", options.seed, "give every rank the same seed"),
        ("on_nonfinite", options.on_nonfinite, SAME_ARGUMENTS),
        ("staleness", list(options.staleness), SAME_ARGUMENTS),
        ("nonfinite_limit", list(options.nonfinite_limit), SAME_ARGUMENTS),
        ("loss_scale", options.loss_scale, SAME_ARGUMENTS),
        ("compress", list(options.compress), SAME_ARGUMENTS),
        ("optimizer", _optimizers(model, options), SAME_ARGUMENTS),
    ):
        agree_on(world, what, value, fix)


RATES_AT = (0, 1, 10, 100, 1000)
"""Updates whose rates stand for a schedule."""


def _optimizers(model: nn.Module, options: TrainingOptions) -> str:
    """Class, groups and hyperparameters that the run's function gives the whole model.

    A rank holds some of the parameters: so the function is called for stand-ins of all of them, which take no memory.
    What it refuses, it refuses again for the stages, with words of its own.
    """
    named = [
        (name, nn.Parameter(torch.zeros(()).expand(parameter.shape)))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    names = {parameter: name for name, parameter in named}
    try:
        made = make_optimizers(options.optimizer, NamedParameters(named, [name for name, _ in named]))
        return "; ".join(_described(optimizer, names, options) for optimizer in made)
    except Exception:
        return "none that can be compared"


def _described(optimizer: Optimizer, names: dict[nn.Parameter, str], options: TrainingOptions) -> str:
    groups = []
    for group in optimizer.param_groups:
        members = " ".join(sorted(names[parameter] for parameter in group["params"]))
        digest = hashlib.sha256(members.encode()).hexdigest()[:8]
        settings = ", ".join(
            f"{key} {value}"
            for key, value in group.items()
            if key in optimizer.defaults and isinstance(value, bool | int | float | str | tuple | list)
        )
        groups.append(f"{len(group['params'])} parameters ({digest}) with {settings}")
    text = f"{type(optimizer).__name__} of {' and '.join(groups)}"
    if options.lr_scheduler is None:
        return text
    scheduler = options.lr_scheduler(optimizer)
    text += f", schedule {type(scheduler).__name__}"
    if isinstance(scheduler, LambdaLR):
        rates = (f"{factor(update):g}" for factor in scheduler.lr_lambdas for update in RATES_AT)
        text += f" {' '.join(rates)}"
    return text


def weights_differ(world: World, model: nn.Module, initial_weights: str) -> bool:
    """Whether the ranks have built the model with other values, which `initial_weights` may refuse."""
    if initial_weights not in INITIAL_WEIGHTS:
        raise VPipeError(
            f"unknown initial_weights {initial_weights!r}: choose from {', '.join(map(repr, INITIAL_WEIGHTS))}"
        )
    agree_on(world, "initial_weights", initial_weights, SAME_ARGUMENTS)
    digest, name = _weights_digest(model), "set of initial weights"
    if initial_weights == REFUSE:
        agree_on(world, name, digest, "call torch.manual_seed before building the model")
        return False
    return len(set(world.all_gather(name, digest))) > 1


def agree_on_data(world: World, feed: Feed) -> None:
    """Every rank reads the data itself, so all must read the same; the first batch stands for all."""

    def read() -> None:
        with world.exclusive:
            feed.read_until(feed.offset)

    agree(world, "first batch", read)
    digest = hashlib.sha256()
    for name, tensor in (feed.first_batch or {}).items():
        digest.update(name.encode() + str(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    fix = "give every rank a loader that yields the same batches in the same order (seed its shuffling)"
    agree_on(world, "first batch", digest.hexdigest()[:16], fix)


def _programs_digest(schedule: Schedule) -> str:
    """Of the beginning of every rank's program."""
    digest = hashlib.sha256()
    for rank in range(schedule.num_ranks):
        digest.update(" ".join(map(str, islice(schedule.program(rank), 1000))).encode() + b"\n")
    return digest.hexdigest()[:16]


def _weights_digest(model: nn.Module) -> str:
    """Of a sample of each initial tensor; those on `meta` have no values yet."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict(keep_vars=True).items():
        digest.update(name.encode())
        if not tensor.is_meta and tensor.numel():
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // 256)].cpu().double()
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]
