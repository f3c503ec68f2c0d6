"""The picture: a schedule as SVG, which follows the reader's light or dark colours."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from html import escape
from itertools import takewhile

from vpipe.errors import printable
from vpipe.schedule.action import COMPUTE, Op
from vpipe.schedule.facts import show_bubble
from vpipe.schedule.lowering import as_run
from vpipe.schedule.palette import css
from vpipe.schedule.program import Schedule, shape
from vpipe.schedule.walk import Event, walk

UNIT, ROW, GAP = 30, 26, 6
LEFT, TOP, BOTTOM = 70, 46, 52
COLUMNS = 1000

NAMES_OF_OPS = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"}

CLASSES = {Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.W: "weight"}
STYLE = """
text { font: 11px ui-sans-serif, system-ui, sans-serif; fill: var(--ink); }
.title { font-size: 14px; font-weight: 600; } .faint { fill: var(--quiet); } .lane { fill: var(--between); }
.label { fill: var(--on); text-anchor: middle; } .weight + .label { fill: var(--on-pale); }
.later { fill-opacity: 0.62; }
.forward { fill: var(--forward); } .backward { fill: var(--backward); } .weight { fill: var(--weight); }
.step { stroke: var(--update); stroke-width: 3; }
"""


def draw_svg(schedule: Schedule, *, columns: int = COLUMNS) -> str:
    """One lane a rank, one box an action at F = I = W = 1 and B = 2; higher chunks of a rank are paler."""
    events = list(takewhile(lambda event: event.start < columns, walk(as_run(schedule))))
    end = max(event.end for event in events)
    width = LEFT + end * UNIT + 20
    height = TOP + schedule.num_ranks * (ROW + GAP) + BOTTOM
    shown = f"{schedule.name}: {shape(schedule)}, {schedule.minibatches} minibatches"
    body = list(lanes(schedule, end))
    for event in events:
        body += box(schedule, event)
    body += legend({event.action.op for event in events}, height - 16)
    return sheet(width, height, f"{shown}; {show_bubble(schedule)}", body)


def sheet(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """A picture of this size with a title and what else is drawn, in the colours of all pictures."""
    title = escape(printable(title))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{title}">',
        f"<style>{css('svg')}{STYLE}</style>",
        f'<rect width="{width:g}" height="{height:g}" fill="var(--card)"/>',
        f'<text class="title" x="16" y="24">{title}</text>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def image(svg: str, alt: str) -> str:
    """A picture as HTML for notebooks: an image of its own, so that its styles do not reach the rest of the page."""
    data = b64encode(svg.encode()).decode()
    text = escape(printable(alt))
    return f'<img alt="{text}" style="max-width: 100%" src="data:image/svg+xml;base64,{data}">\n'


def lanes(schedule: Schedule, end: float) -> Iterator[str]:
    for rank in range(schedule.num_ranks):
        y = TOP + rank * (ROW + GAP)
        yield f'<text x="16" y="{y + 17}">rank {rank}</text>'
        yield f'<rect class="lane" x="{LEFT}" y="{y}" width="{end * UNIT:g}" height="{ROW}" rx="4"/>'
    y = TOP + schedule.num_ranks * (ROW + GAP) + 10
    for time in range(0, int(end) + 1, 5):
        yield f'<text class="faint" x="{LEFT + time * UNIT}" y="{y}">{time}</text>'


def box(schedule: Schedule, event: Event) -> list[str]:
    rank, action, start, end = event
    x, y = LEFT + start * UNIT, TOP + rank * (ROW + GAP)
    if action.op is Op.STEP:
        return [f'<line class="step" x1="{x:g}" x2="{x:g}" y1="{y - 2}" y2="{y + ROW + 2}"/>']
    if action.op not in COMPUTE:
        return []
    width = (end - start) * UNIT
    later = " later" if schedule.stages_of(rank).index(action.stage) else ""
    return [
        f'<rect class="{CLASSES[action.op]}{later}" x="{x + 1:g}" y="{y}" width="{width - 2:g}" '
        f'height="{ROW}" rx="4">'
        f"<title>{action}, {start:g} to {end:g}</title></rect>",
        f'<text class="label" x="{x + width / 2:g}" y="{y + 17}">{action.minibatch}</text>',
    ]


def legend(ops: set[Op], y: float) -> Iterator[str]:
    x = LEFT
    for op, name in NAMES_OF_OPS.items():
        if op in ops:
            yield f'<rect class="{CLASSES[op]}" x="{x}" y="{y - 10:g}" width="12" height="12" rx="3"/>'
            yield f'<text x="{x + 18}" y="{y:g}">{name}</text>'
            x += 32 + 7 * len(name)
    if Op.STEP in ops:
        yield f'<line class="step" x1="{x + 6}" x2="{x + 6}" y1="{y - 11:g}" y2="{y + 3:g}"/>'
        yield f'<text x="{x + 18}" y="{y:g}">update</text>'
