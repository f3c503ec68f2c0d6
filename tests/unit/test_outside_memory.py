"""The memory that a rank takes beside its allocator: from differences of what is free to what a plan may use."""

from dataclasses import replace

from tests.unit.test_host_sharing import profile
from vpipe.plan import plan
from vpipe.profile.outside import COMMUNICATORS, OutsideMemory, _differences


def test_the_first_communicator_loads_kernels_and_every_further_one_only_takes_its_own() -> None:
    assert _differences([1000, 700, 500, 470]) == OutsideMemory(300, 200 + (COMMUNICATORS - 1) * 30)


def test_a_build_without_nccl_has_a_context_only() -> None:
    assert _differences([1000, 700]) == OutsideMemory(300, 0)
    assert _differences([1000]) == OutsideMemory()
    assert _differences([700, 1000]) == OutsideMemory()  # somebody else has freed memory meanwhile


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
