"""vpipe, with every schedule. Training goes on from run to run: what is timed is the steady state."""

from __future__ import annotations

from itertools import cycle, islice

import work

import vpipe
from systems import Runner, Schedule, System


class VPipe(System):
    schedules = (
        Schedule("gpipe"),
        Schedule("1f1b"),
        Schedule("interleaved"),
        Schedule("zb-h1"),
        Schedule("zb-v"),
        Schedule("2bw"),
        Schedule("pipedream", "minibatch"),
    )

    def build(self, rank: int, world: int, minibatches: int, schedule: str) -> Runner:
        return VPipeRunner(minibatches, schedule)


class VPipeRunner(Runner):
    def __init__(self, minibatches: int, schedule: str) -> None:
        batches = work.batches(minibatches)
        self.updates = minibatches if schedule == "pipedream" else 1  # of a step
        interval = {"pipedream": {}, "2bw": {"update_interval": minibatches}}
        self.pipe = vpipe.Pipeline(
            work.build_model(),
            batches[0],
            schedule=schedule,
            optimizer=work.build_optimizer,
            **interval.get(schedule, {"minibatches": minibatches}),
        )
        self.training = self.pipe.train(cycle(batches))

    def step(self) -> float:
        losses = [loss for _, loss in islice(self.training, self.updates)]
        return sum(losses) / len(losses) if self.pipe.rank == 0 else 0.0

    def close(self) -> None:
        self.training.close()
        self.pipe.close()


SYSTEM = VPipe()
