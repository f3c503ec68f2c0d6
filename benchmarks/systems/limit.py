"""The limit: the ranks share a step's work with no communication and no waiting.

Each rank runs the whole model over its share of the minibatches. All ranks together do what one step asks
for, updates included: with one update a step each rank updates its share of the parameters once; with one
update a minibatch each rank updates all of them after each of its own minibatches.
"""

from __future__ import annotations

from collections.abc import Iterable

import work
from torch import nn

from systems import Runner, Schedule, System


class Limit(System):
    schedules = (Schedule("step", "step"), Schedule("minibatch", "minibatch"))

    def build(self, rank: int, world: int, minibatches: int, schedule: str) -> Runner:
        return LimitRunner(rank, world, minibatches, schedule)


class LimitRunner(Runner):
    def __init__(self, rank: int, world: int, minibatches: int, updates: str) -> None:
        self.rank, self.world = rank, world
        self.batches = work.batches(minibatches)
        self.model = work.build_model()
        self.each_minibatch = updates == "minibatch"
        mine = self.model.parameters() if self.each_minibatch else share(self.model.parameters(), rank, world)
        self.optimizer = work.build_optimizer(mine)
        self.steps = 0

    def step(self) -> float:
        # The first rank of the round moves on with each step: where the ranks do not divide the minibatches,
        # the longer shares go around, and `world` steps are an equal amount of work for everybody.
        first = (self.rank + self.steps) % self.world
        part = 0.0
        for ids, labels in self.batches[first :: self.world]:
            loss = self.model(ids, labels) / len(self.batches)
            loss.backward()
            part += loss.item()
            if self.each_minibatch:
                self._update()
        if not self.each_minibatch:
            self._update()
        self.steps += 1
        return part

    def _update(self) -> None:
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)


def share(parameters: Iterable[nn.Parameter], rank: int, world: int) -> list[nn.Parameter]:
    """One rank's share of the parameters: the largest first, each to what is then the smallest share."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(world)]
    for parameter in sorted(parameters, key=nn.Parameter.numel, reverse=True):
        min(shares, key=lambda held: sum(one.numel() for one in held)).append(parameter)
    return shares[rank]


SYSTEM = Limit()
