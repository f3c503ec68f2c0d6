"""The search for stages where a rank holds several: even ranks first, then the worst rank gives blocks away.

A rank's time depends on several cuts here, so there is no exact search. Cuts start where
all chunks work equally long. Then the worst rank (the one that lacks most memory, or else takes longest) hands its
first or last block to a stage nearby, all cuts between moving by one, as long as that helps and `EFFORT` lasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations
from math import comb, inf
from typing import NamedTuple

from vpipe.cost import KEEP, Profile
from vpipe.plan.choice import choose, least_memory
from vpipe.plan.loads import schedule_loads
from vpipe.plan.model import Slice, StageMemory, stage_time
from vpipe.plan.moments import Moment, Moments, at_moments, peak_memory, schedule_moments
from vpipe.plan.options import Policies
from vpipe.schedule import Schedule

NEARBY = 8
FEW = 200
"""Partitions that are all looked at before it is said that nothing fits."""
EFFORT = 5_000
"""What may be spent on looking at ranks (`ChunkHoldings.effort_of`), after which the cuts stay as they are."""


class PositionHolding(NamedTuple):
    """What the ranks of one position hold: a policy for each block of its slices, its memory and time."""

    slices: tuple[Slice, ...]
    policies: Policies
    memory: StageMemory
    seconds: float
    missing: int = 0
    """Bytes, if no policies fit."""


class Score(NamedTuple):
    """How bad it is; the squares tell progress where two ranks are equally slow."""

    missing: int
    seconds: float
    squares: float


def search_chunks(profile: Profile, schedule: Schedule, memory: int) -> list[PositionHolding]:
    """The holdings by position, with bytes missing where nothing fits; empty if there are too few blocks."""
    if schedule.num_stages > len(profile.blocks):
        return []
    return ChunkHoldings(profile, schedule, memory).search()


class ChunkHoldings:
    """What the ranks of each position hold for any cuts, and the climb."""

    def __init__(self, profile: Profile, schedule: Schedule, memory: int) -> None:
        self.profile = profile
        self.placement = schedule.placement
        self.loads = schedule_loads(schedule)
        self.moments = schedule_moments(schedule)
        self.memory = memory
        positions = sorted(set(self.placement))
        self.position_of = [positions.index(own) for own in self.placement]
        self.stages: list[list[int]] = [[] for _ in positions]
        for stage, position in enumerate(self.position_of):
            self.stages[position].append(stage)
        self.known: dict[tuple[int, ...], PositionHolding] = {}
        self.charged: set[tuple[int, ...]] = set()
        self.effort = EFFORT

    def search(self) -> list[PositionHolding]:
        cuts = self.even()
        holdings = [self.holding(position, cuts) for position in range(len(self.stages))]
        score = self.score(holdings)
        # Where memory is missing everywhere, no rank can take blocks from others.
        improved = any(holding.missing == 0 for holding in holdings)
        while improved and self.effort > 0:
            improved = False
            for moved, changed in self.moves(cuts, holdings):
                found = self.after(holdings, moved, changed, score)
                if found is not None and (reached := self.score(found)) < score:
                    cuts, holdings, score, improved = moved, found, reached, True
                    break
        blocks, stages = len(self.profile.blocks), len(self.placement)
        if score.missing and comb(blocks - 1, stages - 1) <= FEW:
            every = ((0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1))
            found_all = (
                [self.holding(position, one) for position in range(len(self.stages))] for one in every
            )
            holdings = min(holdings, *found_all, key=self.score)
        return holdings

    def after(
        self, holdings: Sequence[PositionHolding], cuts: Sequence[int], changed: set[int], score: Score
    ) -> list[PositionHolding] | None:
        """The holdings with other cuts; None as soon as they cannot be better than `score`, the worst come first."""
        found = list(holdings)
        missing = sum(holding.missing for position, holding in enumerate(holdings) if position not in changed)
        for position in changed:
            self.charge(position, cuts)
        for position in sorted(changed, key=lambda one: (-holdings[one].missing, -holdings[one].seconds)):
            found[position] = holding = self.holding(position, cuts)
            missing += holding.missing
            worse = missing >= score.missing if score.missing else missing or holding.seconds > score.seconds
            if worse:
                return None
        return found

    def even(self) -> list[int]:
        """The cuts, with the model's two ends, at equal parts of the compute; no stage without a block."""
        before = [0.0, *accumulate(block.forward + block.backward for block in self.profile.blocks)]
        blocks, stages = len(self.profile.blocks), len(self.placement)
        cuts = [0]
        for stage in range(1, stages):
            share = before[-1] * stage / stages
            allowed = range(cuts[-1] + 1, blocks - (stages - stage) + 1)
            cuts.append(min(allowed, key=lambda cut: abs(before[cut] - share)))
        return [*cuts, blocks]

    def moves(
        self, cuts: list[int], holdings: Sequence[PositionHolding]
    ) -> Iterator[tuple[list[int], set[int]]]:
        """Cuts with one block of the worst rank handed on, and the positions that this changes."""
        worst = max(
            range(len(holdings)), key=lambda index: (holdings[index].missing, holdings[index].seconds)
        )
        for stage in self.stages[worst]:
            if cuts[stage + 1] - cuts[stage] == 1:
                continue
            for other in range(max(0, stage - NEARBY), min(len(self.placement), stage + NEARBY + 1)):
                if other == stage:
                    continue
                moved = list(cuts)
                for cut in range(stage + 1, other + 1):
                    moved[cut] -= 1
                for cut in range(other + 1, stage + 1):
                    moved[cut] += 1
                first, last = sorted((stage, other))
                yield moved, set(self.position_of[first : last + 1])

    def slice(self, stage: int, cuts: Sequence[int]) -> Slice:
        own = self.placement[stage]
        before = self.placement[stage - 1] if stage else own
        after = self.placement[stage + 1] if stage + 1 < len(self.placement) else own
        return Slice(
            cuts[stage],
            cuts[stage + 1],
            self.loads[stage],
            own,
            None if before == own else before[-1],
            None if after == own else after[0],
        )

    def holding(self, position: int, cuts: Sequence[int]) -> PositionHolding:
        key = self.charge(position, cuts)
        if key not in self.known:
            slices = tuple(self.slice(stage, cuts) for stage in self.stages[position])
            self.known[key] = self.solve(slices, self.moments[position])
        return self.known[key]

    def charge(self, position: int, cuts: Sequence[int]) -> tuple[int, ...]:
        """Charges the effort of a holding when it is first looked at, solved or not; its key."""
        key = (position, *(cut for stage in self.stages[position] for cut in cuts[stage : stage + 2]))
        if key not in self.charged:
            self.charged.add(key)
            self.effort -= self.effort_of([self.slice(stage, cuts) for stage in self.stages[position]])
        return key

    def effort_of(self, slices: Sequence[Slice]) -> int:
        """That of a holding: its blocks, and the more of them differ the longer their policies are searched."""
        blocks = [block for piece in slices for block in self.profile.blocks[piece.start : piece.stop]]
        kinds = {(block.kept_bytes, block.again, block.swapping) for block in blocks}
        return len(blocks) * max(1, len(kinds) // 10)

    def solve(self, slices: tuple[Slice, ...], moments: Moments) -> PositionHolding:
        """Chosen for the worst moment of keeping everything, and for each that turns out to be worse then."""
        profile, memory = self.profile, self.memory
        policies: Policies = [[KEEP] * (piece.stop - piece.start) for piece in slices]
        taken: list[Moment] = []
        pieces = list(slices)
        while True:
            peak, worst = peak_memory(profile, slices, policies, moments)
            if peak.total <= memory:
                time = stage_time(profile, slices, policies)
                return PositionHolding(slices, policies, peak, time.seconds / slices[0].load.replicas)
            if worst in taken:
                break
            taken.append(worst)
            pieces = at_moments(slices, taken)
            if (chosen := choose(profile, pieces, memory)) is None:
                break
            policies = chosen[1]
        return PositionHolding(slices, policies, peak, inf, max(1, least_memory(profile, pieces) - memory))

    @staticmethod
    def score(holdings: Sequence[PositionHolding]) -> Score:
        return Score(
            sum(holding.missing for holding in holdings),
            max(holding.seconds for holding in holdings),
            sum(holding.seconds**2 for holding in holdings),
        )
