"""The race: every system in turn, round after round, each measured against its own round's limit.

A machine's speed drifts over minutes. Within a round of a few seconds a system it drifts little, so the share
of the limit is taken round by round, and only then the median.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from pool import Pool, WorkerError
from systems import Schedule, Updates

# How far the first step's loss may lie from the plain model's. Updates between minibatches move it a little.
LOSS_TOLERANCE: dict[Updates, float] = {"step": 1e-4, "minibatch": 3e-2}

BUSY = 0.9  # below this share of the processors the limit's speed is not this machine's


class Case(NamedTuple):
    """What is measured: a system with one of its schedules. `limit` is the case that it is compared with."""

    system: str
    schedule: str
    updates: Updates
    minibatches: int

    @property
    def limit(self) -> Case:
        return Case("limit", self.updates, self.updates, self.minibatches)

    def __str__(self) -> str:
        return f"{self.system} {self.schedule}, {self.minibatches} minibatches"


Speeds = dict[Case, list[float]]  # samples/s in each round


class Row(NamedTuple):
    """A case's result: medians over the rounds, and their interquartile ranges."""

    system: str
    schedule: str
    minibatches: int
    samples_per_s: float
    of_limit: float
    samples_per_s_spread: tuple[float, float]
    of_limit_spread: tuple[float, float]
    updates: Updates
    rounds: int


class Limits(NamedTuple):
    """How much to measure, and what may not take longer than how many seconds."""

    warm_up: int  # steps before the first round, for each case
    rounds: int
    steps: int  # a round, for each case
    budget: float  # for the whole: no round begins that would end after it, except the first
    answer: float  # for one request to a system


class Race:
    """All systems' worker processes and the cases that run in them. Use it in a `with`."""

    def __init__(self, systems: Sequence[str], limits: Limits, say: Callable[[str], None]) -> None:
        self.limits = limits
        self.say = say
        self.start = time.monotonic()
        self.pools: dict[str, Pool] = {}
        self.exits: dict[str, ExitStack] = {name: ExitStack() for name in systems}

    def __enter__(self) -> Race:
        for name in self.exits:
            self._start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for stack in self.exits.values():
            stack.close()

    def run(self, counts: Sequence[int]) -> list[Row]:
        """Measure every system and schedule for each number of minibatches a step."""
        offers = {name: self._schedules(name) for name in self.pools}
        rows = []
        for index, count in enumerate(counts):
            cases = [Case(name, *one, count) for name, offer in offers.items() for one in offer]
            # Each count gets an equal part of what is left of the time.
            left = self.limits.budget - (time.monotonic() - self.start)
            rows += self._measure(cases, time.monotonic() + left / (len(counts) - index))
        return rows

    def _schedules(self, name: str) -> tuple[Schedule, ...]:
        """The schedules of a system; none, and a word why, where it does not run on this machine."""
        try:
            offer = self.pools[name].schedules()
        except WorkerError as error:
            if name == "limit":
                raise
            offer = str(error)
        if isinstance(offer, str):
            self.say(f"{name}: skipped, {offer}")
            return ()
        return offer

    def _measure(self, cases: Sequence[Case], deadline: float) -> list[Row]:
        """Rounds over cases of one number of minibatches, until there are enough or the time is over."""
        label = f"{cases[0].minibatches} minibatches a step"
        began = time.monotonic()
        speeds = self._build_all(cases)
        self.say(f"{label}: built and warmed up in {time.monotonic() - began:.0f} s")
        for number in range(1, self.limits.rounds + 1):
            # The round before tells how long this one will take.
            now = time.monotonic()
            if number > 1 and now + (now - began) > deadline:
                break
            began = now
            for case in list(speeds):
                if case in speeds:
                    self._measure_one(case, speeds)
            self.say(f"{label}: round {number} took {time.monotonic() - began:.0f} s")
        self._close_all(list(speeds))
        return [summary(case, speeds[case], speeds[case.limit]) for case in speeds]

    def _measure_one(self, case: Case, speeds: Speeds) -> None:
        try:
            timing = self.pools[case.system].run(case.schedule, case.minibatches, self.limits.steps)
        except WorkerError as error:
            self._drop(case, speeds, error)
            return
        speeds[case].append(timing.samples_per_s)
        # The limit never waits: if it is not on a processor, something else is.
        if case == case.limit and timing.on_processor < BUSY:
            self.say(f"{case}: only {timing.on_processor:.0%} of two processors: the machine is busy")

    def _build_all(self, cases: Sequence[Case]) -> Speeds:
        """Every case that can be built and does the plain model's work, with no speed measured yet."""
        speeds: Speeds = {}
        plain = math.nan  # the limit, first of all, tells
        for case in cases:
            try:
                loss = self._build(case)
                plain = loss if math.isnan(plain) else plain
                check_loss(case, loss, plain)
                speeds[case] = []
            except WorkerError as error:
                self._drop(case, speeds, error)
        return speeds

    def _build(self, case: Case) -> float:
        """Build a case and warm it up. Returns the first step's loss."""
        pool = self.pools[case.system]
        pool.build(case.schedule, case.minibatches)
        first, *_ = [pool.run(case.schedule, case.minibatches, 1) for _ in range(self.limits.warm_up)]
        return first.loss

    def _close_all(self, cases: Sequence[Case]) -> None:
        for name in {case.system for case in cases}:
            try:
                for case in cases:
                    if case.system == name:
                        self.pools[name].close(case.schedule, case.minibatches)
            except WorkerError as error:
                self.say(f"{name}: did not close, {error}")
                self._restart(name)

    def _drop(self, failed: Case, speeds: Speeds, error: WorkerError) -> None:
        """Go on without a case: its processes are of no use any more, its system's others need new ones."""
        if failed.system == "limit":
            raise error
        self.say(f"{failed}: dropped, {error}")
        speeds.pop(failed, None)
        self._restart(failed.system)
        for case in [one for one in speeds if one.system == failed.system]:
            try:
                self._build(case)
            except WorkerError as another:
                self._drop(case, speeds, another)
                return

    def _start(self, name: str) -> None:
        self.pools[name] = self.exits[name].enter_context(Pool(name, self.limits.answer))

    def _restart(self, name: str) -> None:
        self.exits[name].close()
        self._start(name)
        self.pools[name].schedules()


def check_loss(case: Case, loss: float, plain: float) -> None:
    """Refuse a case that does not do the same work as the plain model."""
    if not math.isclose(loss, plain, rel_tol=LOSS_TOLERANCE[case.updates]):
        raise WorkerError(f"its first step's loss is {loss:.5f}, the plain model's {plain:.5f}")


def summary(case: Case, speeds: Sequence[float], limits: Sequence[float]) -> Row:
    """A case's row from its speed in each round and the limit's in the same rounds."""
    shares = [speed / limit for speed, limit in zip(speeds, limits, strict=True)]
    return Row(
        case.system,
        case.schedule,
        case.minibatches,
        statistics.median(speeds),
        statistics.median(shares),
        quartiles(speeds),
        quartiles(shares),
        case.updates,
        len(speeds),
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile; of a single value that value twice."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third
