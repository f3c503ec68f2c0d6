"""Parameter groups: the plain model's own, whatever the partition, in every schedule and from a checkpoint."""

import copy
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tests import models
from tests.checkpoints import STOP, SYNCHRONOUS, UPDATES, check_resumes, run, steps, tensors
from tests.examples import example, varied
from vpipe import Pipeline, optimizer_groups
from vpipe.config import RunConfig
from vpipe.config.arguments import make_optimizer_factory
from vpipe.errors import PeerError, VPipeError
from vpipe.pipeline.threads import run_ranks
from vpipe.verify import verify, verify_config
from vpipe.verify.comparison import largest_difference
from vpipe.weights import NamedParameters, OptimizerFactory, OptimizerWithWeightStashing, learning_rate_policy

pytestmark = pytest.mark.usefixtures("capture_once")

NO_DECAY = ("*.bias", "*ln_*")
EMBEDDINGS = ("*.wte.*", "*.wpe.*")


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def plain_groups(named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Written out, with all three groups, of which any may be empty."""
    return [
        {
            "params": [p for n, p in named if not matches(n, NO_DECAY) and not matches(n, EMBEDDINGS)],
            "lr": 1e-2,
        },
        {"params": [p for n, p in named if matches(n, NO_DECAY)], "lr": 1e-2, "weight_decay": 0.0},
        {"params": [p for n, p in named if matches(n, EMBEDDINGS)], "lr": 1e-3},
    ]


def torch_groups(params: NamedParameters) -> Optimizer:
    return AdamW(plain_groups(params.named()), weight_decay=0.3)


def groups_that_are_not_empty(params: NamedParameters) -> Optimizer:
    return AdamW([group for group in plain_groups(params.named()) if group["params"]], weight_decay=0.3)


def by_patterns(*embeddings: str) -> OptimizerFactory:
    return optimizer_groups(
        (NO_DECAY[:1] if not embeddings else NO_DECAY, lambda ps: AdamW(ps, 1e-2, weight_decay=0)),
        *[(embeddings, lambda ps: AdamW(ps, 1e-3, weight_decay=0.3))] * bool(embeddings),
        rest=lambda ps: AdamW(ps, 1e-2, weight_decay=0.3),
    )


FACTORIES: dict[str, OptimizerFactory] = {
    "torch's groups": torch_groups,
    "without empty groups": groups_that_are_not_empty,
    "by patterns": by_patterns(*EMBEDDINGS),
}


def matrices_apart(params: NamedParameters) -> list[Optimizer | None]:
    """Torch's Muon for the matrices, AdamW for the rest."""
    matrices = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    return [torch.optim.Muon(matrices, 1e-2) if matrices else None, AdamW(rest, 1e-3) if rest else None]


def trained_plainly(given: models.Example, minibatches: int) -> dict[str, Tensor]:
    """By one optimizer over the whole model, written out."""
    model, batch, loss_fn = given
    assert loss_fn is None
    plain = copy.deepcopy(model).train()
    optimizer = AdamW(plain_groups(list(plain.named_parameters())), weight_decay=0.3)
    for update in range(3):
        for inputs in varied(batch, 3 * minibatches)[update * minibatches : (update + 1) * minibatches]:
            (plain(**inputs).loss / minibatches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in plain.named_parameters()}


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(("ranks", "options"), [(3, {"partition": (1, 1, 3)}), (3, {"replicas": (1, 2)})])
def test_equal_to_one_optimizer_over_the_whole_model(
    factory: str, ranks: int, options: dict[str, Any]
) -> None:
    given = example("gpt2", layers=2)
    model, batch, _ = given

    def train(world: Any) -> dict[str, Tensor] | None:
        with Pipeline(
            model, batch, optimizer=FACTORIES[factory], minibatches=2, world=world, **options
        ) as pipe:
            list(pipe.train(varied(batch, 6)))
            return pipe.full_state_dict()

    state = run_ranks(ranks, train)[0]
    expected = trained_plainly(given, 2)
    assert state is not None
    key_bias = slice(32, 64)  # its gradient is rounding alone, which Adam divides by itself
    for weights in (state, expected):
        for name in weights:
            if name.endswith("c_attn.bias"):
                weights[name] = weights[name].clone()
                weights[name][key_bias] = 0
    difference, where = largest_difference({name: state[name] for name in expected}, expected)
    assert difference < 1e-9, where


@pytest.mark.parametrize(
    ("factory", "ranks", "options"),
    [
        ("torch's groups", 2, {"schedule": "pipedream", "clip_norm": 0.1}),
        ("without empty groups", 3, {"schedule": "pipedream", "partition": (1, 1, 3)}),
        ("by patterns", 3, {"schedule": "2bw", "partition": (1, 1, 3)}),
        ("by patterns", 3, {"schedule": "vpipe", "replicas": (2, 1)}),
        ("torch's groups", 2, {"schedule": "zb-v", "minibatches": 3, "clip_norm": 0.1}),
    ],
)
def test_verified(factory: str, ranks: int, options: dict[str, Any]) -> None:
    model, batch, loss_fn = example("gpt2", layers=2, dropout=0.1)
    data = varied(batch, 64)
    result = verify(
        model, lambda n: data[n], ranks=ranks, optimizer=FACTORIES[factory], loss_fn=loss_fn, **options
    )
    assert result.ok, result


def test_a_wrong_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pipeline alone: the reference makes its groups from names too."""
    model, batch, loss_fn = example("sequential", dropout=0.1)
    right = NamedParameters.named
    monkeypatch.setattr(
        NamedParameters, "named", lambda self: [(f"{n}.bias", p) for n, p in right(self)], raising=True
    )
    result = verify(
        model,
        lambda n: varied(batch, n + 1)[n],
        ranks=2,
        optimizer=lambda ps: AdamW(
            [{"params": [p], "weight_decay": 0.3 * (not n.endswith(".bias"))} for n, p in ps.named()], 1e-2
        ),
        loss_fn=loss_fn,
        schedule="pipedream",
        updates=3,
    )
    assert not result.ok
    assert result.weights.where.split()[0].endswith(".weight")


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (torch_groups, SYNCHRONOUS),
        (groups_that_are_not_empty, {"schedule": "pipedream"}),
        (by_patterns(), {**SYNCHRONOUS, "precision": "bf16"}),
        (matrices_apart, {"schedule": "pipedream", "precision": "bf16"}),
        (matrices_apart, SYNCHRONOUS),
    ],
)
def test_resuming_equals_never_having_stopped(
    tmp_path: Path, factory: OptimizerFactory, options: dict[str, Any]
) -> None:
    saved = check_resumes(
        example("sequential", torch.float32, dropout=0.1),
        3,
        tmp_path,
        optimizer=factory,
        lr_scheduler=learning_rate_policy("cosine", 2, UPDATES),
        clip_norm=0.5,
        **options,
    )
    assert all(record["scheduler"]["last_epoch"] == saved.updates for record in saved.state["optimizers"])


def first_layers_apart(keep_empty: bool) -> OptimizerFactory:
    """Three groups with rates of their own, of which most stages hold one or two."""

    def make(params: NamedParameters) -> Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in params.named() if n in ("0.weight", "0.bias")], "lr": 3e-3},
            {"params": [p for n, p in params.named() if n.endswith(".weight") and n != "0.weight"]},
            {"params": [p for n, p in params.named() if n.endswith(".bias") and n != "0.bias"], "eps": 1e-4},
        ]
        return AdamW([group for group in groups if keep_empty or group["params"]], 1e-3, weight_decay=0.1)

    return make


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "from the first rate": learning_rate_policy("polynomial", 2, UPDATES),
    "from the last rate": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [2 * group["lr"] for group in optimizer.param_groups], total_steps=UPDATES + 1
    ),
}


@pytest.mark.parametrize(
    ("factory", "scheduler"),
    [
        (first_layers_apart(True), "from the last rate"),
        (first_layers_apart(False), "from the first rate"),
        (first_layers_apart(False), "one cycle"),
        (by_patterns(), "from the first rate"),
        (matrices_apart, "one cycle"),
    ],
)
def test_another_partition_goes_on_to_the_bit(
    tmp_path: Path, factory: OptimizerFactory, scheduler: str
) -> None:
    sequential = example("sequential", torch.float32, layers=3, dropout=0.1)
    options: dict[str, Any] = {
        **SYNCHRONOUS,
        "optimizer": factory,
        "lr_scheduler": SCHEDULERS[scheduler],
    }
    whole = run(sequential, 3, tmp_path / "whole", **options)
    middle, end = steps(tmp_path / "whole")
    expected = tensors(end)
    for ranks in (1, 2, 4):
        directory = tmp_path / str(ranks)
        second = run(sequential, ranks, directory, resume=middle, **options)
        assert second == {update: loss for update, loss in whole.items() if update >= STOP}
        got = tensors(steps(directory)[0])
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


NAMES = ("embeddings.weight", "layer.0.weight", "layer.0.bias", "LayerNorm.weight")


def made(
    factory: Callable[[NamedParameters], Any], names: Sequence[str] = NAMES, **options: Any
) -> OptimizerWithWeightStashing:
    parameters = {name: nn.Parameter(torch.ones(2)) for name in names}
    return OptimizerWithWeightStashing(parameters, factory, model_names=NAMES, **options)


def step(stage: OptimizerWithWeightStashing) -> None:
    for parameter in stage.model_parameters:
        parameter.grad = torch.ones_like(parameter)
    stage.step()


@pytest.mark.parametrize("merged", [False, True])
def test_new_hyperparameters_and_groups_hold_and_the_state_is_kept(merged: bool) -> None:
    apart = optimizer_groups(("*.bias", lambda ps: AdamW(ps, weight_decay=0)), rest=AdamW)
    policy = learning_rate_policy("polynomial", 0, 10)
    before = made(apart, lr_scheduler=policy)
    for _ in range(5):
        step(before)
    tensors, records = before.optimizer_state()
    changed = lambda ps: AdamW(ps, 0.1, betas=(0.8, 0.99), weight_decay=0.5)  # noqa: E731
    factory = changed if merged else optimizer_groups(("*.bias", changed), rest=changed)
    after = made(factory, lr_scheduler=policy)
    changes = after.load_optimizer_state(tensors, records)
    for optimizer in after.optimizers:
        (group,) = optimizer.param_groups
        assert (group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.99))
        assert group["lr"] == pytest.approx(0.1 * (1 - 5 / 10)), "where the schedule is, with the new rate"
        for parameter in group["params"]:
            assert optimizer.state[parameter]["step"] == 5
            assert torch.equal(
                optimizer.state[parameter]["exp_avg"], tensors[f"{after._name_of[parameter]}.exp_avg"]
            )
    assert changes.keys() == {"lr", "betas", "weight_decay"}
    assert changes["lr"][:2] == [1e-3, 0.1]
    assert changes["betas"][:2] == [[0.9, 0.999], [0.8, 0.99]]


def test_a_schedule_of_rates_goes_on_in_proportion_to_the_new_rate() -> None:
    falling = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    before = made(lambda ps: AdamW(ps, 1e-3), lr_scheduler=falling)
    step(before)
    step(before)
    after = made(lambda ps: AdamW(ps, 1e-2), lr_scheduler=falling)
    assert after.load_optimizer_state(*before.optimizer_state())["lr"][:2] == [1e-3, 1e-2]
    assert after.learning_rate == pytest.approx(1e-2 / 4)
    step(after)
    assert after.learning_rate == pytest.approx(1e-2 / 8)


def test_nothing_is_reported_where_nothing_changed() -> None:
    policy = learning_rate_policy("cosine", 2, 10)
    before = made(AdamW, lr_scheduler=policy)
    step(before)
    after = made(AdamW, lr_scheduler=policy)
    assert not after.load_optimizer_state(*before.optimizer_state())
    assert after.learning_rate == before.learning_rate


def test_counters_that_were_saved_apart_are_not_merged() -> None:
    saved = made(optimizer_groups(("*.bias", AdamW), rest=AdamW)).optimizer_state()
    for count, record in enumerate(saved[1]):
        record["groups"][0]["numbers"]["step"] = count
    with pytest.raises(
        VPipeError, match=r"in one optimizer group, but were saved with step \d and \d: resume"
    ):
        made(AdamW).load_optimizer_state(*saved)


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, 0.1)


def test_a_plain_function_is_given_a_plain_list() -> None:
    seen: list[Any] = []

    def make(params: list[nn.Parameter]) -> Optimizer:
        seen.append(params)
        return sgd(params)

    stage = made(make, tied=["embeddings.weight"])
    assert [len(params) for params in seen] == [3, 1]
    assert seen[0] == stage.master_parameters[1:]
    assert [params.names for params in seen] == [list(NAMES[1:]), ["embeddings.weight"]]


def test_torch_takes_the_pairs_themselves() -> None:
    (optimizer,) = made(lambda params: sgd(params.named())).base_optimizers
    assert optimizer.param_groups[0]["param_names"] == list(NAMES)


def test_a_group_that_a_stage_does_not_have() -> None:
    factory = optimizer_groups(("*.bias", sgd), rest=lambda params: AdamW(params, 0.2))
    stage = made(factory, ["layer.0.weight", "LayerNorm.weight"])
    assert [type(optimizer) for optimizer in stage.optimizers] == [AdamW]
    assert made(factory, ["layer.0.bias"]).learning_rate == 0.1
    assert made(factory).learning_rate == 0.2, "that of the rest"


def test_every_optimizer_has_a_scheduler_that_is_stepped() -> None:
    factory = optimizer_groups(("*.bias", sgd), rest=lambda params: AdamW(params, 0.2))

    def halving(optimizer: Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    stage = made(factory, lr_scheduler=halving, tied=["embeddings.weight"])
    for parameter in stage.model_parameters:
        parameter.grad = torch.ones_like(parameter)
    stage.step({"embeddings.weight": torch.ones(2)})
    assert [optimizer.param_groups[0]["lr"] for optimizer in stage.optimizers] == [0.1, 0.05, 0.1]


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda ps: [sgd(ps), sgd(ps[:1])], "put parameter 'embeddings.weight' into 2 groups"),
        (lambda ps: sgd([{"params": ps}, {"params": ps[:1]}]), "appear in more than one parameter group"),
        (lambda ps: sgd(ps[1:]), "put parameter 'embeddings.weight' into no groups.*requires_grad_"),
        (lambda ps: [sgd(ps), sgd([])], "empty parameter list.*leave that optimizer out"),
        (lambda ps: sgd([*ps, nn.Parameter(torch.ones(3))]), r"shape \(3,\) that it was not given"),
        (lambda ps: [sgd(ps), 3], "returned int"),
        (lambda ps: None, "returned NoneType"),
        (sgd([nn.Parameter(torch.ones(1))]), "is of type SGD, not a function"),
        (
            optimizer_groups(("*.biass", sgd), rest=sgd),
            r"entry 0: '\*.biass' matches none of the model's 4 trained parameters: did you mean one of 'layer.0.bias'",
        ),
        (optimizer_groups(("*nrom*", sgd), rest=sgd), r"did you mean one of 'LayerNorm.weight'\?"),
        (optimizer_groups(("*norm*", sgd), rest=sgd), r"did you mean one of 'LayerNorm.weight'\?"),
        (
            optimizer_groups((["*.bias", "xyz"], sgd), rest=sgd),
            "'xyz' matches none.*such as 'embeddings.weight'",
        ),
        (
            optimizer_groups(("*", sgd), ("*.bias", sgd), rest=sgd),
            r"entry 1: earlier entries match every .*'\*.bias'",
        ),
    ],
)
def test_mistakes(factory: Any, message: str) -> None:
    with pytest.raises(VPipeError, match=message):
        made(factory)


CONFIGURED: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 32,
    "sequence_length": 8,
    "batch_size": 2,
    "stages": 2,
    "learning_rate": 0.01,
    "weight_decay": 0.1,
    "optimizer_groups": [
        {"match": ["*.bias", "*Norm*"], "weight_decay": 0},
        {"match": "*embeddings*", "learning_rate": 1e-3},
        {"match": "*.weight", "optimizer": "sgd"},
    ],
}


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_configured_run(schedule: str) -> None:
    result = verify_config(RunConfig(**CONFIGURED, schedule=schedule), updates=3)
    assert result.ok, result


def test_the_settings_of_a_configuration() -> None:
    names = ("bert.embeddings.word.weight", "a.weight", "a.bias", "other")
    parameters = {name: nn.Parameter(torch.ones(2, 2)) for name in names}
    factory = make_optimizer_factory(RunConfig(**CONFIGURED))
    stage = OptimizerWithWeightStashing(parameters, factory)
    found = {
        stage._name_of[group["params"][0]]: (type(optimizer).__name__, group["lr"], group["weight_decay"])
        for optimizer in stage.optimizers
        for group in optimizer.param_groups
    }
    assert found == {
        "other": ("AdamW", 0.01, 0.1),
        "a.bias": ("AdamW", 0.01, 0),
        "bert.embeddings.word.weight": ("AdamW", 0.001, 0.1),
        "a.weight": ("SGD", 0.01, 0.1),
    }


def test_a_pattern_of_a_configuration_that_matches_nothing() -> None:
    config = RunConfig(**CONFIGURED | {"optimizer_groups": [{"match": "*.encodr.*"}]})
    with pytest.raises(
        VPipeError, match=r"config: optimizer_groups, entry 0: '\*.encodr.\*' matches .*bert.encoder"
    ):
        verify_config(config, updates=1)


ON_OTHER_RANKS: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"optimizer": sgd}, r"another optimizer than rank 0: SGD of .* and AdamW of"),
    "rate": ({"optimizer": lambda ps: AdamW(ps, 0.5)}, r"than rank 0: AdamW of .*lr 0.5.* and .*lr 0.001"),
    "decay": ({"optimizer": lambda ps: AdamW(ps, weight_decay=0.5)}, r"weight_decay 0.5"),
    "groups": (
        {"optimizer": optimizer_groups(("*.bias", AdamW), rest=AdamW)},
        r"than rank 0: AdamW of .*; AdamW of",
    ),
    "schedule": (
        {"lr_scheduler": learning_rate_policy("step", 0, 10)},
        r"another optimizer than rank 0: .*LambdaLR",
    ),
}


@pytest.mark.parametrize("what", ON_OTHER_RANKS)
@pytest.mark.usefixtures("capture_once")
def test_ranks_must_have_the_same_optimizers(what: str) -> None:
    model, batch, loss_fn = example("sequential", torch.float32)
    other, message = ON_OTHER_RANKS[what]
    same: dict[str, Any] = {"optimizer": AdamW, "lr_scheduler": learning_rate_policy("cosine", 0, 10)}

    def work(world: Any) -> None:
        Pipeline(model, batch, loss_fn=loss_fn, world=world, **same | (other if world.rank else {})).close()

    with pytest.raises(PeerError, match=message):
        run_ranks(2, work)
