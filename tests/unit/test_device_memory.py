"""The memory of a rank: what CUDA graphs reserve counts as used, though the allocator has it as free (a stand-in)."""

import subprocess
import sys
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

from vpipe.system import device_memory
from vpipe.system.device_memory import (
    Reserve,
    allocator_retries,
    forget_peak,
    peak_memory,
    reserving,
    used_memory,
)

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
        allocator.give(-30)  # free, for the graph alone; 10 are its outputs
    assert used_memory(GPU) == 140
    assert peak_memory(GPU) == 140
    allocator.give(25)
    allocator.give(-25)
    assert peak_memory(GPU) == 165
    assert used_memory(GPU) == 140
    del reserve
    assert used_memory(GPU) == 110


def test_a_peak_before_the_capture_is_not_lost_and_is_not_counted_twice(allocator: Allocator) -> None:
    allocator.give(500)
    allocator.give(-450)
    reserve = Reserve()
    with reserving(reserve, GPU):  # in what was taken before: nothing new is reserved
        allocator.give(40)
        allocator.give(-40)
    assert reserve.bytes == 0
    assert peak_memory(GPU) == 500
    forget_peak(GPU)
    assert peak_memory(GPU) == 50


def test_a_ranks_memory_is_its_gpus_with_the_graphs(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status, `vpipe top` and the report read these."""
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 3})
    allocator.give(100)
    reserve = Reserve()
    with reserving(reserve, GPU):
        allocator.give(40)
        allocator.give(-40)
    assert used_memory(GPU) == 140
    allocator.give(10)
    allocator.give(-10)
    assert (used_memory(GPU), peak_memory(GPU)) == (140, 150)
    assert allocator_retries(GPU) == 3


def test_without_a_gpu_it_is_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the kernel's own words for the same process."""
    host = torch.device("cpu")
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    resident = int(lines["VmRSS"].split()[0]) * 1024
    assert used_memory(host) == pytest.approx(resident, rel=0.05)
    assert peak_memory(host) >= 0.95 * resident
    assert allocator_retries(host) == 0

    def no_proc(*args: object, **options: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", no_proc)
    assert (used_memory(host), peak_memory(host)) == (0, 0)


def test_the_peak_of_a_process_is_its_own_whatever_started_it() -> None:
    """The launcher has a peak of its own: with `partition: auto` it has measured the model."""
    large = b"\1" * (300 << 20)
    said = subprocess.run(
        [sys.executable, "-c", "from vpipe.system.host_memory import *; print(most_used_by_process())"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert 1 << 20 < int(said.stdout) < len(large)
    assert device_memory.peak_memory(torch.device("cpu")) > len(large)
