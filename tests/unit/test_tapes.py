"""CUDA graphs without a GPU: which minibatch is played from which tape, and what is foreseen of their memory."""

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


class FakeDeck:
    """Instead of one that takes a GPU."""

    def __init__(self, module: Any, seed: int) -> None:
        self.module, self.seed = module, seed


class FakeTape:
    """What is recorded is run each time that the tape is played."""

    def __init__(self, deck: FakeDeck, place: Any, weights: Any, gradients: Any) -> None:
        self.deck, self.place, self.weights = deck, place, weights
        # By `data`: updates of other versions count as writes to this one, which nobody asks a tape about.
        self.stand_ins = {name: nn.Parameter(tensor.data) for name, tensor in weights.items()}
        for name, parameter in self.stand_ins.items():
            parameter.grad = gradients[name]

    def forward(self, minibatch: int) -> dict[str, Tensor]:
        module = self.deck.module
        needs = module.stage.needs_gradient
        self.leaves = {name: t.detach().requires_grad_(needs(name)) for name, t in self.place.inputs.items()}
        self.context = RandomContext(self.deck.seed, minibatch)
        with module.reading(self.stand_ins):
            outputs = module.forward(self.leaves, self.place.fields, self.context)
        self.roots = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
        for name, tensor in self.roots.items():
            self.place.gradients.setdefault(name, torch.zeros_like(tensor))
        return {name: tensor.detach().clone() for name, tensor in outputs.items()}

    def backward(self, minibatch: int) -> dict[str, Tensor]:
        gradients = [self.place.gradients[name] for name in self.roots]
        with self.deck.module.reading(self.stand_ins):
            torch.autograd.backward(list(self.roots.values()), gradients)
        return {n: leaf.grad.clone() for n, leaf in self.leaves.items() if leaf.grad is not None}

    def weight_gradients(self) -> None:
        for work in self.context.deferred:
            work()


class FakePlace:
    def __init__(self, inputs: dict[str, Tensor], fields: dict[str, Tensor]) -> None:
        self.inputs, self.fields = inputs, fields
        self.gradients: dict[str, Tensor] = {}

    def lay(self, inputs: dict[str, Tensor], fields: dict[str, Tensor]) -> None:
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
    monkeypatch.setattr(module, "StageCudaGraphs", FakeTape)
    monkeypatch.setattr(module, "CaptureContext", FakeDeck)
    monkeypatch.setattr(module, "SlotMemory", FakePlace)
    monkeypatch.setattr(module, "gc", Mock())  # half a second each time, and these tapes take no memory
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(assembly, "check_cuda_graphs", lambda device: None)


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


def test_minibatches_are_issued_until_one_has_run_to_its_end(
    stage: tuple[GraphPool, OptimizerWithWeightStashing],
) -> None:
    tapes, _ = stage
    assert tapes.seat({}, fields(1.0)) is None
    tapes.finished(None)
    seat = tapes.seat({}, fields(2.0))
    assert seat is not None
    assert seat.place.fields["x"].tolist() == [2.0, 2.0]
    assert tapes.seat({}, fields(3.0, count=5)) is None  # of another shape
    assert tapes.recorded == 1


def test_a_pipeline_in_its_steady_state_records_nothing(
    stage: tuple[GraphPool, OptimizerWithWeightStashing],
) -> None:
    """Three in flight and an update after each, as in the first stage of three: three places, and few tapes."""
    tapes, weights = stage
    tapes.finished(None)
    in_flight: list[tuple[int, GraphSlot]] = []
    recorded = []
    for minibatch in range(40):
        weights.load_new_params(minibatch)
        seat = tapes.seat({}, fields(minibatch))
        assert seat is not None
        assert isinstance(seat.tape, FakeTape)
        assert seat.tape.weights["w"].data_ptr() == weights.newest.tensors[0].data_ptr()
        assert seat not in [other for _, other in in_flight]
        in_flight.append((minibatch, seat))
        if len(in_flight) == 3:
            oldest, seat = in_flight.pop(0)
            assert seat.place.fields["x"].tolist() == [oldest, oldest]
            tapes.gather_gradients()
            weights.release(oldest)
            tapes.finished(seat)
            weights.step()
        recorded.append(tapes.recorded)
    assert recorded[-1] == recorded[12] <= 9


def test_gradients_gather_where_the_tapes_add_theirs(
    stage: tuple[GraphPool, OptimizerWithWeightStashing],
) -> None:
    tapes, weights = stage
    first, second = weights.model_parameters
    tapes.gather_gradients()
    assert first.grad is None  # nobody is on tape yet
    first.grad = torch.ones(3)
    tapes.finished(None)
    tapes.gather_gradients()  # a second minibatch of the update: what is there stays
    assert first.grad.tolist() == [1.0, 1.0, 1.0]
    assert second.grad is None  # no backward ever comes to it: an optimizer is to pass over it
    place = first.grad.data_ptr()
    weights.step()
    assert weights.newest.tensors[0].tolist() == [-1.0, -1.0, -1.0]
    assert first.grad is None
    tapes.gather_gradients()
    assert first.grad is not None
    assert first.grad.data_ptr() == place
    assert first.grad.tolist() == [0.0, 0.0, 0.0]
    first.grad += 2
    tapes.gather_gradients()
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
def test_a_pipeline_that_plays_trains_as_one_that_issues(
    small: Small, schedule: str, options: dict[str, Any]
) -> None:
    """Places, versions, gradients and what is issued between: all but the recording itself."""
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
            recorded = sum(stage.tapes.recorded for stage in pipe.runtime.stages.values() if stage.tapes)
            return losses, pipe.full_state_dict(), recorded

    (played, state, recorded), *_ = run_ranks(2, lambda world: work(world, True))
    (issued, expected, none), *_ = run_ranks(2, lambda world: work(world, False))
    assert recorded > 0
    assert none == 0
    assert played == pytest.approx(issued, rel=1e-12)
    assert state is not None
    assert expected is not None
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, msg=name)


CLOCK = FakeClock()
"""Moved by tapes that are played, and by nothing else."""
CALL, FORWARD, BACKWARD, WEIGHT_GRADIENT = 0.5, 3.0, 4.0, 2.0
"""Seconds that a tape takes to be played, and those for each block on it."""


class TimedTape(FakeTape):
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
        CLOCK.now += CALL + seconds * len(self.deck.module.stage.blocks)


@pytest.mark.usefixtures("fakes")
def test_profiles_are_measured_as_stages_are_played(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lap is the time of a tape, and what a call of it takes is told from what its blocks take."""
    monkeypatch.setattr(profiled, "check_cuda_graphs", lambda device: None)
    monkeypatch.setattr(profiled, "capture", capture_once)
    monkeypatch.setattr(module, "StageCudaGraphs", TimedTape)
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
        tapes = list(own._tapes.values())
        assert len(tapes) == 4  # whole and split, kept and recomputed
        # Of a module whose weights lie in two places in turn, for an update makes a new version while one is read.
        assert all(1 <= each.recorded <= 2 for each in tapes)


def test_what_is_foreseen_of_a_stage_on_tape() -> None:
    one = replace(block(kept_bytes=30, parameter_bytes=6), working_bytes=7, forward_bytes=4, update_bytes=5)
    issued = replace(profile(one, one, one), tied=(Tie(2, (0, 2)),))
    taped = replace(issued, device=replace(issued.device, graphs=True, workspace=1000, slack=50))
    found = simulate(taped, Plan((1, 1, 1), ("keep",) * 3), "pipedream", 12)
    boundary, lag = one.boundary_bytes, 3
    first, last = (1000 + taped.exchange_buffers(stage, stage + 1, lag) + 2 for stage in (0, 2))
    assert [rank.memory for rank in found.ranks] == [
        RankMemory(6, 12, 6 + 5, 12, 3 * (84 + 2 * boundary) + 7, 1000 + 2 * boundary + first),
        RankMemory(6, 6, 6 + 5, 12, 2 * (84 + 3 * boundary) + 7, 1000 + 4 * boundary + 1000),
        RankMemory(6, 0, 6 + 5, 12, 1 * (84 + boundary) + 7, 1000 + 2 * boundary + last),
    ]
    same = simulate(issued, Plan((1, 1, 1), ("keep",) * 3), "pipedream", 12)
    assert found.samples_per_second == same.samples_per_second  # times are the profile's


def test_a_forward_on_tape_finds_no_room_in_what_later_blocks_will_save() -> None:
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


def test_a_backward_on_tape_is_given_nothing_of_what_it_gives_back_unless_it_is_split() -> None:
    first, last = (
        replace(block(kept_bytes=kept), working_bytes=working) for kept, working in ((30, 20), (10, 7))
    )
    issued = profile(first, last)
    taped = replace(issued, device=replace(issued.device, graphs=True))
    assert backward_bytes(issued, 0, ["keep", "keep"]) == max(7, 20 - 10)
    assert backward_bytes(taped, 0, ["keep", "keep"]) == max(7, 20)
    split = [backward_bytes(made, 0, ["keep", "keep"], split=True) for made in (issued, taped)]
    assert split[0] == split[1]


@draws(60)
@given(
    st.lists(any_block, min_size=4, max_size=8),
    st.sampled_from(["1f1b", "zb-h1", "gpipe", "2bw", "vpipe", "interleaved"]),
    st.sampled_from([0.5, 0.7, 0.9, 1.0]),
)
def test_plans_for_tapes_fit(blocks: Any, schedule: str, part: float) -> None:
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
    assert "swap" not in found.policies  # it would be issued
    simulated = simulate(made, found.to_plan())
    assert max(rank.memory.total for rank in simulated.ranks) <= memory
    assert [p.memory.total for p in found.positions] == [
        simulated.ranks[position.ranks[0]].memory.total for position in found.positions
    ]


def test_where_no_plan_for_tapes_fits_that_is_said() -> None:
    device = DeviceCost(1000, 100.0, 100.0, graphs=True)
    blocks = (block(kept_bytes=30, parameter_bytes=6),) * 4
    taped = Profile(blocks, device, LinkCost(1e6, 0.0), 1)
    with pytest.raises(VPipeError, match=r"CUDA graphs in a memory of 10 bytes .* leave cuda_graphs out"):
        make_plan(taped, 2, 10, "vpipe")


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

    with pytest.raises(VPipeError, match="cuda_graphs are asked for on the device cpu: leave them out"):
        run_ranks(1, work)
    with pytest.raises(VPipeError, match="cuda_graphs are asked for on the device cpu: leave them out"):
        MeasuredModel(
            nn.Linear(4, 4), batch, nn.functional.mse_loss, optimizer=torch.optim.SGD, cuda_graphs=True
        )
