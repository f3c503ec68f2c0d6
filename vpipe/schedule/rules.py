"""The rules of order: what must precede what.

A whole backward B is an I and a W at once, so the rules speak of I and W only:

    F(s, m)       after F(p, m) of every producer p of s, by way of RECV_F(s, m) where p sits on another rank
    I(s, m)       after F(s, m) and I(r, m) of every reader r of s, by way of RECV_B(s, m) likewise
    W(s, m)       after I(s, m)
    SEND_F(s, m)  after F(s, m);  RECV_F(s, m) after SEND_F(p, m)
    SEND_B(s, m)  after I(s, m);  RECV_B(s, m) after SEND_B(r, m)
    REDUCE(s, m)  after every W of the group that ends with m, of the same rank
    STEP(s, m)    after the same, and after the REDUCE of all ranks of s where s is reduced

All but the last two stay within one minibatch: `Rules.needs` gives them as (operation, stage) pairs for the
asking action's minibatch, and `Rules.own` gives the minibatches whose W the last two need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import lcm

from vpipe.errors import ScheduleError
from vpipe.schedule.action import UPDATE, Action, Op
from vpipe.schedule.program import Edges, Schedule

Need = tuple[Op, int]
Channel = tuple[Op, int, int, int, int]  # SEND_F or SEND_B, sending stage and rank, receiving stage and rank


def chain(stages: int) -> Edges:
    return frozenset((stage, stage + 1) for stage in range(stages - 1))


def checked_edges(edges: Iterable[tuple[int, int]], stages: int) -> Edges:
    edges = frozenset(edges)
    for producer, reader in sorted(edges):
        if not 0 <= producer < reader < stages:
            raise ScheduleError(
                f"edge ({producer}, {reader}) is wrong: a stage is read by a later one, "
                f"and stages are 0 to {stages - 1}"
            )
    return edges


class Rules:
    """The rules, for one schedule and the edges between its stages."""

    def __init__(self, schedule: Schedule, edges: Iterable[tuple[int, int]] | None = None) -> None:
        self.schedule = schedule
        given = schedule.edges if edges is None else edges
        self.edges = (
            chain(schedule.num_stages) if given is None else checked_edges(given, schedule.num_stages)
        )
        self.producers: list[list[int]] = [[] for _ in schedule.placement]
        self.readers: list[list[int]] = [[] for _ in schedule.placement]
        for producer, reader in sorted(self.edges):
            self.producers[reader].append(producer)
            self.readers[producer].append(reader)
        self.period = self._period()
        self._remote_producers = self._remote(self.producers)
        self._remote_readers = self._remote(self.readers)

    def _period(self) -> int:
        """After how many minibatches the question 'is that stage on my rank?' is answered alike."""
        period = 1
        for producer, reader in self.edges:
            here, there = self.schedule.placement[producer], self.schedule.placement[reader]
            if here != there and not set(here).isdisjoint(there):
                period = lcm(period, len(here), len(there))
        return period

    def local(self, stage: int, other: int, minibatch: int) -> bool:
        return self.schedule.rank_of(stage, minibatch) == self.schedule.rank_of(other, minibatch)

    def _remote(self, others: list[list[int]]) -> list[list[list[int]]]:
        """Those that sit on another rank, by phase (minibatch % period) and stage."""
        return [
            [[o for o in found if not self.local(stage, o, phase)] for stage, found in enumerate(others)]
            for phase in range(self.period)
        ]

    def remote_producers(self, stage: int, minibatch: int) -> list[int]:
        return self._remote_producers[minibatch % self.period][stage]

    def remote_readers(self, stage: int, minibatch: int) -> list[int]:
        return self._remote_readers[minibatch % self.period][stage]

    def operations(self, stage: int, minibatch: int) -> Iterator[Op]:
        """What must be done with a minibatch at a stage; a B does I and W."""
        yield from (Op.F, Op.I, Op.W)
        if self.schedule.lowered and self.remote_producers(stage, minibatch):
            yield from (Op.RECV_F, Op.SEND_B)
        if self.schedule.lowered and self.remote_readers(stage, minibatch):
            yield from (Op.SEND_F, Op.RECV_B)

    def needs(self, stage: int, op: Op, minibatch: int) -> list[Need]:
        """What must have been done with the same minibatch."""
        if op is Op.F:
            return self._arrivals(stage, Op.F, Op.RECV_F, self.producers[stage], minibatch)
        if op is Op.I or op is Op.B:
            return [(Op.F, stage), *self._arrivals(stage, Op.I, Op.RECV_B, self.readers[stage], minibatch)]
        if op is Op.W or op is Op.SEND_B:
            return [(Op.I, stage)]
        if op is Op.SEND_F:
            return [(Op.F, stage)]
        if op is Op.RECV_F:
            return [(Op.SEND_F, p) for p in self.remote_producers(stage, minibatch)]
        if op is Op.RECV_B:
            return [(Op.SEND_B, r) for r in self.remote_readers(stage, minibatch)]
        return []

    def _arrivals(self, stage: int, made: Op, received: Op, sources: list[int], minibatch: int) -> list[Need]:
        if not self.schedule.lowered:
            return [(made, source) for source in sources]
        here = [source for source in sources if self.local(stage, source, minibatch)]
        return [(made, source) for source in here] + ([(received, stage)] if len(here) < len(sources) else [])

    def group(self, last: int) -> range:
        """The minibatches of the update that is made after minibatch `last`."""
        interval = self.schedule.update_interval
        return range(last // interval * interval, last + 1)

    def group_end(self, minibatch: int) -> int:
        """The last minibatch of the update that `minibatch` belongs to."""
        interval = self.schedule.update_interval
        end = (minibatch // interval + 1) * interval
        total = self.schedule.minibatches
        return (end if total is None else min(end, total)) - 1

    def own(self, stage: int, rank: int, last: int) -> range:
        """Those of the group that `rank` runs."""
        ranks = self.schedule.placement[stage]
        group, count = self.group(last), len(ranks)
        return range(group.start + (ranks.index(rank) - group.start) % count, group.stop, count)

    def channels(self, action: Action) -> list[Channel]:
        """The channels that a send fills or a receive empties: one for each stage on another rank."""
        stage, op, minibatch = action
        if op is Op.SEND_F or op is Op.RECV_B:
            others = self.remote_readers(stage, minibatch)
        else:
            others = self.remote_producers(stage, minibatch)
        here = self.schedule.rank_of(stage, minibatch)
        ends = [(other, self.schedule.rank_of(other, minibatch)) for other in others]
        if op is Op.SEND_F or op is Op.SEND_B:
            return [(op, stage, here, other, rank) for other, rank in ends]
        sent = Op.SEND_F if op is Op.RECV_F else Op.SEND_B
        return [(sent, other, rank, stage, here) for other, rank in ends]

    def dependencies(self, action: Action, rank: int) -> list[tuple[int, Action]]:
        """Every (rank, action) that must be done before `rank` may start `action`."""
        stage, op, minibatch = action
        if op not in UPDATE:
            needs = self.needs(stage, op, minibatch)
            return [(self.schedule.rank_of(s, minibatch), Action(s, o, minibatch)) for o, s in needs]
        found = [(rank, Action(stage, Op.W, m)) for m in self.own(stage, rank, minibatch)]
        if op is Op.STEP and stage in self.schedule.reduced:
            found += [(r, Action(stage, Op.REDUCE, minibatch)) for r in self.schedule.placement[stage]]
        return found
