"""The lowering: from what is computed to what is computed, sent, received and reduced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from vpipe.errors import ScheduleError
from vpipe.schedule.action import Action, Op
from vpipe.schedule.program import Exists, Schedule
from vpipe.schedule.rules import Rules


def lower(
    schedule: Schedule, edges: Iterable[tuple[int, int]] | None = None, reduce: Iterable[int] = ()
) -> Schedule:
    """The same schedule with its communication written out.

    A stage that reads from or is read by another rank gets RECV before and SEND after its F, B and I, one for
    all its peers. Stages with replicas, and those named in `reduce`, get a REDUCE after a group's last
    B or W.
    """
    if schedule.lowered:
        raise ScheduleError(
            f"schedule {schedule.name!r} is lowered already: its sends and receives stand in it"
        )
    named = frozenset(reduce)
    if unknown := sorted(named - frozenset(range(schedule.num_stages))):
        raise ScheduleError(f"reduce names stage {unknown[0]}: stages are 0 to {schedule.num_stages - 1}")
    reduced = named | _replicated(schedule)
    rules = Rules(schedule, edges)
    return replace(
        schedule, lowered=True, edges=rules.edges, reduced=reduced, order=partial(_lowered, rules, reduced)
    )


def as_run(schedule: Schedule) -> Schedule:
    """The schedule with the times of a run: replicas of a stage wait for each other at its updates."""
    return schedule if schedule.lowered or not _replicated(schedule) else lower(schedule)


def _replicated(schedule: Schedule) -> frozenset[int]:
    return frozenset(stage for stage, ranks in enumerate(schedule.placement) if len(ranks) > 1)


def _lowered(rules: Rules, reduced: frozenset[int], rank: int, exists: Exists) -> Iterator[Action]:
    actions = rules.schedule.program(rank, exists)
    if not reduced.isdisjoint(rules.schedule.stages_of(rank)):
        actions = _with_reductions(rules, reduced, rank, exists, actions)
    return _with_messages(rules, actions)


def _with_messages(rules: Rules, actions: Iterator[Action]) -> Iterator[Action]:
    for action in actions:
        stage, op, minibatch = action
        if op is Op.F:
            if rules.remote_producers(stage, minibatch):
                yield Action(stage, Op.RECV_F, minibatch)
            yield action
            if rules.remote_readers(stage, minibatch):
                yield Action(stage, Op.SEND_F, minibatch)
        elif op is Op.B or op is Op.I:
            if rules.remote_readers(stage, minibatch):
                yield Action(stage, Op.RECV_B, minibatch)
            yield action
            if rules.remote_producers(stage, minibatch):
                yield Action(stage, Op.SEND_B, minibatch)
        else:
            yield action


def _with_reductions(
    rules: Rules, reduced: frozenset[int], rank: int, exists: Exists, actions: Iterator[Action]
) -> Iterator[Action]:
    """Each REDUCE stands as early as it can, a rank's stages following one another from last to first.

    The fixed order is for collectives that block: all replicas must then enter them in the same order.
    """
    turns = [stage for stage in reversed(rules.schedule.stages_of(rank)) if stage in reduced]
    count = dict.fromkeys(turns, 0)
    newest = dict.fromkeys(turns, 0)
    complete: dict[int, int] = {}
    for action in actions:
        stage, op, minibatch = action
        if stage not in count or op is Op.F or op is Op.I:
            yield action
        elif op is Op.STEP:
            if stage in turns:  # its turn has not come, or its rank owns nothing of the group
                turns.remove(stage)
                complete.pop(stage, None)
                yield Action(stage, Op.REDUCE, minibatch)
            yield action
            turns.append(stage)
            count[stage] = 0
        else:
            yield action
            count[stage] += 1
            newest[stage] = max(newest[stage], minibatch)
            if count[stage] == len(rules.own(stage, rank, newest[stage])):
                complete |= _completed(rules, stage, newest[stage], exists)
            while turns and turns[0] in complete:
                ready = turns.pop(0)
                yield Action(ready, Op.REDUCE, complete.pop(ready))


def _completed(rules: Rules, stage: int, minibatch: int, exists: Exists) -> dict[int, int]:
    """The stage with the last minibatch of its group, if `minibatch` is the last of it that its rank runs."""
    replicas = len(rules.schedule.placement[stage])
    end = min(rules.group_end(minibatch), minibatch + replicas)
    last = minibatch
    while last < end and exists(last + 1):
        last += 1
    return {} if last == minibatch + replicas else {stage: last}
