"""The schedule that a plan is simulated with, and the checks that plan, profile and schedule fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from vpipe.cost import Plan, Profile
from vpipe.errors import PartitionError, ScheduleError, VPipeError
from vpipe.schedule import Action, Op, Schedule, kind_of, lower
from vpipe.schedule.facts import finite
from vpipe.schedule.program import Exists, Order, filling
from vpipe.schedule.steady import enough_minibatches

MESSAGES = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})


def check_fit(profile: Profile, plan: Plan) -> None:
    """Whether the plan is one for the profile's model."""
    if plan.fingerprint and profile.fingerprint and plan.fingerprint != profile.fingerprint:
        raise VPipeError(
            f"the plan is for another model: its fingerprint is {plan.fingerprint[:16]!r}, the profile's "
            f"{profile.fingerprint[:16]!r}: plan again with this profile"
        )
    blocks = sum(plan.partition)
    if blocks != len(profile.blocks):
        raise PartitionError(
            f"partition {list(plan.partition)} holds {blocks} blocks, the profile has {len(profile.blocks)}: "
            "make them equal, or plan again with this profile"
        )


def arrange(plan: Plan, schedule: Schedule | str | None, minibatches: int | None) -> Schedule:
    """The schedule by name, or as given, with reductions but without messages: links are simulated."""
    if isinstance(schedule, Schedule):
        if schedule.num_stages != len(plan.partition):
            raise PartitionError(
                f"partition {list(plan.partition)} has {len(plan.partition)} stages, schedule "
                f"{schedule.name!r} has {schedule.num_stages}: give one count of blocks for each"
            )
        if schedule.minibatches is None:
            if minibatches is None:
                raise ScheduleError(
                    f"schedule {schedule.name!r} has no end: give the number of minibatches to simulate"
                )
            schedule = finite(replace(schedule, minibatches=minibatches))
        elif minibatches not in (None, schedule.minibatches):
            raise ScheduleError(
                f"schedule {schedule.name!r} is written for {schedule.minibatches} minibatches, not "
                f"{minibatches}: leave the number out"
            )
    else:
        schedule = _named(plan, schedule or plan.schedule, minibatches or plan.minibatches)
    if schedule.lowered:
        return replace(schedule, lowered=False, order=partial(_without_messages, schedule.order))
    if all(len(ranks) == 1 for ranks in schedule.placement):
        return schedule
    # Without edges, lowering writes out the reductions alone.
    return replace(lower(schedule, edges=()), lowered=False, edges=schedule.edges)


def _named(plan: Plan, name: str, minibatches: int | None) -> Schedule:
    if name.endswith(".csv"):
        raise ScheduleError(
            f"schedule {name!r} is a table, which a plan only names: give the table itself, as `vpipe simulate "
            f"--schedule {name}` does"
        )
    kind, stages, own = kind_of(name), len(plan.partition), name == plan.schedule
    chunks = kind.checked_chunks(plan.chunks if own and kind.chunks > 1 else None)
    if stages % chunks:
        raise PartitionError(
            f"partition {list(plan.partition)} has {stages} stages, which {chunks} a rank does not divide: "
            f"schedule {name!r} needs {chunks} for each rank"
        )
    positions = stages // chunks
    replicas = plan.replicas if any(count > 1 for count in plan.replicas) else None
    counts = replicas or (1,) * positions
    interval = plan.update_interval if own and not kind.synchronous else None
    depth = plan.depth or None if own else None
    filled = filling(counts, depth, sum(counts))
    minibatches = (
        minibatches or kind.default_minibatches(positions) or enough_minibatches(filled, interval or filled)
    )
    made = kind.build(
        positions,
        minibatches,
        chunks=chunks,
        replicas=replicas,
        update_interval=interval,
        depth=depth,
        placement=plan.placement or None,
    )
    return finite(made)


def _without_messages(order: Order, rank: int, exists: Exists) -> Iterator[Action]:
    return (action for action in order(rank, exists) if action.op not in MESSAGES)
