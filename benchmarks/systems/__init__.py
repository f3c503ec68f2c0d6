"""The systems that the benchmark compares: one module each, found by its file name.

To add a system, write `systems/<name>.py` with a constant `SYSTEM` that is a `System`. It is imported in two
worker processes of its own, with one thread each, torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR ...)
and the default process group (gloo, loopback) already initialised; what it imports may be missing, then the
system is skipped and the reason printed. All its schedules live side by side in those two processes, so a
runner keeps no global state. A complete system:

    class Plain(System):
        schedules = (Schedule("none"),)

        def build(self, rank: int, world: int, minibatches: int, schedule: str) -> Runner:
            return PlainRunner(work.build_model(), work.batches(minibatches))

    class PlainRunner(Runner):
        def step(self) -> float:
            ...  # forward, backward and update for every minibatch of a step

    SYSTEM = Plain()
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from importlib import import_module
from typing import Literal, NamedTuple

Updates = Literal["step", "minibatch"]


class Schedule(NamedTuple):
    """A schedule's name in the table, and how often it updates the weights: that chooses its limit."""

    name: str
    updates: Updates = "step"


class Runner(ABC):
    """One rank's part of a system that is built and ready to train."""

    @abstractmethod
    def step(self) -> float:
        """Train one step. Returns this rank's part of the step's mean loss: over all ranks the parts add up.

        The first step's loss is compared with the plain model's. A rank without a loss returns 0.0.
        """

    def run(self, steps: int) -> float:
        """Train `steps` steps, what is timed. To override where one step's minibatches may follow the
        last one's without a flush. Returns the last step's loss, in parts as `step` does."""
        part = 0.0
        for _ in range(steps):
            part = self.step()
        return part

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back whatever does not go with the runner itself: threads, shared memory, process groups."""


class System(ABC):
    """A trainer, with the schedules that it offers."""

    schedules: tuple[Schedule, ...]

    @abstractmethod
    def build(self, rank: int, world: int, minibatches: int, schedule: str) -> Runner:
        """This rank's runner for steps of `minibatches` minibatches, from `work`'s model, data, optimizer."""


def names() -> list[str]:
    """Every system there is a module for, the limit first: the others are measured against it."""
    found = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return ["limit", *(name for name in found if name != "limit")]


def load(name: str) -> System:
    """The system of `systems/<name>.py`. What the module imports may be missing: ModuleNotFoundError."""
    return import_module(f"{__name__}.{name}").SYSTEM
