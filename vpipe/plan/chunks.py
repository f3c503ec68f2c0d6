"""The search for stages where a rank holds several: even ranks first, then the worst rank gives blocks away.

The ranks' times no longer fall apart into stages one after the other, so there is no exact search. Cuts start where
all chunks work equally long. Then the worst rank (the one that lacks most memory, or else takes longest) hands its
first or last block to a stage nearby, all cuts between moving by one, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from vpipe.cost import Profile
from vpipe.plan.groups import Policies
from vpipe.plan.model import Load, Slice, link_seconds
from vpipe.plan.policies import choose, least_memory

NEARBY = 8
Placement = tuple[tuple[int, ...], ...]


class Seat(NamedTuple):
    """What the ranks of one position hold, at the least time that fits, and the bytes that are missing."""

    slices: tuple[Slice, ...]
    policies: Policies | None
    seconds: float
    missing: int


class Score(NamedTuple):
    """How bad it is; the squares tell progress where two ranks are equally slow."""

    missing: int
    seconds: float
    squares: float


def search_chunks(
    profile: Profile, placement: Placement, loads: Sequence[Load], memory: int
) -> list[Seat] | None:
    """The seats by position, with bytes missing where nothing fits; None if there are too few blocks."""
    if len(placement) > len(profile.blocks):
        return None
    return _Climb(profile, placement, loads, memory).seats()


class _Climb:
    def __init__(self, profile: Profile, placement: Placement, loads: Sequence[Load], memory: int) -> None:
        self.profile = profile
        self.placement = placement
        self.loads = loads
        self.memory = memory
        self.positions = sorted(set(placement))
        self.stages = [
            [stage for stage, ranks in enumerate(placement) if ranks == own] for own in self.positions
        ]
        self.known: dict[tuple[Slice, ...], Seat] = {}

    def seats(self) -> list[Seat]:
        cuts = self.even()
        seats = self.at(cuts)
        score = self.score(seats)
        improved = True
        while improved:
            improved = False
            for moved in self.moves(cuts, seats):
                found = self.at(moved)
                if (reached := self.score(found)) < score:
                    cuts, seats, score, improved = moved, found, reached, True
                    break
        return seats

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

    def moves(self, cuts: list[int], seats: Sequence[Seat]) -> Iterator[list[int]]:
        worst = max(range(len(seats)), key=lambda index: (seats[index].missing, seats[index].seconds))
        for stage in self.stages[worst]:
            if cuts[stage + 1] - cuts[stage] == 1:
                continue
            for other in range(max(0, stage - NEARBY), min(len(self.placement), stage + NEARBY + 1)):
                moved = list(cuts)
                for cut in range(stage + 1, other + 1):
                    moved[cut] -= 1
                for cut in range(other + 1, stage + 1):
                    moved[cut] += 1
                if moved != cuts:
                    yield moved

    def at(self, cuts: Sequence[int]) -> list[Seat]:
        return [self.seat(tuple(self.slice(stage, cuts) for stage in held)) for held in self.stages]

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

    def seat(self, slices: tuple[Slice, ...]) -> Seat:
        if slices not in self.known:
            chosen = choose(self.profile, slices, self.memory)
            if chosen is None:
                missing = least_memory(self.profile, slices) - self.memory
                self.known[slices] = Seat(slices, None, inf, missing)
            else:
                link = sum(link_seconds(self.profile, piece) for piece in slices)
                seconds = max(chosen[0], link) / slices[0].load.replicas
                self.known[slices] = Seat(slices, chosen[1], seconds, 0)
        return self.known[slices]

    @staticmethod
    def score(seats: Sequence[Seat]) -> Score:
        return Score(
            sum(seat.missing for seat in seats),
            max(seat.seconds for seat in seats),
            sum(seat.seconds**2 for seat in seats),
        )
