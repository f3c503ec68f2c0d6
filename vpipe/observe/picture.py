"""The pictures of a run for notebooks: a few updates from the middle of its timeline, and its loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor, isfinite, log10

from vpipe.record.events import RankEvents, Recorded
from vpipe.schedule import Op
from vpipe.schedule.action import COMPUTE
from vpipe.schedule.picture import CLASSES, GAP, LEFT, ROW, TOP, legend, sheet

WIDTH = 820
"""Of what is drawn, right of the names of the ranks."""
ACTIONS = 24
"""Of rank 0, at least: computing ones, up to the end of an update."""
LABEL = 16
"""Width of the narrowest box with a number in it."""
HEIGHT = 180


def draw_timeline(ranks: Sequence[RankEvents]) -> str | None:
    """A lane for each rank, as in the picture of a schedule, but as measured; None if nothing was trained."""
    window = _window(ranks[0].actions) if ranks else None
    if window is None:
        return None
    start, end = window
    scale = WIDTH / (end - start)
    height = TOP + len(ranks) * (ROW + GAP) + 52
    body: list[str] = []
    ops: set[Op] = set()
    for lane, events in enumerate(ranks):
        y = TOP + lane * (ROW + GAP)
        body.append(f'<text x="16" y="{y + 17}">rank {events.rank}</text>')
        body.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW}" rx="4"/>')
        stages = sorted({entry.action.stage for entry in events.actions})
        for entry in events.actions:
            if entry.evaluation or entry.start < start or entry.end > end:
                continue
            later = stages.index(entry.action.stage) > 0
            body += _box(entry, LEFT + (entry.start - start) * scale, scale * entry.duration, y, later)
            ops.add(entry.action.op)
    for mark in _marks(0.0, 1e3 * (end - start)):
        x = LEFT + mark / 1e3 * scale
        body.append(f'<text class="faint" text-anchor="middle" x="{x:g}" y="{height - 42}">{mark:g}</text>')
    body += legend(ops, height - 16)
    return sheet(LEFT + WIDTH + 24, height, "measured, in ms", body)


def draw_loss(losses: Sequence[Sequence[float]], evaluations: Sequence[Sequence[float]]) -> str | None:
    """The loss after each number of updates, evaluations as dots; None if there is none that is finite."""
    train, dots = (
        [(x, y) for x, y in points if _is_number(x) and _is_number(y)] for points in (losses, evaluations)
    )
    points = [*train, *dots]
    if not points:
        return None
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left or 1)
        up = (y - low) / (high - low or 1)
        return LEFT + across * WIDTH, TOP + HEIGHT * (1 - up)

    body = []
    for mark in _marks(low, high):
        y = at(left, mark)[1]
        body.append(
            f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
            f'<text class="faint" text-anchor="end" x="{LEFT - 8}" y="{y + 4:.1f}">{mark:g}</text>'
        )
    for mark in _marks(left, right):
        x = at(mark, low)[0]
        body.append(
            f'<text class="faint" text-anchor="middle" x="{x:.1f}" y="{TOP + HEIGHT + 20}">{mark:g}</text>'
        )
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in train))
    body.append(f'<polyline points="{line}" fill="none" stroke="var(--series-0)" stroke-width="1.5"/>')
    for x, y in (at(*point) for point in dots):
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--series-1)"/>')
    title = "loss by updates" + (", evaluations as dots" if dots else "")
    return sheet(LEFT + WIDTH + 24, TOP + HEIGHT + 36, title, body)


def _window(actions: Sequence[Recorded]) -> tuple[float, float] | None:
    """From an update in the middle of the training to the end of a later one."""
    trained = [entry for entry in actions if not entry.evaluation and entry.action.op in (*COMPUTE, Op.STEP)]
    steps = [place for place, entry in enumerate(trained) if entry.action.op is Op.STEP]
    if not steps:
        return None
    first = steps[(len(steps) - 1) // 2] + 1 if len(steps) > 1 else 0
    last = next((place for place in steps if place >= first + ACTIONS), steps[-1])
    return trained[first].start, trained[last].end


def _box(entry: Recorded, x: float, width: float, y: float, later: bool) -> Iterator[str]:
    op = entry.action.op
    if op is Op.STEP:
        yield f'<line class="step" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 2}" y2="{y + ROW + 2}"/>'
    elif op in COMPUTE:
        pale = " later" if later else ""
        wide = max(1.0, width - 1)
        yield f'<rect class="{CLASSES[op]}{pale}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW}" rx="2"/>'
        if width >= LABEL:
            yield f'<text class="label" x="{x + width / 2:.1f}" y="{y + 17}">{entry.action.minibatch}</text>'


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _marks(low: float, high: float) -> list[float]:
    """Round numbers in a range, about five."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = -int(-low // step)
    return [step * number for number in range(first, int(high // step) + 1)]
