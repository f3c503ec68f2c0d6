"""Lower bounds of simulated times, by sums along the critical paths of a pipeline, for many partitions at once.

    pre    forwards and messages before a stage      trip   from a minibatch's forward on a stage to the end of its
    post   the same of the way back                         backward there: all stages behind it, and messages

A rank of a synchronous update with K minibatches of its own, n of them in flight at most, takes no less than

    K (F + B)                          its own work
    trip + (K - 1) B + (K - n) F       before its first backward only n forwards can run
    (q + 1) trip + r F                 K - 1 = q n + r: forward k + n waits for backward k

and the first rank no less than that with pre and post, or with the messages of a link one after the other. Weight
gradients of a split backward need not be done before the last input gradient has left. In an asynchronous run the
busiest rank sets the pace; that trip / n does as well is true of endless runs only (`Bounds.expected`).
"""

from __future__ import annotations

from itertools import combinations
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vpipe.cost import Profile
from vpipe.cost.costs import MOST_BUCKETS
from vpipe.plan.placed_links import PlacedLinks
from vpipe.plan.sums import Floats
from vpipe.schedule.kind import too_shallow
from vpipe.schedule.staircase import depths

Cuts = npt.NDArray[np.int64]
"""Where each stage begins and the last one ends, a row for each partition."""
Counts = npt.NDArray[np.int64]
DEEPEST = 64
"""Forwards ahead that are tried at most."""
FURTHER = 2
FEW_DEPTHS = 4096
"""Depths of a partition that are all looked at."""
FILLED = (0.25, 0.5, 0.75, 1.0)
IN_FLIGHT = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
BISECTIONS = 40
MORE = 1 + 1e-9


class PipelineFacts(NamedTuple):
    """What the bounds have to know of a schedule with its stages in line."""

    synchronous: bool
    split: bool
    minibatches: int
    """Of an update."""
    replicas: tuple[int, ...]
    in_flight: tuple[int, ...] | Counts | None
    """Of a rank of each stage, or a row of them for each partition; None: as many as it likes."""
    links: PlacedLinks

    def own(self, stage: int) -> int:
        """Minibatches of a rank in a synchronous update."""
        return -(-self.minibatches // self.replicas[stage])


class Bounds(NamedTuple):
    """Seconds a minibatch, for each partition."""

    least: Floats
    expected: Floats
    """Never below it; of an endless run it is a bound too."""


class StageTimes(NamedTuple):
    """By partition and stage."""

    forward: Floats
    backward: Floats
    """What other stages wait for."""
    weights: Floats
    """The weight gradient of a split backward."""
    update: Floats
    near: Floats
    """A rank's own part in adding up gradients."""
    far: Floats
    """Then its part that goes to other hosts."""
    card: Floats
    """The same of all ranks of a host together."""
    hop: Floats
    """A message across the cut behind the stage."""
    trip: Floats
    carried: Floats
    """By partition and card: messages of a minibatch."""
    reduced: Floats
    """The same of the reductions of an update."""
    sizes: Floats
    """Bytes of a message across the cut behind the stage."""


class Paths:
    """The times of a profile, as sums up to each block."""

    def __init__(self, profile: Profile) -> None:
        blocks = profile.blocks
        self.profile = profile
        self.forward, self.backward, self.input_gradient, self.update = (
            np.concatenate([[0.0], np.cumsum(values)])
            for values in (
                [block.forward for block in blocks],
                [block.backward for block in blocks],
                [block.input_gradient for block in blocks],
                [block.update for block in blocks],
            )
        )
        self.sizes = np.array([0, *(block.boundary_bytes for block in blocks)], dtype=float)
        """Of a message, by the block behind the cut."""
        parameters = np.cumsum([0, *(block.parameter_bytes for block in blocks)], dtype=float)
        self.parameters = parameters
        self.shared = float(sum(tie.bytes * (len(tie.blocks) - 1) for tie in profile.tied))
        device = profile.device
        self.alone = 1 / device.crowding if device.shared_by > 1 else 1.0
        """The share of a measured time that is left where no other rank computes at the same time."""

    def times(self, facts: PipelineFacts, cuts: Cuts, longer: Floats | None = None) -> StageTimes:
        """`longer`: what policies add to each stage."""
        overhead, starts, stops = self.profile.device.overhead, cuts[:, :-1], cuts[:, 1:]
        forward = self.forward[stops] - self.forward[starts] + overhead
        backward = self.backward[stops] - self.backward[starts] + overhead
        weights = np.zeros_like(backward)
        if facts.split:
            own = self.input_gradient[stops] - self.input_gradient[starts] + overhead
            backward, weights = own, backward - own + overhead
        if longer is not None:
            backward = backward + longer
        sizes, links = self.sizes[stops[:, :-1]], facts.links
        hop = sizes * np.array([cut.byte for cut in links.cuts]) + np.array(
            [cut.latency for cut in links.cuts]
        )
        busy = hop * np.array([cut.busy for cut in links.cuts], dtype=float)
        forward[:, :-1] += busy
        backward[:, 1:] += busy
        hop = hop - busy
        trip = forward + backward
        for stage in range(trip.shape[1] - 2, -1, -1):
            trip[:, stage] += trip[:, stage + 1] + 2 * hop[:, stage]
        parameters = np.maximum(0.0, self.parameters[stops] - self.parameters[starts] - self.shared)
        near, byte, latency, far, card = np.array([(*one.near, *one[1:]) for one in links.reductions]).T
        # Some of it may be sent while the last backward runs, all but one bucket.
        beside = (1 - 1 / MOST_BUCKETS) * (weights if facts.split else backward)
        return StageTimes(
            forward=forward,
            backward=backward,
            weights=weights,
            update=self.update[stops] - self.update[starts],
            near=near + byte * parameters,
            far=latency + far * parameters - np.minimum(beside, (1 - 1 / MOST_BUCKETS) * far * parameters),
            card=card * parameters - np.minimum(beside, (1 - 1 / MOST_BUCKETS) * card * parameters),
            hop=hop,
            trip=trip,
            carried=sizes @ links.cards.T,
            reduced=parameters @ links.reduced.T,
            sizes=sizes,
        )

    def bounds(self, facts: PipelineFacts, cuts: Cuts, longer: Floats | None = None) -> Bounds:
        times = self.times(facts, cuts, longer)
        found = self._synchronous(facts, times) if facts.synchronous else self._steady(facts, times)
        return Bounds(self.alone * found.least, self.alone * found.expected)

    @staticmethod
    def _steady(facts: PipelineFacts, times: StageTimes) -> Bounds:
        counts, interval = np.array(facts.replicas, dtype=float), facts.minibatches
        work = (times.forward + times.backward + times.weights) / counts + times.update / interval
        least = work.max(axis=1)
        # The replicas of a stage wait for the end of a reduction.
        expected = (work + (times.near + times.far) / interval).max(axis=1)
        if facts.in_flight is not None:
            around = times.trip / counts / np.asarray(facts.in_flight)
            expected = np.maximum(expected, around.max(axis=1))
        for stage, cut in enumerate(facts.links.cuts):
            for share, held, byte in cut.held:
                expected = np.maximum(expected, share * (held + byte * times.sizes[:, stage]))
        if times.carried.shape[1]:
            expected = np.maximum(expected, (times.carried + times.reduced / interval).max(axis=1))
        return Bounds(least, expected)

    @staticmethod
    def _synchronous(facts: PipelineFacts, times: StageTimes) -> Bounds:
        least = before = np.zeros(len(times.trip))
        for stage, replicas in enumerate(facts.replicas):
            own = facts.own(stage)
            flying = (
                own if facts.in_flight is None else np.minimum(own, np.asarray(facts.in_flight)[..., stage])
            )
            f, b, w, trip = (each[:, stage] for each in (*times[:3], times.trip))
            rounds, rest = divmod(own - 1, flying)
            waits = np.maximum((rounds + 1) * trip + rest * f, trip + (own - 1) * b + (own - flying) * f)
            inputs = np.maximum(own * (f + b), waits)
            ended = np.maximum(own * (f + b + w), trip - b + own * (b + w) + (own - flying) * f)
            ended = np.maximum(inputs, ended) + times.far[:, stage]
            # The reductions of all ranks of a host go over one card, from when the first of them begins.
            fewest = facts.minibatches // replicas * (f + b + w)
            ended = np.maximum(ended, fewest + times.card[:, stage]) + times.near[:, stage]
            least = np.maximum(least, ended + times.update[:, stage])
            if stage:
                least = np.maximum(least, before + inputs + times.weights[:, 0] + times.update[:, 0])
            if stage < len(facts.links.cuts):
                for share, held, byte in facts.links.cuts[stage].held:
                    more = max(0.0, share * facts.minibatches - 1) * (held + byte * times.sizes[:, stage])
                    least = np.maximum(least, before + trip + more)
                before = before + f + b + 2 * times.hop[:, stage]
        if times.carried.shape[1]:  # all messages are there before the first stage's last backward
            least = np.maximum(least, facts.minibatches * times.carried.max(axis=1))
        least = least / facts.minibatches
        return Bounds(least, least)

    def depths(self, facts: PipelineFacts, cuts: Cuts, most: int | None, every: bool) -> tuple[Counts, bool]:
        """The depths that may suit a partition, a row of cuts, each a row; and whether these are all.

        As many in flight as a trip takes, for any pace of the first stage; and shares of those that fill the time until
        the first backward. `every`: all up to a few more than either, which gain nothing, if these are not too many.
        `most`: minibatches that a stage may run ahead.
        """
        times = self.times(facts, cuts[None, :])
        counts, trip = np.array(facts.replicas), times.trip[0]
        work = ((times.forward + times.backward + times.weights)[0] / counts).max()
        with np.errstate(divide="ignore", invalid="ignore"):
            fills = np.nan_to_num((trip - times.backward[0]) / times.forward[0], nan=0.0, posinf=DEEPEST)
            trips = np.nan_to_num(trip / counts / work, nan=0.0, posinf=DEEPEST)
        deepest = np.full(len(counts), DEEPEST)
        if most is not None:
            deepest = np.minimum(deepest, most // counts)
        if facts.synchronous:
            deepest = np.minimum(deepest, [facts.own(stage) - 1 for stage in range(len(counts))])
        useful = np.minimum(deepest, np.ceil(np.maximum(trips, fills) - 1e-9).astype(np.int64) + FURTHER)
        useful = np.maximum(useful, np.minimum(deepest, depths(facts.replicas)))
        if every and np.prod(useful + 1.0) <= FEW_DEPTHS:
            rows = np.indices(tuple(useful + 1)).reshape(len(counts), -1).T
            return rows[_deep_enough(facts, rows)], True
        found: dict[tuple[int, ...], None] = {}

        def add(ahead: Floats) -> None:
            depth = [max(0, ceil(number - 1e-9)) for number in np.minimum(ahead, deepest)]
            while (bad := too_shallow(facts.replicas, depth, joint=not facts.synchronous)) is not None:
                stage, _, least = bad
                depth[stage] = least
            if all(number <= own for number, own in zip(depth, deepest, strict=True)):
                found[tuple(depth)] = None

        longest = min(DEEPEST, ceil(trips[0]))
        for flying in sorted({*(number for number in IN_FLIGHT if number <= longest), longest} - {0}):
            pace = max(work, trip[0] / counts[0] / flying)
            add(trip / counts / pace - 1)
            add(trip / counts / pace)
        for share in FILLED:
            add(share * fills - 1)
        return np.array(list(found), dtype=np.int64).reshape(len(found), len(counts)), False

    def of_any_partition(self, facts: PipelineFacts, ranks: int) -> float:
        """A bound for all partitions over so many ranks, with any replicas; by work alone."""
        work = self.forward + self.backward
        path = self.forward + (self.input_gradient if facts.split else self.backward)
        counts, total = np.arange(1, ranks + 1), facts.minibatches if facts.synchronous else 1
        low, high = 0.0, total * float(work[-1]) + float(path[-1])
        for _ in range(BISECTIONS):
            limit = (low + high) / 2
            reached = np.zeros(ranks + 1, dtype=int)  # the most blocks that so many ranks can hold
            for rank in range(1, ranks + 1):
                starts, replicas = reached[rank - 1 :: -1], counts[:rank]
                ends = np.searchsorted(work, (work[starts] + limit * replicas / total) * MORE, "right") - 1
                if facts.synchronous:
                    left = np.maximum(0.0, limit - path[starts]) * replicas / total
                    ends = np.minimum(ends, np.searchsorted(path, (path[starts] + left) * MORE, "right") - 1)
                reached[rank] = max(int(ends.max()), reached[rank - 1])
            if reached[-1] >= len(work) - 1:
                high = limit
            else:
                low = limit
        return self.alone * low / total


def _deep_enough(facts: PipelineFacts, depth: Counts) -> npt.NDArray[np.bool_]:
    """Of which rows no stage waits for ever: `too_shallow`, for many at once."""
    counts = np.array(facts.replicas)
    needs = depth * counts
    lets_in = needs + (counts - 1 if facts.synchronous else 0)
    later = np.maximum.accumulate(needs[:, ::-1], axis=1)[:, ::-1]
    return np.asarray((lets_in[:, :-1] >= later[:, 1:]).all(axis=1))


def all_cuts(blocks: int, stages: int) -> Cuts:
    """Every partition into so many stages."""
    return np.array([(0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1)])


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """Every way to write `total` as so many numbers of at least one, in order."""
    return [tuple(np.diff(row).tolist()) for row in all_cuts(total, parts)]
