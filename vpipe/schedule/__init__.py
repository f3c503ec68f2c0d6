"""Schedules as data: built by name, lowered, checked, walked, drawn. The standard library only."""

from vpipe.schedule.action import Action, Op
from vpipe.schedule.check import check
from vpipe.schedule.draw import draw
from vpipe.schedule.facts import Holding, bubble, describe, holdings
from vpipe.schedule.kind import PipelineShape, ScheduleKind, table_kind
from vpipe.schedule.lowering import lower
from vpipe.schedule.picture import draw_svg
from vpipe.schedule.program import Schedule, listed
from vpipe.schedule.registry import KINDS, build, guides_schedule, kind_of
from vpipe.schedule.rules import Rules
from vpipe.schedule.table import read_table, write_table
from vpipe.schedule.walk import Deadlock, Event, unit_cost, walk

__all__ = [
    "KINDS",
    "Action",
    "Deadlock",
    "Event",
    "Holding",
    "Op",
    "PipelineShape",
    "Rules",
    "Schedule",
    "ScheduleKind",
    "bubble",
    "build",
    "check",
    "describe",
    "draw",
    "draw_svg",
    "guides_schedule",
    "holdings",
    "kind_of",
    "listed",
    "lower",
    "read_table",
    "table_kind",
    "unit_cost",
    "walk",
    "write_table",
]
