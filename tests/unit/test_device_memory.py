"""Memory that CUDA graphs reserve is counted, though the allocator reports it as free. The allocator is a fake."""

from weakref import WeakSet

import pytest
import torch

from vpipe.system import device_memory
from vpipe.system.device_memory import Reserve, forget_peak, held_on_device, peak_on_device, reserving

GPU = torch.device("cuda", 0)


class Allocator:
    """Bytes given out, taken from the device, and at most given out since the peak was forgotten."""

    def __init__(self) -> None:
        self.out = self.taken = self.most = 0

    def give(self, size: int) -> None:
        self.out += size
        self.taken = max(self.taken, self.out)
        self.most = max(self.most, self.out)

    def forget(self) -> None:
        self.most = self.out


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: made.out)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: made.most)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: made.taken)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: made.forget())
    monkeypatch.setattr(device_memory, "_earlier", 0)
    monkeypatch.setattr(device_memory, "_reserves", WeakSet())  # without those of others
    return made


def test_memory_of_a_capture_counts_as_long_as_the_graphs_live(allocator: Allocator) -> None:
    allocator.give(100)
    reserve = Reserve()
    with reserving(reserve, GPU):
        allocator.give(40)
        allocator.give(-30)  # free, for the graphs alone; 10 are their outputs
    assert held_on_device(GPU) == 140
    assert peak_on_device(GPU) == 140
    allocator.give(25)
    allocator.give(-25)
    assert peak_on_device(GPU) == 165
    assert held_on_device(GPU) == 140
    del reserve
    assert held_on_device(GPU) == 110


def test_a_peak_before_the_capture_is_not_lost_and_is_not_counted_twice(allocator: Allocator) -> None:
    allocator.give(500)
    allocator.give(-450)
    reserve = Reserve()
    with reserving(reserve, GPU):  # in what was taken before: nothing new is reserved
        allocator.give(40)
        allocator.give(-40)
    assert reserve.bytes == 0
    assert peak_on_device(GPU) == 500
    forget_peak(GPU)
    assert peak_on_device(GPU) == 50
