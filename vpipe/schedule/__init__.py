"""Schedules as data: built by name, lowered, checked, walked, drawn. The standard library only."""

from vpipe.schedule.action import Action, Op
from vpipe.schedule.builders import ASYNCHRONOUS, NAMES, SPLIT, build
from vpipe.schedule.check import check
from vpipe.schedule.draw import draw
from vpipe.schedule.facts import Holding, bubble, describe, holdings
from vpipe.schedule.lowering import lower
from vpipe.schedule.picture import draw_svg
from vpipe.schedule.program import Schedule, listed
from vpipe.schedule.rules import Rules
from vpipe.schedule.table import read_table, write_table
from vpipe.schedule.walk import Deadlock, Event, unit_cost, walk

__all__ = [
    "ASYNCHRONOUS",
    "NAMES",
    "SPLIT",
    "Action",
    "Deadlock",
    "Event",
    "Holding",
    "Op",
    "Rules",
    "Schedule",
    "bubble",
    "build",
    "check",
    "describe",
    "draw",
    "draw_svg",
    "holdings",
    "listed",
    "lower",
    "read_table",
    "unit_cost",
    "walk",
    "write_table",
]
