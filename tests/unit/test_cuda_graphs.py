"""CUDA graphs without a GPU: the slots and graphs that minibatches get, and the memory that is predicted for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.captures import capture_once
from tests.drawing import draws
from tests.fake_clock import FakeClock
from tests.unit.test_plan_optimal import block as any_block
from tests.unit.test_simulate_time import block, profile
from vpipe import Pipeline
from vpipe.cost import DeviceCost, LinkCost, Plan, Profile, Tie, backward_bytes, forward_bytes
from vpipe.errors import VPipeError
from vpipe.pipeline import assembly
from vpipe.pipeline.threads import run_ranks
from vpipe.plan import plan as make_plan
from vpipe.profile import model as profiled
from vpipe.profile.cuda_graph_stage import MeasuredGraphStage
from vpipe.profile.model import MeasuredModel
from vpipe.simulate import RankMemory, simulate
from vpipe.stage import RandomContext
from vpipe.stage import graph_pool as module
from vpipe.stage.graph_pool import GraphPool, GraphSlot
from vpipe.weights import OptimizerWithWeightStashing


class FakeCaptureContext:
    """One that needs no GPU."""

    device = torch.device("cpu")

    def __init__(self, module: Any, seed: int, pool: Any = None) -> None:
        self.module, self.seed = module, seed


class FakeGraphs:
    """Runs eagerly at each replay what would have been captured."""

    def __init__(self, capture: FakeCaptureContext, memory: Any, weights: Any, gradients: Any) -> None:
        self.capture, self.memory, self.weights = capture, memory, weights
        # By `data`: autograd counts updates of other versions as writes to this one. A replay does not check that.
        self.parameters = {name: nn.Parameter(tensor.data) for name, tensor in weights.items()}
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]

    def forward(self, minibatch: int) -> dict[str, Tensor]:
        module = self.capture.module
        needs = module.stage.needs_gradient
        self.leaves = {name: t.detach().requires_grad_(needs(name)) for name, t in self.memory.inputs.items()}
        self.context = RandomContext(self.capture.seed, minibatch)
        with module.reading(self.parameters):
            outputs = module.forward(self.leaves, self.memory.fields, self.context)
        self.roots = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
        for name, tensor in self.roots.items():
            self.memory.gradients.setdefault(name, torch.zeros_like(tensor))
        return {name: tensor.detach().clone() for name, tensor in outputs.items()}

    def backward(self, minibatch: int) -> dict[str, Tensor]:
        gradients = [self.memory.gradients[name] for name in self.roots]
        with self.capture.module.reading(self.parameters):
            torch.autograd.backward(list(self.roots.values()), gradients)
        return {n: leaf.grad.clone() for n, leaf in self.leaves.items() if leaf.grad is not None}

    def weight_gradients(self) -> None:
        for work in self.context.deferred:
            work()


class FakeSlotMemory:
    def __init__(self, inputs: dict[str, Tensor], fields: dict[str, Tensor]) -> None:
        self.inputs, self.fields = inputs, fields
        self.gradients: dict[str, Tensor] = {}

    def load(self, inputs: dict[str, Tensor], fields: dict[str, Tensor]) -> None:
        for own, arrived in ((self.inputs, inputs), (self.fields, fields)):
            for name, tensor in own.items():
                tensor.copy_(arrived[name])


class FakeStage:
    fields = ("x",)
    index = 3


class FakeModule:
    stage = FakeStage()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "StageCudaGraphs", FakeGraphs)
    monkeypatch.setattr(module, "CaptureContext", FakeCaptureContext)
    monkeypatch.setattr(module, "SlotMemory", FakeSlotMemory)
    monkeypatch.setattr(module, "gc", Mock())  # half a second each time, and fakes take no memory
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(assembly, "check_cuda_graphs", lambda *_: None)


@pytest.fixture
def stage(fakes: None) -> tuple[GraphPool, OptimizerWithWeightStashing]:
    weights = OptimizerWithWeightStashing(
        {"w": nn.Parameter(torch.zeros(3)), "v": nn.Parameter(torch.zeros(2))},
        lambda parameters: torch.optim.SGD(parameters, 1.0),
        versions=3,
    )
    return GraphPool(FakeModule(), weights, 0), weights  # type: ignore[arg-type]


def fields(value: float, count: int = 2) -> dict[str, Tensor]:
    return {"x": torch.full((count,), value), "not read here": torch.zeros(7)}


def test_minibatches_run_eagerly_until_the_first_has_finished(
    stage: tuple[GraphPool, OptimizerWithWeightStashing],
) -> None:
    pool, _ = stage
    assert pool.take_slot({}, fields(1.0)) is None
    pool.finish(None)
    slot = pool.take_slot({}, fields(2.0))
    assert slot is not None
    assert slot.memory.fields["x"].tolist() == [2.0, 2.0]
    assert pool.take_slot({}, fields(3.0, count=5)) is None  # of another shape
    assert pool.captured == 1


def test_a_pipeline_in_its_steady_state_captures_nothing(
    stage: tuple[GraphPool, OptimizerWithWeightStashing],
) -> None:
    """Three in flight and an update after each, as in the first stage of three: three slots, and few graphs."""
    pool, weights = stage
    pool.finish(None)
    in_flight: list[tuple[int, GraphSlot]] = []
    captured = []
    for minibatch in range(40):
        weights.load_new_params(minibatch)
        slot = pool.take_slot({}, fields(minibatch))
        assert slot is not None
        assert isinstance(slot.current, FakeGraphs)
        assert slot.current.weights["w"].data_ptr() == weights.current.tensors[0].data_ptr()
        assert slot not in [other for _, other in in_flight]
        in_flight.append((minibatch, slot))
        if len(in_flight) == 3:
            oldest, slot = in_flight.pop(0)
            assert slot.memory.fields["x"].tolist() == [oldest, oldest]
            pool.bind_gradients()
            weights.release(oldest)
            pool.finish(slot)
            weights.step()
        captured.append(pool.captured)
    assert captured[-1] == captured[12] <= 9


def test_gradients_are_summed_where_the_graphs_add_theirs(
    stage: tuple[GraphPool, OptimizerWithWeightStashing],
) -> None:
    pool, weights = stage
    first, second = weights.model_parameters
    pool.bind_gradients()
    assert first.grad is None  # nothing is captured yet
    first.grad = torch.ones(3)
    pool.finish(None)
    pool.bind_gradients()  # a second minibatch of the update: what is there stays
    assert first.grad.tolist() == [1.0, 1.0, 1.0]
    assert second.grad is None  # no backward ever comes to it: the optimizer must skip it
    address = first.grad.data_ptr()
    weights.step()
    assert weights.current.tensors[0].tolist() == [-1.0, -1.0, -1.0]
    assert first.grad is None
    pool.bind_gradients()
    assert first.grad is not None
    assert first.grad.data_ptr() == address
    assert first.grad.tolist() == [0.0, 0.0, 0.0]
    first.grad += 2
    pool.bind_gradients()
    assert first.grad.tolist() == [2.0, 2.0, 2.0]


class Small(nn.Module):
    """With dropout, a parameter that is shared, and one that is read but has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.constant = nn.Parameter(torch.ones(6))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = nn.functional.dropout(torch.tanh(layer(hidden)), 0.2, self.training)
        hidden = self.norm(hidden) + self.constant.detach()
        return hidden @ self.embedding.weight.T


@pytest.fixture(scope="module")
def small() -> Small:
    """One for all tests, so that it is captured once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small().double()


@pytest.mark.usefixtures("fakes", "capture_once")
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("gpipe", {"minibatches": 4, "recompute_ratio": 1.0}),
        ("1f1b", {"minibatches": 4, "recompute_ratio": 0.5}),
        ("zb-h1", {"minibatches": 4}),
        ("zb-v", {"minibatches": 4}),
        ("pipedream", {}),
        ("2bw", {"update_interval": 2}),
    ],
)
def test_a_pipeline_with_graphs_trains_as_an_eager_one(
    small: Small, schedule: str, options: dict[str, Any]
) -> None:
    """Slots, versions, gradients and eager minibatches between replayed ones: all but the capture itself."""
    torch.manual_seed(0)
    sizes = [4] * 9 + [3] + [4] * 6  # one of another shape
    data = [(torch.randint(11, (size,)), torch.randint(11, (size,))) for size in sizes]

    def work(world: Any, cuda_graphs: bool) -> tuple[list[float], dict[str, Tensor] | None, int]:
        with Pipeline(
            small,
            data[0],
            loss_fn=nn.functional.cross_entropy,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
            schedule=schedule,
            device="cpu",
            world=world,
            cuda_graphs=cuda_graphs,
            **options,
        ) as pipe:
            losses = [loss for _, loss in pipe.train(data)]
            losses.append(pipe.evaluate(data[:2]))
            losses += [loss for _, loss in pipe.train(data)]
            pools = [stage.graph_pool for stage in pipe.runtime.stages.values()]
            captured = sum(pool.captured for pool in pools if pool)
            return losses, pipe.full_state_dict(), captured

    (replayed, state, captured), *_ = run_ranks(2, lambda world: work(world, True))
    (eager, expected, none), *_ = run_ranks(2, lambda world: work(world, False))
    assert captured > 0
    assert none == 0
    assert replayed == pytest.approx(eager, rel=1e-12)
    assert state is not None
    assert expected is not None
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, msg=name)


CLOCK = FakeClock()
"""Moved by replays, and by nothing else."""
CALL, FORWARD, BACKWARD, WEIGHT_GRADIENT = 0.5, 3.0, 4.0, 2.0
"""Seconds of a replay, and those for each of its blocks."""


class TimedGraphs(FakeGraphs):
    def forward(self, minibatch: int) -> dict[str, Tensor]:
        self._take(FORWARD)
        return super().forward(minibatch)

    def backward(self, minibatch: int) -> dict[str, Tensor]:
        self._take(BACKWARD)
        return super().backward(minibatch)

    def weight_gradients(self) -> None:
        self._take(WEIGHT_GRADIENT)
        super().weight_gradients()

    def _take(self, seconds: float) -> None:
        CLOCK.now += CALL + seconds * len(self.capture.module.stage.blocks)


@pytest.mark.usefixtures("fakes")
def test_profiles_are_measured_from_replays(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lap is the time of a replay, and the cost of its launch is separated from that of its blocks."""
    monkeypatch.setattr(profiled, "check_cuda_graphs", lambda *_: None)
    monkeypatch.setattr("vpipe.pipeline.captured.capture", capture_once)
    monkeypatch.setattr(module, "StageCudaGraphs", TimedGraphs)
    monkeypatch.setattr("vpipe.profile.measured_stage.clock_of", lambda device: CLOCK)
    monkeypatch.setattr("vpipe.profile.rounds.perf_counter", FakeClock(step=1.0))
    batch = (torch.randint(11, (4,)), torch.randint(11, (4,)))
    bench = MeasuredModel(
        small,
        batch,
        nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.0),
        cuda_graphs=True,
        run_length=2,
    )
    device, link = DeviceCost(1000, 100.0, 100.0), LinkCost(1e6, 0.0)
    made = bench.measure(0.0, device, link)
    assert made.device.graphs
    assert made.device.slack > 0
    assert made.device.overhead == pytest.approx(CALL)
    share = (CALL + BACKWARD) / (CALL + BACKWARD + CALL + WEIGHT_GRADIENT)
    expected = pytest.approx((FORWARD, BACKWARD, BACKWARD * share))
    assert all((cost.forward, cost.backward, cost.input_gradient) == expected for cost in made.blocks)
    for own in bench.stages:
        assert isinstance(own, MeasuredGraphStage)
        pools = list(own._pools.values())
        assert len(pools) == 4  # whole and split, kept and recomputed
        # A module's weights have two addresses in turn: an update makes a new version while one is read.
        assert all(1 <= pool.captured <= 2 for pool in pools)


def test_predicted_memory_of_a_stage_with_graphs() -> None:
    one = replace(block(kept_bytes=30, parameter_bytes=6), working_bytes=7, forward_bytes=4, update_bytes=5)
    eager = replace(profile(one, one, one), tied=(Tie(2, (0, 2)),))
    graphs = replace(eager, device=replace(eager.device, graphs=True, workspace=1000, slack=50))
    found = simulate(graphs, Plan((1, 1, 1), ("keep",) * 3), "pipedream", 12)
    boundary, lag = one.boundary_bytes, 3
    first, last = (1000 + graphs.exchange_buffers(stage, stage + 1, lag) + 2 for stage in (0, 2))
    assert [rank.memory for rank in found.ranks] == [
        RankMemory(6, 12, 6 + 5, 12, 3 * (84 + 2 * boundary) + 7, 1000 + 2 * boundary + first),
        RankMemory(6, 6, 6 + 5, 12, 2 * (84 + 3 * boundary) + 7, 1000 + 4 * boundary + 1000),
        RankMemory(6, 0, 6 + 5, 12, 1 * (84 + boundary) + 7, 1000 + 2 * boundary + last),
    ]
    same = simulate(eager, Plan((1, 1, 1), ("keep",) * 3), "pipedream", 12)
    assert found.samples_per_second == same.samples_per_second  # times are the profile's


def test_a_captured_forward_cannot_reuse_what_later_blocks_will_save() -> None:
    blocks = [
        replace(block(kept_bytes=kept), forward_bytes=passing)
        for kept, passing in ((30, 50), (20, 5), (10, 7))
    ]
    made = profile(*blocks)
    assert forward_bytes(made, 0, ["keep"] * 3) == 50 - 20 - 10
    assert forward_bytes(made, 1, ["keep"] * 2) == 7
    entered = blocks[0].boundary_bytes
    assert forward_bytes(made, 0, ["keep", "recompute", "recompute"]) == 50 - 2 * entered
    assert forward_bytes(made, 0, ["recompute"] * 3) == 0


def test_a_captured_backward_does_not_reuse_what_it_frees_unless_it_is_split() -> None:
    first, last = (
        replace(block(kept_bytes=kept), working_bytes=working) for kept, working in ((30, 20), (10, 7))
    )
    eager = profile(first, last)
    graphs = replace(eager, device=replace(eager.device, graphs=True))
    assert backward_bytes(eager, 0, ["keep", "keep"]) == max(7, 20 - 10)
    assert backward_bytes(graphs, 0, ["keep", "keep"]) == max(7, 20)
    split = [backward_bytes(made, 0, ["keep", "keep"], split=True) for made in (eager, graphs)]
    assert split[0] == split[1]


@draws(60)
@given(
    st.lists(any_block, min_size=4, max_size=8),
    st.sampled_from(["1f1b", "zb-h1", "gpipe", "2bw", "vpipe", "interleaved"]),
    st.sampled_from([0.5, 0.7, 0.9, 1.0]),
)
def test_plans_for_graphs_fit(blocks: Any, schedule: str, part: float) -> None:
    device = DeviceCost(1000, 100.0, 100.0, graphs=True, swapped_in=3)
    made = Profile(tuple(blocks), device, LinkCost(1e6, 0.0), 1)
    chunks = 2 if schedule == "interleaved" else None
    wide = make_plan(made, 2, 10**9, schedule, 4, chunks=chunks)
    memory = max(1, int(part * max(position.memory.total for position in wide.positions)))
    try:
        found = make_plan(made, 2, memory, schedule, 4, chunks=chunks)
    except VPipeError:
        assert part < 1.0
        return
    assert "swap" not in found.policies  # such a stage would run eagerly
    simulated = simulate(made, found.to_plan())
    assert max(rank.memory.total for rank in simulated.ranks) <= memory
    assert [p.memory.total for p in found.positions] == [
        simulated.ranks[position.ranks[0]].memory.total for position in found.positions
    ]


def test_an_error_says_that_no_plan_for_graphs_fits() -> None:
    device = DeviceCost(1000, 100.0, 100.0, graphs=True)
    blocks = (block(kept_bytes=30, parameter_bytes=6),) * 4
    graphs = Profile(blocks, device, LinkCost(1e6, 0.0), 1)
    with pytest.raises(VPipeError, match=r"CUDA graphs in a memory of 10 bytes .* leave cuda_graphs out"):
        make_plan(graphs, 2, 10, "vpipe")


class ScarceGraphs(FakeGraphs):
    """There is memory for so many sets."""

    room = 0
    error: RuntimeError = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.")

    def __init__(self, *arguments: Any) -> None:
        if ScarceGraphs.room == 0:
            raise ScarceGraphs.error
        ScarceGraphs.room -= 1
        super().__init__(*arguments)


class FakeLaunchTimes:
    """Of a host that is slower than its device, or not."""

    slower = True

    def __init__(self, device: torch.device) -> None:
        self.parts = 0

    @contextmanager
    def timing(self) -> Iterator[None]:
        yield
        self.parts += 1

    def host_is_slower(self) -> bool:
        assert self.parts == 2, "its forward and its backward"
        return FakeLaunchTimes.slower


def train(small: Small, cuda_graphs: bool | str, updates: int = 6) -> tuple[list[float], int, list[bool]]:
    """On one rank: losses, sets of graphs, and whether gradients have fixed memory."""
    drawn = torch.Generator().manual_seed(0)
    data = [tuple(torch.randint(11, (2, 4), generator=drawn)) for _ in range(4 * updates)]

    def work(world: Any) -> tuple[list[float], int, list[bool]]:
        with Pipeline(
            small,
            data[0],
            loss_fn=nn.functional.cross_entropy,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01),
            schedule="gpipe",
            minibatches=4,
            device="cpu",
            world=world,
            cuda_graphs=cuda_graphs,
        ) as pipe:
            losses = [loss for _, loss in pipe.train(data)]
            pools = [pool for stage in pipe.runtime.stages.values() if (pool := stage.graph_pool)]
            return losses, sum(pool.captured for pool in pools), [bool(pool._bound) for pool in pools]

    (found,) = run_ranks(1, work)
    return found


@pytest.mark.usefixtures("fakes", "capture_once")
@pytest.mark.parametrize("room", [0, 1, 2])
def test_without_memory_for_more_graphs_minibatches_run_eagerly(
    small: Small, room: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "StageCudaGraphs", ScarceGraphs)
    monkeypatch.setattr(ScarceGraphs, "room", room)
    losses, captured, fixed = train(small, True)
    assert captured == room
    assert fixed == [room > 0]
    said = [line for line in capsys.readouterr().err.splitlines() if "CUDA graphs" in line]
    kept = f"{room} sets are replayed, other minibatches" if room else "all minibatches"
    assert said == [f"stage 0, CUDA graphs: {module.NO_MEMORY}; {kept} run eagerly"]
    assert losses == pytest.approx(train(small, False)[0], rel=1e-12)


@pytest.mark.usefixtures("fakes", "capture_once")
@pytest.mark.parametrize(("room", "kinds"), [(0, 3), (5, 3), (1000, 0)])
def test_a_profile_without_memory_for_graphs_measures_eager_blocks(
    small: Small, room: int, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiled, "check_cuda_graphs", lambda *_: None)
    monkeypatch.setattr("vpipe.profile.rounds.perf_counter", FakeClock(step=1.0))
    monkeypatch.setattr(module, "StageCudaGraphs", ScarceGraphs)
    monkeypatch.setattr(ScarceGraphs, "room", room)
    bench = MeasuredModel(
        small,
        (torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)),
        nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.0),
        cuda_graphs=True,
    )
    made = bench.measure(0.0, DeviceCost(1000, 100.0, 100.0), LinkCost(1e6, 0.0))
    assert made.device.graphs
    assert made.device.eager_kinds == kinds
    assert all(block.forward > 0 and block.backward > 0 for block in made.blocks)


@pytest.fixture
def as_on_a_gpu(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` has graphs on this CPU too."""
    monkeypatch.setattr(module, "LaunchTimes", FakeLaunchTimes)
    monkeypatch.setattr(assembly, "_may_replay", lambda *_: True)


@pytest.mark.usefixtures("as_on_a_gpu", "capture_once")
@pytest.mark.parametrize("slower", [True, False])
def test_auto_replays_where_the_host_is_slower(
    small: Small, slower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLaunchTimes, "slower", slower)
    losses, captured, fixed = train(small, "auto")
    assert (captured > 0, fixed) == (slower, [slower])
    assert losses == pytest.approx(train(small, False)[0], rel=1e-12)


@pytest.mark.usefixtures("as_on_a_gpu", "capture_once")
def test_auto_leaves_what_training_needs_at_its_peak(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [1000, 700, 400, 100]  # each set takes 300, and training needs 350 at its peak

    def available(device: torch.device) -> int:
        return left[len(made)]

    made: list[FakeGraphs] = []

    class CountedGraphs(FakeGraphs):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(module, "StageCudaGraphs", CountedGraphs)
    monkeypatch.setattr(module, "available_memory", available)
    monkeypatch.setattr(module, "peak_memory", lambda device: 350)
    monkeypatch.setattr(module, "used_memory", lambda device: 0)
    assert train(small, "auto")[1] == 2


@pytest.mark.usefixtures("as_on_a_gpu", "capture_once")
def test_what_cannot_be_captured_runs_eagerly_with_auto_and_is_an_error_else(
    small: Small, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "StageCudaGraphs", ScarceGraphs)
    monkeypatch.setattr(
        ScarceGraphs, "error", RuntimeError("operation not permitted when stream is capturing")
    )
    assert train(small, "auto")[1] == 0
    assert "it cannot be captured: operation not permitted" in capsys.readouterr().err
    with pytest.raises(
        VPipeError, match="stage 0 cannot be captured as CUDA graphs: operation not permitted"
    ):
        train(small, True)
    monkeypatch.setattr(ScarceGraphs, "error", RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train(small, "auto")


def test_auto_on_a_cpu_is_eager(small: Small) -> None:
    assert train(small, "auto", updates=1)[1:] == (0, [])
    with pytest.raises(VPipeError, match="cuda_graphs is 'maybe': give True, False or 'auto'"):
        train(small, "maybe", updates=1)


def test_cuda_graphs_on_a_cpu_are_refused() -> None:
    batch = (torch.zeros(2, 4), torch.zeros(2, 4))

    def work(world: Any) -> None:
        Pipeline(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            batch,
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            device="cpu",
            world=world,
            cuda_graphs=True,
        )

    with pytest.raises(VPipeError, match="cuda_graphs are requested on the device cpu: leave them out"):
        run_ranks(1, work)
    with pytest.raises(VPipeError, match="cuda_graphs are requested on the device cpu: leave them out"):
        MeasuredModel(
            nn.Linear(4, 4), batch, nn.functional.mse_loss, optimizer=torch.optim.SGD, cuda_graphs=True
        )
