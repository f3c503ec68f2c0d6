"""The order of reductions: replicas of a stage begin and end them together.

A collective has no tag: the ranks of a group must post theirs in one order. And a reduction over channels ends when all
its ranks have come to the update (`communication/all_reduce.py`): no rank may have to make that update before another
one can come to it.
"""

from __future__ import annotations

from collections.abc import Iterator

from vpipe.schedule.action import Action, Op
from vpipe.schedule.program import Exists, Order, Schedule

OrderFault = tuple[int, int, Action, str]
"""A rank, the place in its program, the action there, what is wrong with it."""


def with_late_reductions(order: Order, rank: int, exists: Exists) -> Iterator[Action]:
    """The program with each REDUCE where it ends: at the next update of the rank."""
    begun: list[Action] = []
    for action in order(rank, exists):
        if action.op is Op.REDUCE:
            begun.append(action)
            continue
        if action.op is Op.STEP:
            yield from begun
            begun.clear()
        yield action
    yield from begun


def reductions_out_of_order(schedule: Schedule, exists: Exists) -> Iterator[OrderFault]:
    """Where ranks that hold the same stages reduce them in different orders."""
    placement = schedule.placement
    for group in sorted({placement[stage] for stage in schedule.reduced if len(placement[stage]) > 1}):
        reduced = [
            [
                (place, action)
                for place, action in enumerate(schedule.program(rank, exists))
                if action.op is Op.REDUCE and placement[action.stage] == group
            ]
            for rank in group
        ]
        for rank, actions in zip(group[1:], reduced[1:], strict=True):
            for (place, action), (_, first) in zip(actions, reduced[0], strict=False):
                if action != first:
                    yield rank, place, action, f"stands where rank {group[0]} has {first}"
                    break
