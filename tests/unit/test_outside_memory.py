"""The memory that a rank takes beside its allocator: from differences of what is free to what a plan may use."""

import re
import subprocess
import sys
from dataclasses import replace

import torch

from tests.unit.test_host_sharing import profile
from vpipe.plan import plan
from vpipe.profile import outside
from vpipe.profile.outside import COMMUNICATORS, OutsideMemory, _differences


def test_the_first_communicator_loads_kernels_and_every_further_one_only_takes_its_own() -> None:
    assert _differences([1000, 700, 500, 470]) == OutsideMemory(300, 200 + (COMMUNICATORS - 1) * 30)


def test_a_build_without_nccl_has_a_context_only() -> None:
    assert _differences([1000, 700]) == OutsideMemory(300, 0)
    assert _differences([1000]) == OutsideMemory()
    assert _differences([700, 1000]) == OutsideMemory()  # somebody else has freed memory meanwhile


def test_the_other_process_imports_nothing_of_vpipe_and_comes_to_the_device() -> None:
    """It is asked for a device that no host has: what fails is the device, in `show`."""
    none = str(torch.cuda.device_count() + 100)
    command = [sys.executable, "-X", "importtime", "-c", outside._PROGRAM, outside.__file__, none, "0"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr
    failed = shown[shown.index("Traceback") :]
    assert "in show\n    torch.cuda.set_device(device)" in failed
    assert not re.search(r"\| +vpipe", shown)


def test_a_plan_uses_what_context_and_communicators_leave() -> None:
    costs = profile(*[15] * 4)
    device = replace(costs.device, memory=100, context=20, communicators=16)
    assert device.usable == 64
    narrow, wide = (
        plan(replace(costs, device=one), 4, None, "1f1b") for one in (device, replace(device, context=0))
    )
    assert (narrow.cap, wide.cap) == (64, 84)
    assert all(position.memory.total <= 64 for position in narrow.positions)
    assert plan(replace(costs, device=device), 4, 90, "1f1b").cap == 90  # the user's own figure
