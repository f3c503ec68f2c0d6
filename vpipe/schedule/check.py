"""The check of a schedule before any process starts: one that cannot run is refused, with the place shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from vpipe.errors import ScheduleError
from vpipe.schedule.action import COMMUNICATION, UPDATE, Action, Op
from vpipe.schedule.draw import draw_marked
from vpipe.schedule.lowering import lower
from vpipe.schedule.program import Exists, Order, Schedule
from vpipe.schedule.reductions import reductions_out_of_order, with_late_reductions
from vpipe.schedule.rules import Rules
from vpipe.schedule.walk import Deadlock, Event, Wait, walk

Done = dict[Action, Action]
"""What a rank has done, and in which action: a B does an I and a W."""


class ScheduleFault(NamedTuple):
    rank: int
    place: int
    """Where it stands in the rank's program; behind its end for an action that is missing."""
    action: Action
    what: str


def check(
    schedule: Schedule, edges: Iterable[tuple[int, int]] | None = None, buffer: int | None = None
) -> None:
    """Raises `ScheduleError`, with the grid drawn and the place marked, for a schedule that cannot run.

    Every minibatch must pass every stage once, in order, on the right rank; each message must be sent and
    received once; replicas must reduce in one order; no rank may wait for ever; no backward may stand before the
    STEP of an earlier update, which would get its gradients. `buffer` is how many messages a channel holds before a
    send has to wait (default: as many as at run time). A lazy schedule repeats itself, so only its beginning is
    looked at.
    """
    total = schedule.representative
    lowered = schedule if schedule.lowered else lower(schedule, edges)
    rules = Rules(lowered, edges)
    exists = range(total).__contains__
    faults = find_faults(rules, total, exists)
    faults = faults or [
        ScheduleFault(*fault) for fault in islice(reductions_out_of_order(lowered, exists), 1)
    ]
    # A faulty program is walked, for the drawing, as far as it makes sense.
    order = partial(cut, lowered.order, {fault.rank: fault.place for fault in faults})
    sound = replace(lowered, order=partial(with_late_reductions, order))
    events: list[Event] = []
    waits: list[Wait] = []
    try:
        for event in walk(sound, edges=rules.edges, buffer=buffer or schedule.buffer, exists=exists):
            events.append(event)
    except Deadlock as deadlock:
        waits = deadlock.waits
    if faults:
        rank, _, action, what = faults[0]
        message, marks = f"rank {rank}: {action} {what}", {rank: f"[{action}] << {what}"}
    elif waits:
        message = f"deadlock: {'; '.join(map(str, waits))}"
        marks = {wait.rank: f"[{wait.action}] << waits for {wait.needed}" for wait in waits}
    else:
        return
    raise ScheduleError(
        f"schedule {schedule.name!r} cannot run: {message}", draw_marked(schedule, events, marks)
    )


def cut(order: Order, ends: Mapping[int, int | None], rank: int, exists: Exists) -> Iterator[Action]:
    return islice(order(rank, exists), ends.get(rank))


def find_faults(rules: Rules, total: int, exists: Exists) -> list[ScheduleFault]:
    """The first fault of each program by itself; if there is none, what the programs lack."""
    schedule = rules.schedule
    done: list[Done] = [{} for _ in range(schedule.num_ranks)]
    faults: list[ScheduleFault] = []
    for rank in range(schedule.num_ranks):
        found = list(misplaced(rules, total, rank, schedule.program(rank, exists), done[rank]))
        faults += sorted(found, key=lambda fault: fault.place)[:1]
    return faults or list(islice(missing(rules, total, done), 1))


def missing(rules: Rules, total: int, done: list[Done]) -> Iterator[ScheduleFault]:
    schedule = rules.schedule
    for minibatch in range(total):
        for stage in range(schedule.num_stages):
            rank = schedule.rank_of(stage, minibatch)
            for op in rules.operations(stage, minibatch):
                if Action(stage, op, minibatch) not in done[rank]:
                    yield ScheduleFault(rank, len(done[rank]), Action(stage, op, minibatch), "is missing")
    for last in sorted({min(rules.group_end(minibatch), total - 1) for minibatch in range(total)}):
        for stage, ranks in enumerate(schedule.placement):
            for rank in ranks:
                if Action(stage, Op.STEP, last) not in done[rank]:
                    yield ScheduleFault(rank, len(done[rank]), Action(stage, Op.STEP, last), "is missing")


def misplaced(
    rules: Rules, total: int, rank: int, program: Iterator[Action], done: Done
) -> Iterator[ScheduleFault]:
    """What one rank does twice, too early, or not for itself; fills `done`."""
    unmet: list[tuple[int, Action, Action]] = []
    for index, action in enumerate(program):
        if what := misfit(rules, total, rank, action):
            yield ScheduleFault(rank, index, action, what)
            continue
        for source, needed in rules.dependencies(action, rank):
            if source == rank and needed not in done:
                unmet.append((index, action, needed))
        if action.op is Op.B or action.op is Op.W:
            earlier = Action(action.stage, Op.STEP, rules.group(action.minibatch).start - 1)
            if earlier.minibatch >= 0 and earlier not in done:
                yield ScheduleFault(
                    rank, index, action, f"stands before {earlier}, which would get its gradients"
                )
        for part in (Op.I, Op.W) if action.op is Op.B else (action.op,):
            if action._replace(op=part) in done:
                yield ScheduleFault(rank, index, action, "runs twice")
            done[action._replace(op=part)] = action
    for index, action, needed in unmet:
        if needed in done:
            yield ScheduleFault(rank, index, action, f"stands before {done[needed]}, which it needs")


def misfit(rules: Rules, total: int, rank: int, action: Action) -> str | None:
    """What is wrong with an action wherever it stands."""
    schedule = rules.schedule
    stage, op, minibatch = action
    if stage >= schedule.num_stages or rank not in schedule.placement[stage]:
        return f"is of a stage that rank {rank} does not hold"
    if minibatch >= total:
        return f"is of a minibatch that does not exist: there are {total}"
    if op in UPDATE:
        at_end = minibatch == min(rules.group_end(minibatch), total - 1)
        return None if at_end else f"does not end an update of {schedule.update_interval} minibatches"
    if rank != schedule.rank_of(stage, minibatch):
        return f"belongs to rank {schedule.rank_of(stage, minibatch)}"
    if op in COMMUNICATION and not rules.channels(action):
        return "has nobody at the other end"
    return None
