"""The guides' settings for a model of any depth, and the cap under which they are compared."""

from __future__ import annotations

from gpu_bench import Bench, Case

from vpipe.cost import Profile

RANKS = 4
CAP = 0.97
"""Of what PipeDream's setting needs with its whole batch: VPipe's hand-made one, made for such a card, still fits."""
ROOMS = (0.95, 0.88, 0.8)
"""Shares of the cap for a plan: the rest is for gaps between what the allocator has given out."""


def even_stages(blocks: int) -> tuple[int, ...]:
    """PipeDream's and GPipe's cut: 13, 13, 13, 10 of the 49 blocks of BERT-large."""
    each = -(-blocks // RANKS)
    if blocks <= (RANKS - 1) * each:
        each = blocks // RANKS  # few blocks: the last stage would have none
    return (each,) * (RANKS - 1) + (blocks - (RANKS - 1) * each,)


def hand_made(blocks: int) -> tuple[int, ...]:
    """The guides' cut for VPipe, 12, 13, 13, 11 of 49: one block of the first stage is the last one's."""
    first, *middle, last = even_stages(blocks)
    return (first - 1, *middle, last + 1)


def find_cap(bench: Bench, profile: Profile, limits: dict[str, float]) -> int:
    """A little less than PipeDream's setting needs: the bytes of a rank under which it does not fit."""
    case = Case(
        "PipeDream's setting, whole batch, no cap",
        "pipedream",
        bench.batch,
        partition=even_stages(bench.blocks),
    )
    if bench.cap is None:
        bench.run(case, profile, limits)
        needed = max(bench.world.all_gather("needed", bench.peak()))
        bench.cap = int(CAP * (needed or max(bench.prediction(case, profile)["predicted_bytes"])))
    return bench.cap
