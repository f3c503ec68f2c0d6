"""The links between ranks: each directed pair of ranks carries one message at a time, beside compute.

    rank 0   F0 F1 ...              a send starts when the action that made it ends ...
    0 to 1     ==F0== ==F1==        ... and the link is free: F1 waits for F0
    rank 1           F0 ...         the reader waits for the arrival

A link whose sender is busy has no line of its own: the sending rank copies, and its action is that much longer.

Between hosts a message passes two lines, which all ranks of a host share: out of the card of its host, into that of the
other. Each carries one message after the other, in the order in which they come to it; the second line begins when the
first does. Latency holds up the message, not the card.

What the replicas of a stage reduce between hosts goes over the same lines, out of each card as much as into it, bucket
by bucket, and each bucket there and back. It begins with the last backward of the last replica. A message waits for the
part of a bucket that is under way, and for what has come before it, not for the whole reduction:

    rank 2      ---------B---------          the first of two buckets is ready when half of the last backward is done
    out         m         1 there m 1 back 2 there 2 back          m: messages of other ranks of its host
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import lcm
from typing import NamedTuple

from vpipe.cost import Profile, all_reduce_seconds, bucket_count
from vpipe.schedule import Action, Op, Rules, Schedule
from vpipe.simulate.stage_cost import StageCost

Line = tuple[int, int]
"""Sending and receiving rank; or a host's card: OUT or IN, and the host."""
OUT, IN = -1, -2


class MessageRoute(NamedTuple):
    lines: tuple[Line, ...]
    seconds: float
    """How long each line carries the message."""
    latency: float
    """From the end of the last line to the arrival."""
    busy: bool
    """Whether carrying it is the sender's work."""
    size: float = 0.0
    """Bytes, if it goes to other hosts."""


class Network:
    def __init__(self, schedule: Schedule, profile: Profile, costs: Sequence[StageCost]) -> None:
        self.schedule = schedule
        self.profile = profile
        self.free: dict[Line, float] = defaultdict(float)
        """When each line has carried its last message."""
        self.copying = [0.0] * schedule.num_ranks
        """How long each rank has copied messages itself."""
        # For each stage and the other end: the routes of minibatches that replicas take in turn.
        self.routes: list[dict[int, list[MessageRoute]]] = [{} for _ in costs]
        self.reductions: dict[tuple[int, int], Reduction] = {}
        """By stage and rank, of stages with replicas."""
        self.backwards: dict[tuple[int, int], tuple[float, float]] = {}
        """The same: from when to when the gradients of those under way are made, and added up inside their hosts."""
        self.rules = Rules(schedule)
        for producer, reader in sorted(self.rules.edges):
            size = costs[producer].sent
            self.routes[producer][reader] = list(self._routes(producer, reader, size))
            self.routes[reader][producer] = list(self._routes(reader, producer, size))
        for stage, ranks in enumerate(schedule.placement):
            for rank in ranks if len(ranks) > 1 else ():
                self.reductions[stage, rank] = reduction(profile, ranks, rank, costs[stage].parameters)
        self.near = [
            max((self.reductions[stage, rank].seconds for rank in ranks if len(ranks) > 1), default=0.0)
            for stage, ranks in enumerate(schedule.placement)
        ]
        """How long the slowest of each stage's ranks works on its reduction."""
        routes = [route for ends in self.routes for phases in ends.values() for route in phases]
        self.busy = any(route.busy for route in routes)
        """Whether any rank copies."""
        self.shared = any(len(route.lines) > 1 for route in routes) or any(
            found.route.lines for found in self.reductions.values()
        )
        """Whether any message goes to another host."""

    def transit(self, action: Action, reader: int, end: float) -> float | None:
        """When what ended at `end` has arrived; None: it goes to another host."""
        stage, _, minibatch = action
        phases = self.routes[stage][reader]
        lines, seconds, _, busy, _ = phases[minibatch % len(phases)]
        if busy:
            return end
        if len(lines) > 1:
            return None
        line = lines[0]
        start = self.free[line]
        self.free[line] = arrived = (start if start > end else end) + seconds
        return arrived

    def carry(self, rank: int, action: Action, reader: int, before: int, time: float) -> tuple[float, bool]:
        """When a message to another host that comes to its next line at `time` comes to the one behind it, or has
        arrived."""
        stage, op, minibatch = action
        if op is Op.REDUCE:
            return self._carry_part(stage, rank, before, time)
        phases = self.routes[stage][reader]
        route = phases[minibatch % len(phases)]
        start, end = self._pass(route.lines[before], time, route.seconds)
        return (start, False) if before + 1 < len(route.lines) else (end + route.latency, True)

    def begin(self, rank: int, action: Action, start: float, end: float) -> float:
        """When the first bucket of a reduction comes to its line; the last backward goes from `start` to `end`."""
        near = self.near[action.stage]
        self.backwards[action.stage, rank] = start + near, end + near
        return self._ready(action.stage, rank, 0)

    def _ready(self, stage: int, rank: int, bucket: int) -> float:
        """When the ranks of its host have added up a bucket."""
        start, end = self.backwards[stage, rank]
        return end - (end - start) * (1 - (bucket + 1) / self.reductions[stage, rank].buckets)

    def _carry_part(self, stage: int, rank: int, before: int, time: float) -> tuple[float, bool]:
        """The way of a bucket there, or back; then comes the next."""
        _, route, buckets = self.reductions[stage, rank]
        if not route.lines:
            return time, True
        part, passed = divmod(before, len(route.lines))
        start, end = self._pass(route.lines[passed], time, route.seconds / (2 * buckets))
        if passed + 1 < len(route.lines):
            return start, False
        if part + 1 < 2 * buckets:
            return max(end, self._ready(stage, rank, (part + 1) // 2)), False
        return end + route.latency, True

    def _pass(self, line: Line, time: float, seconds: float) -> tuple[float, float]:
        """When a line begins and ends to carry what comes to it at `time`."""
        start = max(self.free[line], time)
        self.free[line] = end = start + seconds
        return start, end

    def sending(self, action: Action) -> float:
        """How long the rank of an action copies what it made; to be asked once for each action."""
        stage, op, minibatch = action
        if op not in (Op.F, Op.B, Op.I):
            return 0.0
        total = 0.0
        for reader, phases in self.routes[stage].items():
            route = phases[minibatch % len(phases)]
            if route.busy and (reader > stage) == (op is Op.F):
                total += route.seconds
                self.copying[route.lines[0][0]] += route.seconds
        return total

    def _routes(self, stage: int, reader: int, size: int) -> Iterator[MessageRoute]:
        rank_of, placement = self.schedule.rank_of, self.schedule.placement
        host_of = self.profile.host_of
        for minibatch in range(lcm(len(placement[stage]), len(placement[reader]))):
            sender, receiver = rank_of(stage, minibatch), rank_of(reader, minibatch)
            link = self.profile.link_between(sender, receiver)
            if sender == receiver:
                yield MessageRoute(((sender, receiver),), 0.0, 0.0, False)
            elif host_of(sender) == host_of(receiver):
                yield MessageRoute(((sender, receiver),), link.seconds(size), 0.0, link.sender_busy)
            else:
                lines = (OUT, host_of(sender)), (IN, host_of(receiver))
                yield MessageRoute(lines, size / link.bandwidth, link.latency, False, size)


class Reduction(NamedTuple):
    """A rank's part in adding up the gradients of its stage with the other replicas."""

    seconds: float
    """Its own time, with those of its host."""
    route: MessageRoute
    """What it sends to other hosts, and gets from there; without lines: nothing."""
    buckets: int = 1
    """Of that, equally large."""


def reduction(profile: Profile, ranks: Sequence[int], rank: int, size: float) -> Reduction:
    """A host's ranks add up the gradients first, then each of them its share with the other hosts."""
    host_of = profile.host_of
    near = [other for other in ranks if other != rank and host_of(other) == host_of(rank)]
    own = all_reduce_seconds([profile.link_between(rank, other) for other in near], size)
    one_of_each = {host_of(other): other for other in ranks if host_of(other) != host_of(rank)}
    if not one_of_each:
        return Reduction(own, MessageRoute((), 0.0, 0.0, False))
    far = [profile.link_between(rank, other) for other in one_of_each.values()]
    lines = (OUT, host_of(rank)), (IN, host_of(rank))
    part = size / (len(near) + 1) / (len(far) + 1)
    seconds = 2 * sum(part / link.reduce_bandwidth for link in far)
    latency = 2 * max(link.latency for link in far)
    route = MessageRoute(lines, seconds, latency, False, 2 * part * len(far))
    return Reduction(own, route, bucket_count(size))
