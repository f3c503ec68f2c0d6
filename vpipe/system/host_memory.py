"""The memory and the cores that this process may use: those of the machine, within the limits of its cgroups."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

# The two versions of cgroups: where they hang, limit, use.
_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)

# Numbers of options in glibc's <malloc.h>.
_MALLOC_TRIM_THRESHOLD, _MALLOC_MMAP_THRESHOLD = -1, -3


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can still be had; None where there is no /proc."""
    free = [_size(root / "proc/meminfo", "MemAvailable"), *(_left(*group) for group in _groups(root))]
    known = [size for size in free if size is not None]
    return min(known) if known else None


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of this machine, or the smallest limit of its cgroups."""
    limits = [_text(folder / limit).strip() for folder, limit, _ in _groups(root)]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])  # "max": no limit


def used_by_process() -> int:
    """Bytes of this process in memory, libraries included; 0 where there is no /proc."""
    return _size(Path("/proc/self/status"), "VmRSS") or 0


def most_used_by_process() -> int:
    """The same at its peak. Not `ru_maxrss`, which begins with the peak of the process that started this one."""
    return _size(Path("/proc/self/status"), "VmHWM") or 0


def keep_freed_memory() -> None:
    """Let glibc's `malloc` keep what is freed, for training on the CPU; the user's own settings come first.

    As a rule it returns large pieces to the system. Each minibatch would get its activations anew then, page by page:
    up to a tenth of a forward or backward.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_MALLOC_TRIM_THRESHOLD, -1)
        mallopt(_MALLOC_MMAP_THRESHOLD, 2**30)


def cores(root: Path = Path("/")) -> float:
    """Cores that this process may run on; a cgroup may allow a part of one."""
    own = usable_cores()
    quota = _text(root / "sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
        return min(float(own), int(quota[0]) / int(quota[1]))
    return float(own)


def usable_cores() -> int:
    """Cores that this process may run on, whatever its cgroup allows of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores(seconds: float = 0.5, root: Path = Path("/")) -> float | None:
    """Cores of this machine that all programs keep busy together, over the next `seconds`; None without /proc."""
    before = _processor_times(root)
    time.sleep(seconds)
    after = _processor_times(root)
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1]) * (os.cpu_count() or 1)


def _processor_times(root: Path) -> tuple[int, int] | None:
    """Busy and all ticks of all cores since the machine started."""
    words = _text(root / "proc/stat").partition("\n")[0].split()
    if len(words) < 6 or words[0] != "cpu" or not all(map(str.isdigit, words[1:])):
        return None
    ticks = list(map(int, words[1:9]))  # what guests took is part of user time already
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # less idle time, less waiting for disks


def _size(path: Path, name: str) -> int | None:
    """Bytes in the line `name: ... kB` of a file of /proc."""
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [f"{name}:"] and words[1:2] and words[1].isdigit():
            return int(words[1]) * 1024
    return None


def _groups(root: Path) -> list[tuple[Path, str, str]]:
    """The cgroup of this process and those around it (each may have a limit), with the names of limit and use."""
    found = [(root / mount, limit, use) for mount, limit, use in _CGROUPS]
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, own = [*line.split(":", 2), "", ""][:3]
        if number != "0" and "memory" not in controllers.split(","):
            continue
        mount, limit, use = _CGROUPS[0 if number == "0" else 1]
        folder = root / mount / own.strip("/")
        while (root / mount) in folder.parents:
            found.append((folder, limit, use))
            folder = folder.parent
    return found


def _left(folder: Path, limit: str, use: str) -> int | None:
    """The group's limit less what it uses; files in its cache give way when memory is short."""
    allowed, used = _text(folder / limit).strip(), _text(folder / use).strip()
    if not allowed.isdigit() or not used.isdigit():  # "max": no limit
        return None
    statistics = dict(
        line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line
    )
    cache = statistics.get("inactive_file", "0").strip()
    return max(0, int(allowed) - int(used) + (int(cache) if cache.isdigit() else 0))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
