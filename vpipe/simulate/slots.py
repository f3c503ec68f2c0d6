"""Actions as numbers: one for the stage, the operation and the phase of the minibatch.

Minibatches of one phase take the same turn among the replicas of a stage and of its neighbours, so they need and
make the same ties and go over the same lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import numpy as np
import numpy.typing as npt

from vpipe.schedule import Op, Schedule
from vpipe.simulate.network import Network

Short = npt.NDArray[np.int32]
OPS = (Op.F, Op.B, Op.I, Op.W, Op.STEP, Op.REDUCE)
PLACE = {op: place for place, op in enumerate(OPS)}


class Slots:
    def __init__(self, schedule: Schedule, network: Network) -> None:
        self.phases = np.array(
            [
                lcm(network.rules.period, len(ranks), *map(len, network.routes[stage].values()))
                for stage, ranks in enumerate(schedule.placement)
            ]
        )
        sizes = self.phases * len(OPS)
        self.first = np.cumsum(sizes) - sizes
        self.end = int(sizes.sum())
        """The slot behind all others: a program's end, which is never reached."""

    def __iter__(self) -> Iterator[tuple[int, int, int, Op]]:
        """Slot, stage, phase and operation."""
        slot = 0
        for stage, phases in enumerate(self.phases.tolist()):
            for phase in range(phases):
                for op in OPS:
                    yield slot, stage, phase, op
                    slot += 1

    def program(self, schedule: Schedule, rank: int) -> tuple[Short, Short]:
        """Slots and minibatches of a rank's program, with its end."""
        actions = list(schedule.program(rank))
        stages, ops, numbers = zip(*actions, strict=True) if actions else ((), (), ())
        stage, minibatch = np.array(stages, dtype=np.int64), np.array(numbers, dtype=np.int64)
        op = np.fromiter(map(PLACE.__getitem__, ops), np.int64, len(ops))
        slot = self.first[stage] + minibatch % self.phases[stage] * len(OPS) + op
        return np.append(slot, self.end).astype(np.int32), np.append(minibatch, 0).astype(np.int32)
