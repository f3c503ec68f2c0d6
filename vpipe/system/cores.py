"""The cores of a rank: those beside its GPU, and its share of them for what compiles."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vpipe.system.environment import BIND, COMPILE_THREADS, MOST_COMPILE_THREADS
from vpipe.system.host_memory import usable_cores


def bind_to_gpu(device: torch.device) -> set[int] | None:
    """Let this process run on the cores of its GPU's NUMA node, from which copies to and from the GPU are fastest.

    None: it runs where it ran, because it has no GPU, the host has one node, somebody has bound it already, or the
    variable VPIPE_BIND is 0.
    """
    if device.type != "cuda" or os.environ.get(BIND) == "0" or not hasattr(os, "sched_setaffinity"):
        return None
    try:
        address = pci_address(device)
    except AttributeError:
        return None  # this torch does not tell
    chosen = cores_beside(address, os.sched_getaffinity(0))
    if chosen is not None:
        for thread in os.listdir("/proc/self/task"):  # those that CUDA has started too; others inherit it
            try:
                os.sched_setaffinity(int(thread), chosen)
            except OSError:
                continue  # it has ended
    return chosen


def pci_address(device: torch.device) -> str:
    """As the kernel names it."""
    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def cores_beside(address: str, now: set[int], root: Path = Path("/")) -> set[int] | None:
    """Of the cores that this process runs on now those of the PCI device's node; None: leave it as it is."""
    nodes = {
        path.name.removeprefix("node"): _cores(path / "cpulist")
        for path in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    if sum(bool(cores & now) for cores in nodes.values()) < 2 or now != _allowed(root):
        return None
    try:
        node = (root / "sys/bus/pci/devices" / address / "numa_node").read_text().strip()
    except OSError:
        return None
    return nodes.get(node, set()) & now or None  # "-1": the host does not know


def _allowed(root: Path) -> set[int]:
    """The cores that a process runs on which nobody has bound: all, or those of its cgroup."""
    groups = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    for number, controllers, path in (group for group in groups if len(group) == 3):
        own = Path(path.lstrip("/"))
        if number == "0":
            file = root / "sys/fs/cgroup" / own / "cpuset.cpus.effective"
        elif "cpuset" in controllers.split(","):
            file = root / "sys/fs/cgroup/cpuset" / own / "cpuset.effective_cpus"
        else:
            continue
        if cores := _cores(file):
            return cores
    for name in ("sys/fs/cgroup/cpuset.cpus.effective", "sys/devices/system/cpu/online"):
        if cores := _cores(root / name):
            return cores
    return set()


def _cores(path: Path) -> set[int]:
    """Of a list such as 0-3,8,10-11; the kernel writes all of them so."""
    found: set[int] = set()
    for part in _text(path).strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def share_compile_threads(ranks: int, environment: Mapping[str, str] = os.environ) -> None:
    """Let the compiler of this process start its share of the processes that it would start on a host of its own.

    Left to itself it starts one for each core, up to 32, on each of the ranks of the host.
    """
    if COMPILE_THREADS in environment:
        return
    share = max(1, usable_cores() // ranks)
    if "torch._inductor.config" in sys.modules:  # it has read the variable
        config: Any = sys.modules["torch._inductor.config"]
        config.compile_threads = min(share, config.compile_threads or share)
    else:
        os.environ[COMPILE_THREADS] = str(min(share, MOST_COMPILE_THREADS))
