"""The registry: every schedule that has a name."""

from __future__ import annotations

from collections.abc import Sequence

from vpipe.errors import ScheduleError, meant
from vpipe.schedule.interleaved import INTERLEAVED
from vpipe.schedule.kind import ScheduleKind
from vpipe.schedule.program import Schedule
from vpipe.schedule.staircase import GPIPE, ONE_F_ONE_B, PIPEDREAM, TWO_BW, VPIPE, ZB_H1
from vpipe.schedule.zero_bubble import ZB_V

KINDS: dict[str, ScheduleKind] = {
    kind.name: kind
    # Where two are equally fast `vpipe plan --schedule auto` takes the earlier: those without stale weights come first.
    for kind in (ONE_F_ONE_B, ZB_H1, ZB_V, INTERLEAVED, GPIPE, TWO_BW, VPIPE, PIPEDREAM)
}


def kind_of(name: str) -> ScheduleKind:
    if name not in KINDS:
        raise ScheduleError(f"unknown schedule {name!r}: {meant(name, KINDS)}")
    return KINDS[name]


def guides_schedule(*, asynchronous: bool, macrobatch: bool) -> str:
    """The schedule that the guides' keys ask for, which name none."""
    if macrobatch:
        return TWO_BW.name
    return VPIPE.name if asynchronous else ONE_F_ONE_B.name


def build(
    name: str,
    stages: int,
    minibatches: int | None,
    *,
    chunks: int | None = None,
    replicas: Sequence[int] | None = None,
    update_interval: int | None = None,
    depth: Sequence[int] | None = None,
    placement: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """The schedule `name` over `stages` pipeline positions: see `ScheduleKind.build`."""
    return kind_of(name).build(
        stages,
        minibatches,
        chunks=chunks,
        replicas=replicas,
        update_interval=update_interval,
        depth=depth,
        placement=placement,
    )
