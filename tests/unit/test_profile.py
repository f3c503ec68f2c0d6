"""The profile: what it counts is exact, what it times adds up, and equal blocks are measured once.

What real clocks say of a machine is shown by `benchmarks/accuracy.py`; here clocks show what a test says.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.examples import example
from tests.fake_clock import FakeClock
from tests.waiting import wait_until
from vpipe.cli.planning import profile as profile_command
from vpipe.cli.planning import profile_table
from vpipe.communication import InProcessHub
from vpipe.communication.channel import Key
from vpipe.communication.shared_memory import SharedMemoryChannel
from vpipe.cost import DeviceCost, LinkCost, Profile, for_batch_size, read_profile
from vpipe.errors import VPipeError
from vpipe.graph import ModelGraph, StageGraph, capture
from vpipe.profile import contention, links
from vpipe.profile import device as device_module
from vpipe.profile import model as model_module
from vpipe.profile.contention import busy_processes
from vpipe.profile.device import COPIED, COUNT, MINIBATCHES, measure_device
from vpipe.profile.kinds import shapes
from vpipe.profile.links import measure_link
from vpipe.profile.measured_stage import MeasuredStage
from vpipe.profile.model import LEAST_ROUNDS, MeasuredModel, _set_up
from vpipe.profile.rounds import (
    BACKWARD,
    FORWARD,
    HOST,
    HOST_SWAPPING,
    INPUT_GRADIENT,
    LAUNCH,
    LAUNCH_RECOMPUTING,
    LAUNCH_ROUNDS,
    LAUNCH_SPLIT,
    LAUNCH_UPDATE,
    RECOMPUTING_BACKWARD,
    RECOMPUTING_FORWARD,
    SMALLEST,
    SPLIT_FORWARD,
    SPLIT_RECOMPUTING,
    UPDATE,
    WEIGHT_GRADIENT,
    CallTimes,
    block_times,
    call_times,
    measure_launching,
    run_rounds,
)
from vpipe.system.host_memory import total_memory

DEVICE, LINK = DeviceCost(2**34, 1e10, 1e10), LinkCost(1e10, 1e-5)


@pytest.fixture(autouse=True)
def _quick(captured: Callable[..., ModelGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model is captured once, and rounds seem so slow that one is enough."""
    monkeypatch.setattr("vpipe.pipeline.captured.capture", captured)
    monkeypatch.setattr("vpipe.profile.rounds.perf_counter", FakeClock(step=11.0))


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def profiled(example: models.Example, **options: Any) -> Profile:
    model, batch, loss_fn = example
    return MeasuredModel(model, batch, loss_fn, **{"optimizer": adamw} | options).measure(0, DEVICE, LINK)


def test_layers_are_recognised(captured: Callable[..., ModelGraph]) -> None:
    model, batch, _ = models.bert(layers=5)
    graph = captured(model, batch)
    kinds = [shape.kind for shape in shapes(graph)]
    # The first block holds the embeddings; then attention and feed-forward take turns; then the head.
    assert len(kinds) == 11
    assert len(set(kinds)) == 4
    assert kinds[1::2] == [kinds[1]] * 5
    assert kinds[2:-1:2] == [kinds[2]] * 4


def test_blocks_of_other_sizes_are_other_kinds() -> None:
    widths = [8, 16, 16, 16, 24, 8]
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(widths)]
    model = torch.nn.Sequential(*layers)
    graph = capture(model, (torch.randn(4, 8), torch.arange(4)), torch.nn.functional.cross_entropy)
    kinds = [shape.kind for shape in shapes(graph)]
    assert kinds[1] == kinds[2]
    assert len(set(kinds)) == len(kinds) - 1


def test_bytes_are_those_of_the_formula() -> None:
    """Blocks x + gelu(w x) of 4 rows and 16 columns: each keeps the input of its product and that of its gelu."""

    class Residual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + torch.nn.functional.gelu(self.linear(hidden))

    model = torch.nn.Sequential(*(Residual() for _ in range(4)))
    batch = (torch.randn(4, 16), torch.randn(4, 16))
    profile = profiled((model, batch, torch.nn.functional.mse_loss))
    value = 4 * 16 * 4
    # The first block's input is the batch, which is not counted; the last keeps what the loss needs too.
    assert [block.kept_bytes for block in profile.blocks][:3] == [value, 2 * value, 2 * value]
    assert profile.blocks[-1].kept_bytes == 3 * value
    # A product's weight gradient reads its input and its output's gradient.
    assert [block.deferred_bytes for block in profile.blocks] == [value, 2 * value, 2 * value, 2 * value]
    assert [block.boundary_bytes for block in profile.blocks] == [value, value, value, 0]
    assert all(block.parameter_bytes == 4 * (16 * 16 + 16) for block in profile.blocks)
    assert profile.batch_size == 4
    assert (profile.optimizer, profile.optimizer_ratio) == ("adamw", 2.0)


class TiedWords(nn.Module):
    """A tied embedding, and a table that every layer reads and that is as large for any number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.places = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        table = self.places(torch.eye(6)).softmax(-1)
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = hidden + (table @ layer(hidden)).tanh()
        logits = hidden @ self.words.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_bytes_of_other_sizes_are_those_that_would_be_measured() -> None:
    """From a profile of 8 samples: sizes that were measured with it, between, below and beyond them."""

    def of(size: int) -> Profile:
        tokens = torch.arange(6 * size).reshape(size, 6) % 40
        return profiled((TiedWords(), {"tokens": tokens, "labels": tokens}, None))

    profile = of(8)
    assert [other.batch_size for other in profile.other_sizes] == [4, 2]
    fixed = 0
    for size in (2, 12):
        scaled, measured = for_batch_size(profile, size), of(size)
        for found, block, own in zip(scaled.blocks, measured.blocks, profile.blocks, strict=True):
            for name in ("kept_bytes", "deferred_bytes", "boundary_bytes", "parameter_bytes"):
                assert getattr(found, name) == getattr(block, name)
            fixed += 8 * block.boundary_bytes > size * own.boundary_bytes
    assert fixed  # the table crosses cuts


def test_a_value_is_counted_for_the_first_block_that_keeps_it(captured: Callable[..., ModelGraph]) -> None:
    """An encoder's output is read by every layer of the decoder and held once."""
    model, batch, loss_fn = example("t5")
    graph = captured(model, batch, loss_fn)
    profile = profiled((model, batch, loss_fn))
    (stage,) = graph.stages((len(graph.blocks),))
    measured = MeasuredStage(stage, model, adamw, None, {}, graph.batch_fields(batch))
    saved, _ = measured.saved_bytes()
    assert sum(block.kept_bytes for block in profile.blocks) == sum(saved.values())
    # So are its embeddings: by encoder, decoder and head.
    (tie,) = profile.tied
    assert tie.bytes == model.shared.weight.nbytes
    assert list(tie.blocks) == [b.index for b in graph.blocks if "shared.weight" in b.parameters]
    whole = profile.parameter_bytes(0, len(profile.blocks))
    assert whole == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    ("factory", "precision", "ratio"),
    [
        (lambda ps: torch.optim.SGD(ps, 0.1), "fp32", 0.0),
        (lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9), "fp32", 1.0),
        (adamw, "bf16", 6.0),
    ],
)
def test_optimizer_state(factory: Any, precision: str, ratio: float) -> None:
    profile = profiled(models.sequential(), optimizer=factory, precision=precision)
    assert profile.optimizer_ratio == ratio


CLOCK = FakeClock()
"""Moved by `Slow`, and by nothing else."""


class Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(hidden)
        CLOCK.now += seconds
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors  # recomputed where it is needed
        CLOCK.now += 2 * ctx.seconds
        return gradient, None


class Slow(nn.Module):
    """A layer that takes so many seconds, and twice as many for its backward. No exporter can follow it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seconds = seconds

    def forward(self, hidden: Tensor) -> Tensor:
        if not hidden.isfinite().all():  # a branch that depends on data: no graph can hold it
            hidden = hidden.nan_to_num()
        return Taken.apply(self.linear(hidden), self.seconds)


def test_block_times_add_up_to_those_of_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are run one by one, and three of them as a stage, in which recomputing takes another forward."""
    monkeypatch.setattr("vpipe.profile.measured_stage.clock_of", lambda device: CLOCK)
    model = nn.Sequential(*(Slow(seconds) for seconds in (1.0, 2.0, 4.0, 8.0)))
    batch = (torch.randn(2, 4), torch.randn(2, 4))
    graph = capture(model, batch, nn.functional.mse_loss)
    fields = graph.batch_fields(batch)
    found = shapes(graph)
    assert len(found) == 4

    def make(stage: StageGraph, values: Mapping[str, Tensor]) -> MeasuredStage:
        return MeasuredStage(stage, model, adamw, None, values, fields)

    kinds = _set_up(graph, found, None, fields, make).kinds
    whole = make(graph.stages((3, 1))[0], {})
    run_rounds([[*(one for same in kinds.values() for one in same), whole]], 1, 1, 0.0)
    times = [block_times(kinds[shape.kind]) for shape in found]
    assert [time.forward for time in times] == [1.0, 2.0, 4.0, 8.0]
    assert [time.input_gradient + time.weight_gradient for time in times] == [2.0, 4.0, 8.0, 16.0]
    together = block_times([whole])
    assert together.forward == together.recomputing == 1.0 + 2.0 + 4.0
    assert together.input_gradient + together.weight_gradient == 2 * together.forward


def test_of_slow_rounds_one_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.profile.measured_stage.clock_of", lambda device: FakeClock(step=0.25))
    model, batch, _ = models.bert(layers=2)
    measured = MeasuredModel(model, batch, optimizer=adamw)
    for round_takes, rounds in ((1.0, LEAST_ROUNDS), (11.0, 1)):
        monkeypatch.setattr("vpipe.profile.rounds.perf_counter", FakeClock(step=round_takes))
        profile = measured.measure(0.0, DEVICE, LINK)
        assert len(measured.stages[0].intervals[BACKWARD]) == rounds
        assert all(block.forward == block.backward == 0.25 for block in profile.blocks)
        measured.clear()


@pytest.mark.parametrize("run_length", [0, 3])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_kinds_come_as_often_as_in_the_model(run_length: int, share: float) -> None:
    model, batch, _ = models.bert(layers=5)
    measured = MeasuredModel(model, batch, optimizer=adamw, run_length=run_length)
    rounds = measured.weighted_rounds(share)
    for _ in range(2):
        measured.clear()
        while not next(rounds):
            pass
        come: Counter[str] = Counter()
        for each in measured.stages:
            for number in each.stage.blocks:
                come[measured.shapes[number].kind] += len(each.intervals[BACKWARD])
        wanted = Counter(shape.kind for shape in measured.shapes)
        # So often, or up to so much more that a round's members and run are whole.
        assert all(wanted[kind] <= come[kind] < wanted[kind] + 2 + run_length for kind in wanted)
    assert (measured.run is None) == (not run_length)
    if measured.run is not None:
        assert len(measured.run.stage.blocks) == run_length


def test_a_rank_with_a_gpu_of_its_own_measures_all_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(contention, "measure_device", lambda place, nccl: DEVICE)
    monkeypatch.setattr(contention, "measure_link", lambda place: LINK)
    model, batch, _ = models.bert(layers=2)
    measured = MeasuredModel(model, batch, optimizer=adamw)
    world = InProcessHub(1).join(0)
    found = contention.profile_shared_device(world, measured, tmp_path / "profile.json", seconds=0.0)
    sizes = [found.batch_size, *(other.batch_size for other in found.other_sizes)]
    assert sizes == sorted(set(sizes), reverse=True)
    assert len(sizes) == measured.sizes > 1


def test_rounds_of_one_size_alone_and_not_of_a_whole_cycle() -> None:
    model, batch, _ = models.bert(layers=5)
    measured = MeasuredModel(model, batch, optimizer=adamw)
    measured.run_for(0.0)
    assert measured.profile(DEVICE, LINK).other_sizes
    cycle = sum(len(each.intervals[BACKWARD]) for each in measured.stages)
    measured.clear()
    measured.run_for(0.0, size=0)
    assert not measured.profile(DEVICE, LINK).other_sizes
    of_main = sum(len(each.intervals[BACKWARD]) for each in measured.stages)
    measured.run_for(0.0, size=1)
    assert sum(len(each.intervals[BACKWARD]) for each in measured.stages) == of_main
    (other,) = measured.profile(DEVICE, LINK).other_sizes
    assert other.batch_size < measured.batch_size
    measured.clear(0)
    assert not any(each.intervals[BACKWARD] for each in measured.stages)
    measured.clear()
    measured.run_for(0.0, whole=False)
    assert 0 < sum(len(each.intervals[BACKWARD]) for each in measured.stages) < cycle


def test_the_cost_of_a_call_is_not_that_of_its_blocks() -> None:
    """Blocks of 3 and 5 ms that run one by one, each call 1 ms more, and as one stage: 3 + 5 + 3 + 1."""
    model, batch, _ = models.bert(layers=5)
    measured = MeasuredModel(model, batch, optimizer=adamw, run_length=3)
    assert measured.run is not None
    first, second = list(measured.kinds.values())[:2]
    for phase in (FORWARD, BACKWARD, UPDATE):
        for each in (*first, *second):
            each.intervals[phase] = [(0.0, 0.004 if each in first else 0.006)]
        measured.run.intervals[phase] = [(0.0, 0.012)]
    calls = call_times([first, second, first], measured.run)
    assert calls[:3] == pytest.approx((0.001, 0.001, 0.001))
    assert calls.host is None  # nothing was launched
    # A run that takes longer than its blocks one by one says nothing of calls.
    measured.run.intervals[FORWARD] = [(0.0, 0.1)]
    assert call_times([first, second, first], measured.run).forward == 0.0


def test_swapping_costs_the_time_that_the_host_is_slower() -> None:
    """A block whose forward and backward the device computes in 10 ms, or a host issues in 14."""
    model, batch, _ = models.bert(layers=2)
    measured = MeasuredModel(model, batch, optimizer=adamw)
    measured.run_for(0.0)
    measured.measure_host()
    own = next(iter(measured.kinds.values()))
    assert block_times(own).swapping == 0.0  # on a CPU copies do not run beside computing
    for each in own:
        each.intervals[FORWARD], each.intervals[BACKWARD] = [(0.0, 0.004)], [(0.0, 0.006)]
    for host, swapped, expected in [(0.005, 0.009, 0.0), (0.005, 0.012, 0.002), (0.014, 0.02, 0.006)]:
        own[0].intervals[HOST], own[0].intervals[HOST_SWAPPING] = [(0.0, host)], [(0.0, swapped)]
        assert block_times(own).swapping == pytest.approx(expected)


def test_the_host_of_a_block_is_what_it_launches_without_its_calls() -> None:
    """Blocks of 3 and 5 ms that are launched one by one, each call 1 ms more, and as one stage: 3 + 5 + 3 + 1."""
    model, batch, _ = models.bert(layers=5)
    measured = MeasuredModel(model, batch, optimizer=adamw, run_length=3)
    measured.run_for(0.0)
    assert all(block.host is None for block in measured.profile(DEVICE, LINK).blocks)
    measure_launching(measured.stages)
    assert measured.run is not None
    first, second = list(measured.kinds.values())[:2]
    for same in measured.kinds.values():
        for each in same:
            took = 0.004 if each in first else 0.006
            assert len(each.intervals[LAUNCH]) == len(each.intervals[LAUNCH_UPDATE]) == LAUNCH_ROUNDS
            each.intervals[LAUNCH] = [(0.0, took)]
            each.intervals[LAUNCH_RECOMPUTING] = [(0.0, took + 0.002)]
            each.intervals[LAUNCH_SPLIT] = [(0.0, took - 0.001)]  # noise
            each.intervals[LAUNCH_UPDATE] = [(0.0, 0.002)]
    measured.run.intervals[LAUNCH] = [(0.0, 0.012)]
    measured.run.intervals[LAUNCH_UPDATE] = [(0.0, 0.006)]
    calls = call_times([first, second, first], measured.run)
    assert calls.host is not None
    assert (calls.host.minibatch, calls.host.update) == pytest.approx((0.001, 0.0))
    host = block_times(first, calls).host
    assert host is not None
    found = host.minibatch, host.update, host.recomputing, host.splitting
    assert found == pytest.approx((0.003, 0.002, 0.002, 0.0))
    profile = measured.profile(DEVICE, LINK)
    assert profile.device.host is not None
    assert all(block.host is not None for block in profile.blocks)
    assert all(block.host is None for size in profile.other_sizes for block in size.blocks)


def test_no_block_is_free_where_noise_is_larger_than_its_time() -> None:
    """A block of 2 + 4 ms where calls seem to take 3 ms, and where recomputing seems to take 1.5 ms less."""
    model, batch, _ = models.bert(layers=2)
    measured = MeasuredModel(model, batch, optimizer=adamw)
    measured.run_for(0.0)
    own = next(iter(measured.kinds.values()))
    taken = {FORWARD: 0.002, BACKWARD: 0.004, RECOMPUTING_FORWARD: 0.001, RECOMPUTING_BACKWARD: 0.0035}
    taken |= dict(zip(SPLIT_RECOMPUTING, (0.0, 0.0, 0.0), strict=True))
    taken |= {SPLIT_FORWARD: 0.0, INPUT_GRADIENT: 0.0, WEIGHT_GRADIENT: 0.0}
    for each in own:
        for phase, time_taken in taken.items():
            each.intervals[phase] = [(0.0, time_taken)] * (2 if phase == FORWARD else 1)
    times = block_times(own, CallTimes(forward=0.003, backward=0.003))
    assert times.forward == SMALLEST > 0
    assert times.input_gradient + times.weight_gradient == pytest.approx(0.001)
    # What the planner would take for free is not known: it counts as long as a forward.
    assert times.recomputing is times.split_recomputing is None
    assert times.spread == pytest.approx(0.0015 / 0.006)
    exact = block_times(own)
    assert (exact.forward, exact.spread) == pytest.approx((0.002, 0.0015 / 0.006))


def test_a_profile_with_a_run_of_blocks_adds_up() -> None:
    model, batch, _ = models.bert(layers=5)
    measured = MeasuredModel(model, batch, optimizer=adamw, run_length=3)
    measured.run_for(0.0)
    profile = measured.profile(DEVICE, LINK)
    kinds = [measured.kinds[measured.shapes[number].kind] for number in measured.run.stage.blocks]
    calls = call_times(kinds, measured.run)
    assert profile.device.overhead == pytest.approx((calls.forward + calls.backward) / 2)
    for own, block in zip(
        kinds, (profile.blocks[number] for number in measured.run.stage.blocks), strict=True
    ):
        assert block.forward == pytest.approx(max(SMALLEST, block_times(own).forward - calls.forward))


def test_compiled_blocks_are_profiled_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile(function: Any, **options: Any) -> Any:
        compiled.append(options["backend"])
        return lambda *arguments: function(*arguments)

    monkeypatch.setattr(torch, "compile", compile)
    plain = profiled(models.sequential())
    assert not compiled
    found = profiled(models.sequential(), compile="aot_eager")
    assert set(compiled) == {"aot_eager"}
    assert [block.kept_bytes for block in found.blocks] == [block.kept_bytes for block in plain.blocks]


def test_busy_processes_work_until_the_end_and_are_gone_then(tmp_path: Path) -> None:
    done = tmp_path / "done"

    def work() -> None:
        with done.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.01)

    with busy_processes(2, work):
        wait_until(lambda: done.exists() and len(set(done.read_text().split())) >= 2)
    children = set(map(int, done.read_text().split()))
    assert os.getpid() not in children
    assert not any(Path("/proc", str(child)).exists() for child in children)


def test_a_device_is_what_its_clocks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for the tensors to go out, and as much to come back; 4 ms of a minibatch are not its blocks'."""
    monkeypatch.setattr(device_module, "perf_counter", FakeClock(step=0.5))
    monkeypatch.setattr("vpipe.profile.device.thread_time", FakeClock(step=0.006 * MINIBATCHES))
    monkeypatch.setattr("vpipe.profile.measured_stage.clock_of", lambda device: FakeClock(step=0.001))
    monkeypatch.setattr(device_module, "cores", lambda: 3 * torch.get_num_threads())
    device = measure_device()
    assert device.at_once == 3
    assert (device.to_host, device.from_host) == pytest.approx((COUNT * COPIED / 0.5,) * 2)
    assert device.overhead == pytest.approx((0.006 - 0.001 - 0.001) / 2)
    assert device.memory == total_memory()


def test_a_link_is_what_its_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages to a second process take 2 ms and a second for a gigabyte."""
    clock = FakeClock()

    class Timed(SharedMemoryChannel):
        def send(self, key: Key, tensor: Tensor) -> None:
            clock.now += 0.002 + tensor.nbytes / 1e9
            super().send(key, tensor)

    monkeypatch.setattr(links, "SharedMemoryChannel", Timed)
    monkeypatch.setattr(links, "perf_counter", clock)
    link = measure_link()
    assert link.bandwidth == pytest.approx(1e9)
    assert link.latency == pytest.approx(0.001, rel=1e-3)  # of a way; the answer is as quick
    assert link.sender_busy


def test_memory_is_the_containers_limit(tmp_path: Path) -> None:
    assert total_memory(tmp_path) == total_memory(tmp_path / "nowhere") > 2**20
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1048576\n")
    assert total_memory(tmp_path) == 2**20


def test_command_writes_a_profile_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "measure_device", lambda place: DEVICE)
    monkeypatch.setattr(model_module, "measure_link", lambda place: LINK)
    config = tmp_path / "run.yml"
    config.write_text(
        "{hidden_size: 32, num_layers: 2, num_heads: 2, vocab_size: 64, batch_size: 2, sequence_length: 8, stages: 2}"
    )
    profile_command(config, tmp_path / "profile.json", as_json=True)
    printed = json.loads(capsys.readouterr().out)
    profile = read_profile(tmp_path / "profile.json")
    assert len(printed["blocks"]) == len(profile.blocks) == 5
    assert profile.fingerprint
    assert profile_table(profile).row_count == 5


def test_a_model_without_trained_parameters_is_refused() -> None:
    model, batch, loss_fn = models.sequential()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(VPipeError, match="no parameter that is trained"):
        profiled((model, batch, loss_fn))
