"""The schedule that a plan is simulated with, and the checks that plan, profile and schedule fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from vpipe.cost import Plan, Profile
from vpipe.errors import PartitionError, ScheduleError, VPipeError
from vpipe.schedule import ASYNCHRONOUS, Action, Op, Schedule, build, lower
from vpipe.schedule.builders import checked_chunks
from vpipe.schedule.program import Exists, Order

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
            schedule = replace(schedule, minibatches=minibatches)
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


def makes_versions(schedule: Schedule, stage: int) -> bool:
    """Whether minibatches are in flight when the stage updates, as its first updates tell."""
    if schedule.synchronous:
        return False
    in_flight = updates = 0
    for action in schedule.program(schedule.placement[stage][0]):
        if action.stage == stage:
            in_flight += {Op.F: 1, Op.B: -1, Op.W: -1}.get(action.op, 0)
            updates += action.op is Op.STEP
            if action.op is Op.STEP and (in_flight or updates == 3):
                return in_flight > 0
    return False


def fresh_gradients(schedule: Schedule) -> bool:
    """Whether an update follows every backward of every rank, so that each finds no gradients of an earlier one."""
    counts = {len(ranks) for ranks in schedule.placement}
    return not schedule.synchronous and not splits_backward(schedule) and counts == {schedule.update_interval}


def splits_backward(schedule: Schedule) -> bool:
    """Whether backward runs in two parts, as the last stage, which is the first to run one, tells."""
    last = schedule.num_stages - 1
    ops = (action.op for action in schedule.program(schedule.placement[last][0]) if action.stage == last)
    return next((op for op in ops if op in (Op.B, Op.I)), Op.B) is Op.I


def _named(plan: Plan, name: str, minibatches: int | None) -> Schedule:
    stages = len(plan.partition)
    own = name == plan.schedule
    chunks = checked_chunks(name, plan.chunks if own else None) if name in ("interleaved", "zb-v") else 1
    if stages % chunks:
        raise PartitionError(
            f"partition {list(plan.partition)} has {stages} stages, which {chunks} a rank does not divide: "
            f"schedule {name!r} needs {chunks} for each rank"
        )
    positions = stages // chunks
    replicas = plan.replicas if any(count > 1 for count in plan.replicas) else None
    ranks = sum(replicas or (1,) * positions)
    interval = plan.update_interval if own and name in ASYNCHRONOUS else None
    if minibatches is None:
        # Asynchronous ones need a steady part between filling and draining.
        minibatches = 2 * positions if name not in ASYNCHRONOUS else 6 * ranks + 4 * (interval or ranks)
    chosen = chunks if name == "interleaved" else None
    return build(name, positions, minibatches, chunks=chosen, replicas=replicas, update_interval=interval)


def _without_messages(order: Order, rank: int, exists: Exists) -> Iterator[Action]:
    return (action for action in order(rank, exists) if action.op not in MESSAGES)
