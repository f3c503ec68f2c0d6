"""A model of a user's own: its state there and back, weights that differ between ranks, hooks, optimizers."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vpipe
from tests.own_model import SOURCE
from vpipe.errors import PeerError, VPipeError
from vpipe.pipeline.threads import run_ranks

pytestmark = pytest.mark.usefixtures("capture_once")
OWN: dict[str, Any] = {}
exec(SOURCE, OWN)
torch.manual_seed(0)
MODEL = OWN["Net"]()


BATCHES = list(
    vpipe.Loader(OWN["Data"](40), 4)
)  # read once: samples draw random numbers, and ranks are threads


def in_ranks(work: Callable[[Any], Any], ranks: int = 2, model: Any = MODEL, **options: Any) -> list[Any]:
    """What `work` returns for the pipeline of each rank; `model` may be a list, one for each rank."""
    arguments = {
        "schedule": "1f1b",
        "optimizer": lambda params: torch.optim.AdamW(params, 0.01),
        "loss_fn": OWN["loss"],
        "minibatches": 2,
    } | options

    def run(world: Any) -> Any:
        built = model[world.rank] if isinstance(model, list) else model
        with vpipe.Pipeline(built, BATCHES[0], world=world, **arguments) as pipe:
            return work(pipe)

    return run_ranks(ranks, run)


def whole_state(pipe: vpipe.Pipeline) -> Any:
    return pipe.full_state_dict()


def trained_state(pipe: vpipe.Pipeline) -> Any:
    for _ in pipe.train(BATCHES[:8]):
        pass
    return pipe.full_state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_models_own_state_dict_there_and_back(precision: str) -> None:
    state, nothing = in_ranks(trained_state, precision=precision)
    assert nothing is None
    model = copy.deepcopy(MODEL)
    model.load_state_dict(state)  # strictly
    assert list(state) == list(MODEL.state_dict())
    assert state["head.weight"] is state["embed.weight"]
    assert "shift" not in state
    assert torch.equal(state["spare"], MODEL.spare)
    assert int(state["version"]) == 3
    assert not torch.equal(model.embed.weight, MODEL.embed.weight)
    assert state["embed.weight"].dtype is torch.float32
    assert torch.equal(state["kind.weight"], MODEL.kind.weight)  # frozen
    assert not torch.equal(state["embed.weight"], state["embed.weight"].bfloat16().float())  # not rounded


def test_a_state_of_another_model_is_refused() -> None:
    name, value = next(iter(MODEL.state_dict().items()))
    for state, message in (
        ({name: value[:1]}, rf"'{name}' with the shape \[1.*\], the model's has"),
        ({"no.such": value}, "the state has 'no.such', which is no parameter or buffer of the model"),
    ):
        with pytest.raises(VPipeError, match=message):
            in_ranks(lambda pipe, state=state: pipe.load_state_dict(state), ranks=1)


def test_the_state_of_a_model_on_meta_is_whole() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        model.extra = nn.Linear(2, 2)  # called, as the last of the children

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model[2](model[1](model[0](x))).sum()

    model.forward = forward  # type: ignore[method-assign]
    one = torch.ones(2, 4)

    def run(world: Any) -> Any:
        with vpipe.Pipeline(model, one, world=world, optimizer=torch.optim.SGD) as pipe:
            return pipe.full_state_dict()

    state = run_ranks(1, run)[0]
    assert list(state) == list(model.state_dict())
    assert not any(tensor.is_meta for tensor in state.values())


def rank_model(rank: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        return OWN["Net"]()  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"replicas": [1, 2], "ranks": 3}])
def test_weights_that_differ_are_those_of_rank_0(options: dict[str, Any]) -> None:
    ours = in_ranks(whole_state, model=[rank_model(rank) for rank in range(3)], **options)[0]
    theirs = rank_model(0).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_weights_on_rank_0_alone() -> None:
    """The other ranks may build the model on `meta`."""

    def build(rank: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        return model.to("meta") if rank else nn.Sequential(*(copy.deepcopy(first)))

    first = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def run(world: Any) -> Any:
        loss: Any = lambda output: output.mean()  # noqa: E731
        model = build(world.rank)
        with vpipe.Pipeline(
            model, torch.ones(2, 4), world=world, loss_fn=loss, optimizer=torch.optim.SGD
        ) as pipe:
            return pipe.full_state_dict()

    state = run_ranks(2, run)[0]
    assert all(torch.equal(state[name], tensor) for name, tensor in first.state_dict().items())


def test_weights_that_differ_can_be_refused() -> None:
    with pytest.raises(PeerError, match="another set of initial weights than rank 0"):
        in_ranks(whole_state, model=[rank_model(rank) for rank in range(3)], initial_weights="refuse")
    with pytest.raises(VPipeError, match="unknown initial_weights 'mine': choose from 'rank 0', 'refuse'"):
        in_ranks(whole_state, initial_weights="mine", ranks=1)


def test_hooks_that_would_not_run_are_named() -> None:
    model = copy.deepcopy(MODEL)
    model.layers[0].register_forward_hook(lambda *given: None)
    model.head.register_full_backward_hook(lambda *given: None)
    with pytest.warns(UserWarning, match="hooks on") as caught:
        in_ranks(lambda pipe: None, ranks=1, model=model)
    told = [str(warning.message) for warning in caught]
    assert any("forward hooks on 'layers.0': they ran once" in text for text in told)
    assert any("backward hooks on 'head': they will not run" in text for text in told)
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(
            1,
            lambda world: vpipe.Pipeline(
                normed, torch.ones(2, 4), world=world, loss_fn=torch.mean, optimizer=torch.optim.SGD
            ).close(),
        )


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "the model's parameters": (
        {"optimizer": lambda params: torch.optim.AdamW(MODEL.parameters())},
        r"took a parameter of shape .* that it was not given: .* not model.parameters\(\)",
    ),
    "an optimizer": (
        {"optimizer": torch.optim.AdamW(MODEL.parameters())},
        r"is of type AdamW, not a function: .* optimizer=lambda params: torch.optim.AdamW\(params, 1e-3\)",
    ),
    "a function of nothing": (
        {"optimizer": lambda: None},
        r"failed when it was called with a list of parameters: .* e.g. optimizer=lambda params",
    ),
    "a scheduler": (
        {"lr_scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(MODEL.parameters()), 1)},
        "lr_scheduler= is of type StepLR, not a function: give a function of the optimizer",
    ),
    "a scheduler's class": (
        {"lr_scheduler": torch.optim.lr_scheduler.StepLR},
        r"cannot be called with an optimizer alone: .*step_size.*lr_scheduler=lambda o",
    ),
    "an optimizer that computes the loss": (
        {"optimizer": torch.optim.LBFGS},
        "returned LBFGS, whose step computes the loss again: .* e.g. optimizer=lambda params",
    ),
    "a scheduler of another optimizer": (
        {
            "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
                torch.optim.SGD(MODEL.parameters())
            )
        },
        "returned a ReduceLROnPlateau of another optimizer than the one that it was given",
    ),
    "no scheduler": ({"lr_scheduler": lambda optimizer: None}, "returned NoneType, not a scheduler"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_with_optimizers(name: str) -> None:
    options, message = MISTAKES[name]
    with pytest.raises(VPipeError, match=message) as caught:
        in_ranks(lambda pipe: None, ranks=1, **options)
    assert "\n" not in str(caught.value)


def test_a_model_that_trains_nothing_is_told() -> None:
    frozen = copy.deepcopy(MODEL).requires_grad_(False)
    loss: Any = lambda pipe: pipe.evaluate(BATCHES[:2])  # noqa: E731
    assert in_ranks(loss, model=frozen)[0] > 0  # it can be evaluated
    with pytest.raises(
        VPipeError, match=r"nothing to train: none of the 14 parameters .* requires a gradient"
    ):
        in_ranks(trained_state, model=frozen)

    def detached(output: Any, targets: Any, weights: Any) -> Any:
        return OWN["loss"]({"logits": output["logits"].detach()}, targets, weights)

    with pytest.raises(
        VPipeError, match=r"the loss has no gradient for 'embed.weight' and the other parameters"
    ):
        in_ranks(trained_state, loss_fn=detached)


def test_a_scheduler_that_is_driven_by_a_metric(tmp_path: Path) -> None:
    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    def work(pipe: vpipe.Pipeline) -> tuple[list[float], Path]:
        rates = []
        for metric in (2.0, 1.0, 1.0):
            for _ in pipe.train(BATCHES[:4]):
                pass
            pipe.step_schedulers(metric)
            rates.append(pipe.learning_rate)
        return rates, pipe.save(tmp_path)

    (rates, path), other = in_ranks(work, lr_scheduler=plateau)
    assert rates == other[0] == pytest.approx([0.01, 0.01, 0.001])

    def resumed(pipe: vpipe.Pipeline) -> float:
        pipe.load(path)
        pipe.step_schedulers(1.0)
        return pipe.learning_rate

    assert in_ranks(resumed, lr_scheduler=plateau) == pytest.approx([0.0001] * 2)
    with pytest.raises(VPipeError, match="no lr_scheduler waits for a metric"):
        in_ranks(lambda pipe: pipe.step_schedulers(1.0))
