"""The links between ranks: each directed pair of ranks carries one message at a time, beside compute.

    rank 0   F0 F1 ...              a send starts when the action that made it ends ...
    0 to 1     ==F0== ==F1==        ... and the link is free: F1 waits for F0
    rank 1           F0 ...         the reader waits for the arrival

A link whose sender is busy has no line of its own: the sending rank copies, and its action is that much longer.

Between hosts a message passes two lines, which all ranks of a host share: out of the card of its host, into that of the
other. Each carries one message after the other, in the order in which they come to it; the second line begins when the
first does. Latency holds up the message, not the card. What the replicas of a stage reduce between hosts goes over the
same lines: out of each card as much as into it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import lcm
from typing import NamedTuple

from vpipe.cost import Profile, all_reduce_seconds, bucket_count
from vpipe.schedule import Action, Op, Rules, Schedule
from vpipe.schedule.facts import splits_backward
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
        self.rules = Rules(schedule)
        for producer, reader in sorted(self.rules.edges):
            size = costs[producer].sent
            self.routes[producer][reader] = list(self._routes(producer, reader, size))
            self.routes[reader][producer] = list(self._routes(reader, producer, size))
        for stage, ranks in enumerate(schedule.placement):
            for rank in ranks if len(ranks) > 1 else ():
                backward = costs[stage].seconds[Op.W if splits_backward(schedule) else Op.B]
                self.reductions[stage, rank] = reduction(
                    profile, ranks, rank, costs[stage].parameters, backward
                )
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
            _, route, early = self.reductions[stage, rank]
            time -= early if before == 0 else 0.0
        else:
            phases = self.routes[stage][reader]
            route = phases[minibatch % len(phases)]
        if not route.lines:
            return time, True
        line = route.lines[before]
        start = max(self.free[line], time)
        self.free[line] = end = start + route.seconds
        return (start, False) if before + 1 < len(route.lines) else (end + route.latency, True)

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

    def reduce_seconds(self, stage: int) -> float:
        """How long the slowest of a stage's ranks works on its reduction."""
        ranks = self.schedule.placement[stage] if len(self.schedule.placement[stage]) > 1 else ()
        return max((self.reductions[stage, rank].seconds for rank in ranks), default=0.0)

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
    early: float = 0.0
    """How long before the end of the last backward the cards could begin with it, to be as far as they are then."""


def reduction(
    profile: Profile, ranks: Sequence[int], rank: int, size: float, backward: float = 0.0
) -> Reduction:
    """A host's ranks add up the gradients first, then each of them its share with the other hosts.

    Between hosts each of some buckets begins when the last backward, of so many seconds, has made its gradients.
    """
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
    early = min(backward, seconds) * (1 - 1 / bucket_count(size))
    latency = 2 * max(link.latency for link in far)
    return Reduction(own, MessageRoute(lines, seconds, latency, False, 2 * part * len(far)), early)
