"""Times of a GPU's actions, with events that stand in for CUDA's."""

from itertools import pairwise

import pytest
import torch

from vpipe.runtime import recording
from vpipe.runtime.recording import DeviceClock


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
    return made


def test_an_action_lasts_from_the_end_of_the_one_before(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "perf_counter", lambda: 50.0)  # when the clock is made
    clock: DeviceClock[str] = DeviceClock(torch.device("cuda", 0))
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
    clock: DeviceClock[int] = DeviceClock(torch.device("cuda", 0))
    ends = []
    for number in range(10):
        gpu.issued += 1.0
        clock.mark(number)
        ends += [end for _, _, end in clock.passed(wait=True)]
    assert [b - a for a, b in pairwise(ends)] == pytest.approx([0.001] * 9)
