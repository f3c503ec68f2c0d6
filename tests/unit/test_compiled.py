"""Compiled blocks: the same training as the plain model, compiled once for equal layers and for sizes that vary."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests import models
from tests.examples import example, varied
from tests.waiting import TIMEOUT
from vpipe import Pipeline
from vpipe.config import RunConfig
from vpipe.errors import CompileError, VPipeError
from vpipe.graph import ModelGraph
from vpipe.pipeline.threads import run_ranks
from vpipe.stage import StageModule
from vpipe.stage.compiled import check_compiler, first_alone
from vpipe.stage.warm_up import compile_ahead
from vpipe.verify import verify

EAGER = "aot_eager"
"""Everything that torch.compile does but the compiling itself: quick, and the random numbers are a plain run's."""


def compiler_is_missing() -> str:
    try:
        check_compiler("inductor", torch.device("cpu"))
    except VPipeError as error:
        return str(error)
    return ""


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def _fresh_compiler(capture_once: None) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """Functions that were compiled since the test began."""
    return counters["stats"]["unique_graphs"]


def train(given: models.Example, batches: list[Any], **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one rank that has the whole model."""
    model, batch, loss_fn = given

    def work(world: Any) -> Any:
        with Pipeline(model, batch, optimizer=sgd, loss_fn=loss_fn, world=world, **options) as pipe:
            losses = [loss for _, loss in pipe.train(batches)]
            return losses, pipe.full_state_dict()

    return run_ranks(1, work)[0]


@pytest.mark.parametrize("schedule", ["zb-v", "pipedream"])
def test_schedules_train_as_the_plain_model_with_dropout(schedule: str) -> None:
    """Split backward and several stages a rank; whole backward and stale weights. Half of the blocks recomputed."""
    model, batch, loss_fn = example("bert", layers=2, dropout=0.1)
    batches = varied(batch, 100)
    result = verify(
        model,
        lambda number: batches[number],
        ranks=2,
        optimizer=sgd,
        loss_fn=loss_fn,
        updates=2,
        schedule=schedule,
        recompute_ratio=0.5,
        compile=EAGER,
        **({} if schedule == "pipedream" else {"minibatches": 3}),
    )
    assert result.ok, result.differences
    assert graphs() > 0


def test_odd_models_keep_their_numbers(captured: Callable[..., ModelGraph]) -> None:
    """Long skips, writes in place and running statistics: kept, recomputed and swapped, backward split."""
    given = example("unet_norm")
    batches = varied(given[1], 4)
    policies = [("keep", "recompute", "swap")[block % 3] for block in range(len(captured(*given).blocks))]
    options: dict[str, Any] = {"schedule": "zb-h1", "minibatches": 2, "policies": policies}
    losses, weights = train(given, batches, compile=EAGER, **options)
    expected, plain = train(given, batches, **options)
    assert losses == pytest.approx(expected, rel=1e-9)
    for name, tensor in plain.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-11)


def test_equal_layers_are_compiled_once(captured: Callable[..., ModelGraph]) -> None:
    def compiled(layers: int, split: bool) -> int:
        model, batch, loss_fn = example("bert", layers=layers, dropout=0.1)
        graph = captured(model, batch, loss_fn)
        stage = StageModule(graph.stages((len(graph.blocks),))[0], model, compile=EAGER, split=split)
        functions = [segment.function.graph for segment in stage._segments]
        return len({n.target for graph in functions for n in graph.nodes if n.name.startswith("compiled")})

    assert compiled(2, split=False) == compiled(3, split=False) == 4, (
        "embedding and attention, attention, feed-forward, head"
    )
    assert compiled(2, split=True) == compiled(3, split=True)


def test_sizes_that_vary_are_compiled_for_once() -> None:
    given = example("sequential", layers=2, dropout=0.1)
    inputs, labels = (torch.cat([tensor, tensor]) for tensor in given[1])
    batches = [(inputs[:size], labels[:size]) for size in (4, 4, 3, 5, 6, 2, 7, 8, 4)]
    train(given, batches[:2], minibatches=1, compile=EAGER)
    once = graphs()
    counters.clear()
    torch._dynamo.reset()
    losses, _ = train(given, batches, minibatches=1, compile=EAGER)
    assert graphs() == 2 * once > 0, "one for the first size, one for all others"
    expected, _ = train(given, batches, minibatches=1)
    assert losses == pytest.approx(expected, rel=1e-9)


@torch.library.custom_op("vpipe_tests::by_expert", mutates_args=())
def by_expert(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The rows of each expert times its own matrix: how many there are, only the values of a tensor tell."""
    parts = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


@by_expert.register_fake
def _(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(len(rows), weights.shape[-1])


def _by_expert_backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, counts = context.saved_tensors
    sizes = counts.tolist()  # no compiler knows them
    each = list(zip(gradient.split(sizes), rows.split(sizes), weights, strict=True))
    of_weights = [r.T @ g if len(r) else torch.zeros_like(w) for g, r, w in each]
    return torch.cat([g @ w.T for g, _, w in each]), torch.stack(of_weights), None


by_expert.register_autograd(
    _by_expert_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.experts = nn.Parameter(torch.randn(2, 8, 8) / 3)
        self.register_buffer("counts", torch.tensor([2, 4]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(by_expert(layer(x), self.experts, self.counts))
        return x.square().mean()


def test_operations_of_other_libraries_are_not_compiled() -> None:
    """Their backward may need sizes that a compiler does not know."""
    batches = [torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    torch.manual_seed(0)
    given: models.Example = Experts(), batches[0], None
    plain, compiled = (train(deepcopy(given), batches, compile=way, minibatches=2) for way in (None, EAGER))
    torch.testing.assert_close(compiled, plain)
    assert graphs()  # what is between them was compiled


@pytest.mark.long
@pytest.mark.skipif(bool(compiler_is_missing()), reason=compiler_is_missing())
def test_the_real_compiler_repeats_its_masks() -> None:
    """Recomputed blocks draw the masks of their forward, so the numbers are those of blocks that are kept.

    Without dropout they are also the plain model's. Its first use takes ten seconds of the C++ compiler; with `EAGER`
    blocks are recomputed above.
    """
    given = example("sequential", layers=1, dropout=0.5)
    batches = varied(given[1], 3)
    kept, _ = train(given, batches, minibatches=1, compile=True)
    again, _ = train(given, batches, minibatches=1, compile=True, recompute_ratio=1.0)
    assert again == pytest.approx(kept, rel=1e-9)
    plain = example("sequential", layers=1)
    losses, _ = train(plain, batches, minibatches=1, compile=True)
    expected, _ = train(plain, batches, minibatches=1)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert kept[0] != pytest.approx(expected[0], rel=1e-6), "dropout was off"


def test_no_compiler_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    given = example("sequential", layers=1)
    with pytest.raises(VPipeError, match=r"C\+\+ compiler 'no-such-compiler'.*CXX"):
        train(given, varied(given[1], 1), minibatches=1, compile=True)


def test_what_was_not_captured_is_not_compiled() -> None:
    given = example("untraceable")
    with pytest.raises(VPipeError, match=r"could not be captured.*leave compile out"):
        train(given, varied(given[1], 1), minibatches=1, compile=EAGER)


def test_a_failure_of_the_compiler_names_the_place() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no registers left")

    torch._dynamo.register_backend(broken, name="broken")
    given = example("sequential", layers=1)
    with pytest.raises(
        CompileError, match=r"rank 0, stage 0, action 0F0.*no registers left.*leave compile out"
    ):
        train(given, varied(given[1], 1), minibatches=1, compile="broken")


def test_the_configuration_has_it() -> None:
    assert RunConfig.model_validate({"compile": True}).compile
    assert not RunConfig.model_validate({}).compile


def test_processes_compile_a_region_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first call waits for others, and only for those of the same region."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inside, most = 0, 0
    began, go_on = Event(), Event()

    def compiling(value: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        began.set()
        assert go_on.wait(TIMEOUT)
        inside -= 1
        return value + 1

    same = [first_alone(compiling, "attention") for _ in range(3)]  # as of three processes
    with ThreadPoolExecutor(3) as ranks:
        results = [ranks.submit(rank, 1) for rank in same]
        assert began.wait(TIMEOUT)
        other = first_alone(lambda value: value, "head")
        assert [other(1), other(2)] == [1, 2]
        go_on.set()
        assert [result.result(TIMEOUT) for result in results] == [2, 2, 2]
    assert most == 1
    assert [rank(4) for rank in same] == [5, 5, 5]


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("1f1b", marks=pytest.mark.long)])
def test_all_is_compiled_before_the_first_minibatch(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and split backward, a block recomputed; then the ranks need not wait for each other's compiler."""
    ahead: list[int] = []

    def compile_and_count(*given: Any) -> None:
        compile_ahead(*given)
        ahead.append(graphs())

    monkeypatch.setattr("vpipe.pipeline.loop.compile_ahead", compile_and_count)
    given = example("bert", layers=2, dropout=0.1)
    train(given, [given[1]] * 2, schedule=schedule, minibatches=1, recompute_ratio=0.3, compile=EAGER)
    assert ahead == [graphs()]
    assert graphs() > 0
