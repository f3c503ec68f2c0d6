"""The picture of a plan: the blocks of each position, what is done with them, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from vpipe.cost import KEEP, POLICIES, RECOMPUTE, SWAP
from vpipe.plan.report import HEADS, headline, runs
from vpipe.plan.result import PlanResult, RankPlan
from vpipe.schedule.picture import GAP, ROW, TOP, sheet
from vpipe.system.units import duration, show_bytes

LEFT = 90
LETTER = 9
"""Width of a letter of the title."""
WIDE, NARROW = 16, 3
"""Width of a block, of a model with few and with very many."""
BLOCKS, BAR = 460, 150
"""Widths of the two columns: blocks, and memory."""
COLOURS = {KEEP: "forward", RECOMPUTE: "update", SWAP: "send"}
WORDS = {KEEP: "kept", **HEADS}


def draw_plan(result: PlanResult) -> str:
    """A row for each position: its blocks, coloured by what is done with their activations, and its memory."""
    most = max(sum(len(stage.policies) for stage in each.stages) for each in result.positions)
    cell = max(NARROW, min(WIDE, BLOCKS / (most + 1)))
    memory = LEFT + most * cell + 40
    height = TOP + len(result.positions) * (ROW + GAP) + 40
    body = [
        *(
            line
            for place, each in enumerate(result.positions)
            for line in _row(result, each, place, cell, memory)
        ),
        *_legend([name for name in POLICIES if name in result.policies], height - 14),
    ]
    title = headline(result)
    return sheet(max(memory + BAR + 190, 2 * 16 + LETTER * len(title)), height, title, body)


def _row(result: PlanResult, position: RankPlan, place: int, cell: float, memory: float) -> Iterator[str]:
    y = TOP + place * (ROW + GAP)
    x: float = LEFT
    word = "rank" if len(position.ranks) == 1 else "ranks"
    yield f'<text x="16" y="{y + 17}">{word} {runs(position.ranks)}</text>'
    for stage in position.stages:
        for policy in stage.policies:
            yield f'<rect x="{x:g}" y="{y}" width="{cell - 1:g}" height="{ROW}" rx="2" fill="{_colour(policy)}"/>'
            x += cell
        x += cell / 2  # between the stages of one rank
    total = position.memory.total
    share = total / result.cap
    label = f"{show_bytes(total)} ({share:.0%}), {duration(position.seconds)}"
    yield f'<rect class="lane" x="{memory:g}" y="{y}" width="{BAR}" height="{ROW}" rx="4"/>'
    yield (
        f'<rect x="{memory:g}" y="{y}" width="{BAR * min(1.0, share):g}" height="{ROW}" rx="4" '
        'fill="var(--backward)"/>'
    )
    yield f'<text x="{memory + BAR + 10:g}" y="{y + 17}">{label}</text>'


def _legend(policies: list[str], y: float) -> Iterator[str]:
    x = LEFT
    for policy in policies:
        word = WORDS.get(policy, policy)
        yield f'<rect x="{x}" y="{y - 10:g}" width="12" height="12" rx="3" fill="{_colour(policy)}"/>'
        yield f'<text x="{x + 18}" y="{y:g}">{escape(word)}</text>'
        x += 32 + 7 * len(word)
    yield f'<text class="faint" x="{x + 10}" y="{y:g}">a block each; then memory of a rank, time of a minibatch</text>'


def _colour(policy: str) -> str:
    return f"var(--{COLOURS.get(policy, 'accent')})"
