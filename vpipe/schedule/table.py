"""The table: a schedule as CSV, one row a rank, one action a cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from vpipe.errors import ScheduleError
from vpipe.schedule.action import COMMUNICATION, Action, Op
from vpipe.schedule.program import Schedule, listed


def write_table(schedule: Schedule) -> str:
    """The programs as CSV; everything else about a schedule can be read off them."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank in range(schedule.num_ranks):
        writer.writerow(map(str, schedule.program(rank)))
    return out.getvalue()


def read_table(text: str, name: str = "table") -> Schedule:
    """The schedule that a table writes down, unchecked. Empty cells are skipped.

    Without any STEP it is taken for a synchronous schedule, whose stages are updated at the end.
    """
    programs = read_programs(text, name)
    actions = [action for program in programs for action in program]
    if not actions:
        raise ScheduleError(f"{name}: there is no action in the table")
    placement = read_placement(programs, name)
    minibatches = 1 + max(action.minibatch for action in actions)
    if minibatches > len(actions):
        raise ScheduleError(
            f"{name}: minibatch {minibatches - 1} is in a table of {len(actions)} actions: number minibatches from 0 "
            "on, without gaps"
        )
    steps = sorted({action.minibatch for action in actions if action.op is Op.STEP})
    if not steps:
        for rank, program in enumerate(programs):
            held = [stage for stage, ranks in enumerate(placement) if rank in ranks]
            program.extend(Action(stage, Op.STEP, minibatches - 1) for stage in reversed(held))
    return Schedule(
        name=name,
        placement=placement,
        minibatches=minibatches,
        update_interval=steps[0] + 1 if steps else minibatches,
        synchronous=len(steps) <= 1,
        order=listed(programs),
        lazy=False,
        lowered=any(action.op in COMMUNICATION for action in actions),
        reduced=frozenset(action.stage for action in actions if action.op is Op.REDUCE),
    )


def read_programs(text: str, name: str) -> list[list[Action]]:
    programs = []
    for row, cells in enumerate(_rows(text, name), start=1):
        program = []
        for column, cell in enumerate(cells, start=1):
            if cell.strip():
                try:
                    program.append(Action.parse(cell))
                except ScheduleError as error:
                    raise ScheduleError(f"{name}, row {row}, column {column}: {error}") from None
        programs.append(program)
    return programs


def _rows(text: str, name: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(io.StringIO(text))
    except csv.Error as error:
        raise ScheduleError(f"{name}: cannot be read as CSV: {error}") from None


def read_placement(programs: list[list[Action]], name: str) -> tuple[tuple[int, ...], ...]:
    """The ranks of each stage in the order of their first minibatches; those that run none come last."""
    first: dict[int, dict[int, float]] = {}
    for rank, program in enumerate(programs):
        for stage, op, minibatch in program:
            ranks = first.setdefault(stage, {})
            known = ranks.setdefault(rank, float("inf"))
            if op is Op.F:
                ranks[rank] = min(known, minibatch)
    for stage in range(max(first)):
        if stage not in first:
            raise ScheduleError(f"{name}: stage {stage} is on no rank, but stage {max(first)} is on one")
    for rank, program in enumerate(programs):
        if not program:
            raise ScheduleError(f"{name}, row {rank + 1}: rank {rank} has no action")
    return tuple(
        tuple(sorted(first[stage], key=lambda rank: (first[stage][rank], rank)))
        for stage in range(len(first))
    )
