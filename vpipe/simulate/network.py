"""The links between ranks: each directed pair of ranks carries one message at a time, beside compute.

    rank 0   F0 F1 ...              a send starts when the action that made it ends ...
    0 to 1     ==F0== ==F1==        ... and the link is free: F1 waits for F0
    rank 1           F0 ...         the reader waits for the arrival

A link whose sender is busy has no line of its own: the sending rank copies, and its action is that much longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import lcm

from vpipe.cost import Profile, all_reduce_seconds
from vpipe.schedule import Action, Op, Rules, Schedule
from vpipe.simulate.stage_cost import StageCost

Line = tuple[int, int]
"""Sending and receiving rank."""
Route = tuple[Line, float, bool]
"""The line, how long it carries the message, whether that is the sender's work."""


class Network:
    def __init__(self, schedule: Schedule, profile: Profile, costs: Sequence[StageCost]) -> None:
        self.schedule = schedule
        self.free: dict[Line, float] = defaultdict(float)
        """When each line has carried its last message."""
        self.copying = [0.0] * schedule.num_ranks
        """How long each rank has copied messages itself."""
        # For each stage and the other end: the routes of minibatches that replicas take in turn.
        self.routes: list[dict[int, list[Route]]] = [{} for _ in costs]
        self.rules = Rules(schedule)
        for producer, reader in sorted(self.rules.edges):
            size = costs[producer].sent
            self.routes[producer][reader] = list(self._routes(profile, producer, reader, size))
            self.routes[reader][producer] = list(self._routes(profile, reader, producer, size))
        self.busy = any(busy for ends in self.routes for phases in ends.values() for _, _, busy in phases)
        """Whether any rank copies."""

    def transit(self, action: Action, reader: int, end: float) -> float:
        """When what ended at `end` has arrived."""
        stage, _, minibatch = action
        phases = self.routes[stage][reader]
        line, seconds, busy = phases[minibatch % len(phases)]
        if busy:
            return end
        start = self.free[line]
        self.free[line] = arrived = (start if start > end else end) + seconds
        return arrived

    def sending(self, action: Action) -> float:
        """How long the rank of an action copies what it made; to be asked once for each action."""
        stage, op, minibatch = action
        if op not in (Op.F, Op.B, Op.I):
            return 0.0
        total = 0.0
        for reader, phases in self.routes[stage].items():
            line, seconds, busy = phases[minibatch % len(phases)]
            if busy and (reader > stage) == (op is Op.F):
                total += seconds
                self.copying[line[0]] += seconds
        return total

    def _routes(self, profile: Profile, stage: int, reader: int, size: int) -> Iterator[Route]:
        rank_of, placement = self.schedule.rank_of, self.schedule.placement
        for minibatch in range(lcm(len(placement[stage]), len(placement[reader]))):
            sender, receiver = line = rank_of(stage, minibatch), rank_of(reader, minibatch)
            link = profile.link_between(sender, receiver)
            near = sender == receiver
            yield line, 0.0 if near else link.seconds(size), link.sender_busy and not near


def reduce_seconds(profile: Profile, ranks: Sequence[int], size: int) -> float:
    """How long the slowest of a stage's replicas takes to add up its gradients with the others."""

    def outgoing(sender: int) -> float:
        links = [profile.link_between(sender, other) for other in ranks if other != sender]
        return all_reduce_seconds(links, size)

    return max(map(outgoing, ranks))
