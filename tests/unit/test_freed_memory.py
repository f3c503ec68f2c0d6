"""Memory that `malloc` keeps for training on the CPU."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from vpipe.system.host_memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [torch.ones(2**20) for _ in range(16)]  # of 4 MiB
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return after - before

faults()
print(min(faults() for _ in range(3)))
"""
PAGES = 16 * 2**22 // 4096


def faults(mode: str, **environment: str) -> int:
    """Pages that the system handed out for 64 MiB that the process has freed before."""
    command = [sys.executable, "-c", SCRIPT, mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


def test_freed_memory_is_used_again_without_the_system() -> None:
    if faults("leave") < PAGES // 100:
        pytest.skip("this malloc keeps freed memory anyway")
    assert faults("keep") < PAGES // 100


def test_settings_of_the_user_come_first() -> None:
    returned = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    if faults("leave", **returned) < PAGES // 100:
        pytest.skip("this malloc has no such settings")
    assert faults("keep", **returned) >= PAGES // 100
