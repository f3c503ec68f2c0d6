"""Times of a GPU's actions, with events that stand in for CUDA's: on its clock they add up, and waiting is seen."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vpipe.observe.figures import Meter, shares
from vpipe.record.events import Recorded
from vpipe.runtime import recording
from vpipe.runtime.recording import DeviceClock, Recording
from vpipe.schedule import Action

GPU = torch.device("cuda", 0)


class Gpu:
    """The time of a GPU in milliseconds, and the host's knowledge of it."""

    def __init__(self) -> None:
        self.issued = 0.0  # when what was issued will be done
        self.now = 0.0

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.time = 0.0

    def record(self) -> None:
        self.time = self.gpu.issued

    def query(self) -> bool:
        return self.gpu.now >= self.time

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.time)

    def elapsed_time(self, later: "Event") -> float:
        return later.time - self.time


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(recording, "perf_counter", lambda: 50.0 + made.now / 1000)
    return made


def test_an_action_lasts_from_the_end_of_the_one_before(gpu: Gpu) -> None:
    clock: DeviceClock[str] = DeviceClock(GPU)
    for name, milliseconds in (("wait", 2.0), ("forward", 5.0), ("backward", 9.0)):
        gpu.issued += milliseconds
        clock.mark(name)
    assert list(clock.passed()) == []  # the GPU has not begun, and nobody waits for it
    gpu.now = 7.0
    seen = list(clock.passed())
    assert [what for what, _, _ in seen] == ["wait", "forward"]
    seen += clock.passed(wait=True)
    assert [end - start for _, start, end in seen] == pytest.approx([0.002, 0.005, 0.009])
    assert seen[1][1] == seen[0][2]
    assert seen[0][1] == 50.0


def test_times_go_on_when_they_are_counted_from_a_later_event(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "REBASE", 3)
    clock: DeviceClock[int] = DeviceClock(GPU)
    ends = []
    for number in range(10):
        gpu.issued += 1.0
        clock.mark(number)
        ends += [end for _, _, end in clock.passed(wait=True)]
    assert [b - a for a, b in pairwise(ends)] == pytest.approx([0.001] * 9)


def test_clocks_that_drift_apart_are_set_right(gpu: Gpu) -> None:
    """A mark is passed after it was issued and before it is read, whatever the GPU's clock says."""
    clock: DeviceClock[str] = DeviceClock(GPU)
    gpu.now = 100.0  # of the host; the GPU's clock has counted 40
    gpu.issued = 40.0
    clock.mark("slow clock")
    ((_, _, end),) = clock.passed()
    assert end == pytest.approx(50.1)
    gpu.now, gpu.issued = 101.0, 45.0  # and then five milliseconds while the host's counts one
    clock.mark("fast clock")
    ((_, start, later),) = clock.passed()
    assert (start, later) == pytest.approx((50.1, 50.101))


class Rank:
    """A rank with a GPU: what its host issues, and a pipe that shows the figures of it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.recording = Recording(0, (), GPU)
        self.recording.begin()
        self.pipe: Any = SimpleNamespace(
            runtime=SimpleNamespace(
                recording=self.recording,
                forward_stats=self.recording.forward,
                backward_stats=self.recording.backward,
                update_stats=self.recording.update,
            ),
            handler=SimpleNamespace(waiting=None, bytes_sent=0, bytes_received=0),
            device=GPU,
            updates=0,
        )

    def issue(self, action: str, takes: float, *, host: float = 0.1, waits: float = 0.0) -> None:
        """The host waits for a message, then issues an action for `host` ms; the GPU `takes` ms for it."""
        start = 50.0 + self.gpu.now / 1000
        self.gpu.now += waits + host
        self.gpu.issued = max(self.gpu.issued, self.gpu.now) + takes
        end = 50.0 + self.gpu.now / 1000
        self.recording.add(Recorded(Action.parse(action), start, end, waits / 1000))

    def figures(self, meter: Meter) -> dict[str, float]:
        self.pipe.runtime.waited = self.recording.waited_on_device
        return shares([meter.total()])


@pytest.fixture
def rank(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr("vpipe.observe.figures.perf_counter", lambda: 50.0 + gpu.now / 1000)
    monkeypatch.setattr("vpipe.observe.figures.peak_memory", lambda device: 0)
    monkeypatch.setattr("vpipe.observe.figures.allocator_retries", lambda device: 0)
    made = Rank(gpu)
    made.pipe.runtime.waited = 0.0
    return made


def test_shares_of_a_gpu_that_is_behind_its_host_add_up_to_at_most_one(gpu: Gpu, rank: Rank) -> None:
    """The host begins to measure when the GPU has much to do yet: that is not work of the time measured."""
    for minibatch in range(5):
        rank.issue(f"0F{minibatch}", takes=10.0)
    meter = Meter(rank.pipe)
    meter.start()
    for minibatch in range(5, 10):
        rank.issue(f"0F{minibatch}", takes=10.0)
    rank.recording.read_clock(wait=True)
    found = rank.figures(meter)
    assert found["of_limit"] == pytest.approx(1.0)
    assert sum(found.values()) <= 1.0 + 1e-9


def test_a_gpu_that_waits_for_its_host_shows_it(gpu: Gpu, rank: Rank) -> None:
    """Of 40 ms: 10 of forward, 10 that the host waits in an update for other ranks, 5 of the update, a receive of 10;
    the host needs 5 between two actions."""
    rank.recording.read_clock(wait=True)
    meter = Meter(rank.pipe)
    meter.start()
    rank.issue("0F0", takes=10.0, host=0.0)
    rank.recording.read_clock(wait=True)
    rank.issue("0STEP0", takes=5.0, host=0.0, waits=10.0)
    rank.recording.read_clock(wait=True)
    gpu.now += 5.0
    rank.issue("0RECV_F1", takes=0.0, host=0.0, waits=10.0)
    rank.recording.read_clock(wait=True)
    found = rank.figures(meter)
    assert found == pytest.approx({"of_limit": 15 / 40, "communication_share": 0.0, "bubble_share": 20 / 40})
    recorded = rank.recording.events.actions()
    assert [entry.duration for entry in recorded] == pytest.approx([0.010, 0.015, 0.010])
    assert [entry.wait for entry in recorded] == pytest.approx([0.0, 0.010, 0.010])


def test_a_host_that_waits_while_its_gpu_is_busy_costs_nothing(rank: Rank) -> None:
    meter = Meter(rank.pipe)
    meter.start()
    rank.issue("0F0", takes=30.0, host=0.0)
    rank.issue("0STEP0", takes=10.0, host=0.0, waits=20.0)
    rank.recording.read_clock(wait=True)
    assert rank.figures(meter)["of_limit"] == pytest.approx(1.0)


def test_a_wait_that_is_not_over_is_seen(gpu: Gpu, rank: Rank) -> None:
    """The GPU has nothing to do from 10 ms on; the host has waited since 2 ms, and it is 40 ms now."""
    meter = Meter(rank.pipe)
    meter.start()
    rank.issue("0F0", takes=10.0, host=0.0)
    gpu.now = 40.0
    rank.recording.read_clock()
    rank.pipe.handler.waiting = ("message", "x", 1, 1, 50.002)
    found = rank.figures(meter)
    assert found["bubble_share"] == pytest.approx(30 / 40)
    assert found["of_limit"] == pytest.approx(10 / 40)
