"""The facts of a schedule: what follows from its programs and nothing else.

A STEP makes a version of the weights, F reads the newest, and the backward reads what its F read. A version
is live while it is the newest or a minibatch in flight has read it; a minibatch is in flight from its F to
its B or W.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from vpipe.errors import ScheduleError
from vpipe.schedule.action import COMMUNICATION, COMPUTE, Action, Op
from vpipe.schedule.lowering import as_run, lower
from vpipe.schedule.program import Schedule
from vpipe.schedule.steady import steady_bubble
from vpipe.schedule.walk import Cost, unit_cost, walk

MOST_FORWARDS = 10_000_000
"""Stages times minibatches, of a schedule whose actions are all looked at. More would take hours."""


class Holding(NamedTuple):
    """The most that one rank of a stage ever holds, and the oldest weights that it ever uses."""

    in_flight: int
    versions: int
    staleness: int
    """Updates between the version that a minibatch read and the one that its own update replaces."""


def bubble(schedule: Schedule, cost: Cost = unit_cost) -> float:
    """The share of all ranks' time, from the first start to the last end, in which nothing is computed."""
    busy = end = 0.0
    for event in walk(as_run(finite(schedule)), cost):
        if event.action.op in COMPUTE:
            busy += event.end - event.start
        end = max(end, event.end)
    return 1 - busy / (end * schedule.num_ranks) if end else 0.0


def show_bubble(schedule: Schedule) -> str:
    steady = steady_bubble(schedule)
    return f"bubble {bubble(schedule):.1%}" + (
        "" if steady is None else f", {steady:.1%} in the steady state"
    )


def holdings(schedule: Schedule) -> list[Holding]:
    """For each stage, the most that any of its ranks holds."""
    found = [Holding(0, 1, 0)] * schedule.num_stages
    for rank in range(finite(schedule).num_ranks):
        program = (
            list(schedule.program(rank)) if len(schedule.stages_of(rank)) > 1 else schedule.program(rank)
        )
        for stage in schedule.stages_of(rank):
            held = holding(action for action in program if action.stage == stage)
            found[stage] = Holding(*map(max, found[stage], held))
    return found


def holding(actions: Iterable[Action]) -> Holding:
    """The same for the actions of one stage on one rank."""
    newest = in_flight = versions = staleness = 0
    read: dict[int, int] = {}  # minibatch in flight: the version that its F read
    ungathered: list[int] = []  # versions read by minibatches whose gradients wait for their update
    for _, op, minibatch in actions:
        if op is Op.F:
            read[minibatch] = newest
            in_flight = max(in_flight, len(read))
        elif op is Op.B or op is Op.W:
            ungathered.append(read.pop(minibatch))
        elif op is Op.STEP:
            staleness = max([staleness, *(newest - version for version in ungathered)])
            ungathered.clear()
            newest += 1
        else:
            continue
        versions = max(versions, len({newest, *read.values()}))
    return Holding(in_flight, versions, staleness)


def mean_delay(schedule: Schedule) -> float:
    """Updates between the weights that a gradient is of and those that it is applied to, on average.

    The average is over stages and minibatches; of a generated schedule over those of its steady part.
    """
    if schedule.synchronous:
        return 0.0
    shown, first = schedule, 0
    if schedule.lazy:
        interval = schedule.update_interval
        first = -(-schedule.representative // interval) * interval  # whole updates are counted
        shown = replace(schedule, minibatches=2 * first)
    means = []
    for stage, ranks in enumerate(finite(shown).placement):
        delays = [
            delay
            for rank in ranks
            for minibatch, delay in _delays(action for action in shown.program(rank) if action.stage == stage)
            if minibatch >= first
        ]
        means.append(fmean(delays) if delays else 0.0)
    return fmean(means)


def _delays(actions: Iterable[Action]) -> Iterator[tuple[int, int]]:
    """Of one stage on one rank: each minibatch with the updates between its F and its own STEP."""
    made = 0
    read: dict[int, int] = {}
    waiting: list[int] = []  # minibatches whose gradients wait for their update
    for _, op, minibatch in actions:
        if op is Op.F:
            read[minibatch] = made
        elif op is Op.B or op is Op.W:
            waiting.append(minibatch)
        elif op is Op.STEP:
            yield from ((number, made - read.pop(number)) for number in waiting)
            waiting.clear()
            made += 1


def makes_versions(schedule: Schedule, stage: int) -> bool:
    """Whether minibatches are in flight when the stage updates; an endless schedule's first updates tell."""
    if schedule.synchronous:
        return False
    in_flight = updates = 0
    for action in schedule.program(schedule.placement[stage][0]):
        if action.stage == stage:
            in_flight += {Op.F: 1, Op.B: -1, Op.W: -1}.get(action.op, 0)
            updates += action.op is Op.STEP
            if action.op is Op.STEP and (in_flight or (schedule.lazy and updates == 3)):
                return in_flight > 0
    return False


def fresh_gradients(schedule: Schedule) -> bool:
    """Whether an update follows every backward of every rank, so that each finds no gradients of an earlier one."""
    counts = {len(ranks) for ranks in schedule.placement}
    return not schedule.synchronous and counts == {schedule.update_interval} and not splits_backward(schedule)


def splits_backward(schedule: Schedule) -> bool:
    """Whether backward runs in two parts; of a generated schedule the last stage's first backward tells."""
    if not schedule.lazy:
        return any(
            action.op is Op.I for rank in range(schedule.num_ranks) for action in schedule.program(rank)
        )
    last = schedule.num_stages - 1
    ops = (action.op for action in schedule.program(schedule.placement[last][0]) if action.stage == last)
    return next((op for op in ops if op in (Op.B, Op.I)), Op.B) is Op.I


def describe(schedule: Schedule, communication: bool = False) -> dict[str, object]:
    """What `vpipe schedule --json` prints; with `communication`, sends, receives and reductions too."""
    shown = lower(schedule) if communication and not schedule.lowered else schedule
    programs = [finite(shown).program(rank) for rank in range(shown.num_ranks)]
    hidden = frozenset() if communication else COMMUNICATION
    held = holdings(schedule)
    return {
        "name": schedule.name,
        "stages": schedule.num_stages,
        "minibatches": schedule.minibatches,
        "update_interval": schedule.update_interval,
        "placement": [list(ranks) for ranks in schedule.placement],
        **({} if schedule.depth is None else {"depth": list(schedule.depth)}),
        "ranks": [[str(action) for action in program if action.op not in hidden] for program in programs],
        "bubble": bubble(schedule),
        "steady_bubble": steady_bubble(schedule),
        "in_flight": [stage.in_flight for stage in held],
        "versions": [stage.versions for stage in held],
        "staleness": [stage.staleness for stage in held],
    }


def sample(schedule: Schedule) -> Schedule:
    """The schedule itself or, of an endless one, so much of it as shows what it ever holds."""
    return schedule if schedule.minibatches else replace(schedule, minibatches=schedule.representative)


def finite(schedule: Schedule) -> Schedule:
    if schedule.minibatches is None:
        raise ScheduleError(
            f"schedule {schedule.name!r} has no end: give the number of minibatches to look at"
        )
    if schedule.minibatches * schedule.num_stages > MOST_FORWARDS:
        raise ScheduleError(
            f"minibatches is {schedule.minibatches}: of {schedule.num_stages} stages "
            f"{MOST_FORWARDS // schedule.num_stages:,} at most are looked at, one by one"
        )
    return schedule
