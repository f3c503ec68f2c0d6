"""The walk: the one event loop that runs a schedule's programs against a clock.

Each rank runs its program in order, one action at a time; an action starts when its rank is free and all that
the rules ask for is done. Events come out in the order of their starts, and only what is still needed is
remembered, so an endless schedule can be walked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from vpipe.errors import ScheduleError
from vpipe.schedule.action import COMPUTE, UPDATE, Action, Op
from vpipe.schedule.program import Exists, Schedule
from vpipe.schedule.rules import Channel, Need, Rules

Cost = Callable[[Action], float]

SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
GATHERED = frozenset({Op.B, Op.W})
# What each operation leaves for others to need: a whole backward leaves what I does.
FACTS = (Op.F, Op.I, Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B)  # the last four only where messages are
MADE = {op: op for op in FACTS} | {Op.B: Op.I}


class Event(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


class Wait(NamedTuple):
    """A rank that cannot go on: what it would do, and what it waits for."""

    rank: int
    action: Action
    needed: str

    def __str__(self) -> str:
        return f"rank {self.rank} waits in {self.action} for {self.needed}"


class Deadlock(ScheduleError):
    """No rank can go on, and some are not at their end."""

    def __init__(self, waits: list[Wait]) -> None:
        super().__init__("deadlock: " + "; ".join(map(str, waits)))
        self.waits = waits


UNIT = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}


def unit_cost(action: Action) -> float:
    """F = I = W = 1, a whole backward 2, everything else free."""
    return UNIT.get(action.op, 0.0)


def walk(
    schedule: Schedule,
    cost: Cost = unit_cost,
    *,
    edges: Iterable[tuple[int, int]] | None = None,
    buffer: int | None = None,
    exists: Exists | None = None,
) -> Iterator[Event]:
    """Yields the events of a run in the order of their starts; raises `Deadlock` where it cannot end.

    `buffer`: how many messages of one channel may be under way before a send has to wait; None: any number.
    """
    if buffer is not None and buffer < 1:
        raise ScheduleError(f"a channel buffers at least one message, not {buffer}")
    return _Walk(schedule, Rules(schedule, edges), cost, buffer, exists).events()


class _Walk:
    """The state of one walk."""

    def __init__(
        self, schedule: Schedule, rules: Rules, cost: Cost, buffer: int | None, exists: Exists | None
    ) -> None:
        self.schedule = schedule
        self.rules = rules
        self.cost = cost
        self.buffer = buffer
        self.programs = [schedule.program(rank, exists) for rank in range(schedule.num_ranks)]
        self.pending: list[Action | None] = [None] * schedule.num_ranks
        self.free = [0.0] * schedule.num_ranks
        self.heap: list[tuple[float, int]] = []
        self.interval = schedule.update_interval
        # Whatever can be needed of a minibatch has a number; `columns` gives those that each action needs.
        needs = product(FACTS if schedule.lowered else FACTS[:2], range(schedule.num_stages))
        self.numbers: dict[Need, int] = {need: number for number, need in enumerate(needs)}
        self.columns = [self.columns_of(rules.table(phase)) for phase in range(rules.period)]
        self.waiting: dict[object, list[int]] = {}
        # When each part of a minibatch was done, and how many stages still owe its W: dropped with the last.
        self.done: dict[int, list[float | None]] = {}
        self.owed: dict[int, int] = {}
        # How many W of each (rank, stage, group) are done; when each rank of a (stage, group) did its REDUCE.
        self.gathered: dict[tuple[int, int, int], int] = {}
        self.joined: dict[tuple[int, int], dict[int, float]] = {}
        self.stepped: dict[tuple[int, int], int] = {}
        # Since when each free place of a channel has been free.
        self.places: dict[Channel, deque[float]] = {}

    def events(self) -> Iterator[Event]:
        # This loop is the price of every action of a simulation: names are local, and little is called.
        heap, waiting = self.heap, self.waiting
        programs, pending, free = self.programs, self.pending, self.free
        columns, period, interval, stages = (
            self.columns,
            self.rules.period,
            self.interval,
            self.schedule.num_stages,
        )
        done_with, owed, gathered = self.done, self.owed, self.gathered
        made = [{op: self.numbers.get((MADE[op], stage)) for op in MADE} for stage in range(stages)]
        nothing: list[float | None] = [None] * len(self.numbers)
        cost, make_event = self.cost, partial(tuple.__new__, Event)
        turned: list[int] = list(range(len(programs)))
        for rank in turned:
            pending[rank] = next(programs[rank], None)
        while True:
            # Those who have a new action, or whose action's wait is over, start it or wait (again).
            for rank in turned:
                action = pending[rank]
                if action is None:
                    continue
                stage, op, minibatch = action
                start = free[rank]
                done = done_with.get(minibatch, nothing)
                for column in columns[minibatch % period][stage][op]:
                    time = done[column]
                    if time is None:
                        waiting.setdefault((minibatch, column), []).append(rank)
                        break
                    if time > start:
                        start = time
                else:
                    if op not in COMPUTE:
                        gate = self.gate(rank, action)
                        if gate is None:
                            continue
                        start = max(start, gate)
                    heappush(heap, (start, rank))
            if not heap:
                break
            start, rank = heappop(heap)
            action = pending[rank]
            assert action is not None
            stage, op, minibatch = action
            end = start + cost(action)
            yield make_event((rank, action, start, end))
            turned = [rank]
            fact = made[stage].get(op)
            if fact is not None:
                if minibatch not in done_with:
                    done_with[minibatch] = nothing.copy()
                    owed[minibatch] = stages
                done_with[minibatch][fact] = end
                if (minibatch, fact) in waiting:
                    turned += waiting.pop((minibatch, fact))
            if op in GATHERED:
                key = (rank, stage, minibatch // interval)
                gathered[key] = gathered.get(key, 0) + 1
                owed[minibatch] -= 1
                if not owed[minibatch]:
                    del done_with[minibatch], owed[minibatch]
            elif op not in COMPUTE:
                turned += self.freed(rank, action, end)
            pending[rank] = next(programs[rank], None)
            free[rank] = end
        waits = [
            Wait(rank, action, self.obstacle(rank, action)) for rank, action in enumerate(pending) if action
        ]
        if waits:
            raise Deadlock(waits)

    def columns_of(self, table: list[dict[Op, tuple[Need, ...]]]) -> list[dict[Op, tuple[int, ...]]]:
        """A table of the rules in numbers (a schedule that is not lowered has none for messages)."""
        return [
            {
                op: tuple(self.numbers[need] for need in needs if need in self.numbers)
                for op, needs in row.items()
            }
            for row in table
        ]

    def gate(self, rank: int, action: Action) -> float | None:
        """Since when an update or message may start, as far as other minibatches go; None: it waits."""
        if action.op in UPDATE:
            return self.update_gate(rank, action)
        return self.send_gate(action) if action.op in SENDS and self.buffer is not None else 0.0

    def send_gate(self, action: Action) -> float | None:
        """Since when all channels of a send have a free place, which it takes; None: wait for one."""
        places = [self.places_of(channel) for channel in self.rules.channels(action)]
        for channel, free in zip(self.rules.channels(action), places, strict=True):
            if not free:
                self.waiting.setdefault(channel, []).append(channel[2])
                return None
        return max((free.popleft() for free in places), default=0.0)

    def update_gate(self, rank: int, action: Action) -> float | None:
        """Since when a group's gradients are complete; None: wait for the other ranks of the stage."""
        stage, op, last = action
        if self.missing(rank, action):
            return None  # for good: what is missing stands later in the same program
        if op is Op.REDUCE or stage not in self.schedule.reduced:
            return 0.0
        joined = self.joined.get((stage, last), {})
        if len(joined) < len(self.schedule.placement[stage]):
            self.waiting.setdefault((stage, last), []).append(rank)
            return None
        return max(joined.values())

    def missing(self, rank: int, action: Action) -> int:
        """How many W of its group an update still lacks."""
        stage, _, last = action
        done = self.gathered.get((rank, stage, last // self.interval), 0)
        return len(self.rules.own(stage, rank, last)) - done

    def places_of(self, channel: Channel) -> deque[float]:
        if channel not in self.places:
            self.places[channel] = deque([0.0] * (self.buffer or 0))
        return self.places[channel]

    def freed(self, rank: int, action: Action, end: float) -> list[int]:
        """Remembers what an update or message leaves behind; the ranks that waited for it."""
        stage, op, last = action
        if op is Op.STEP:
            self.gathered.pop((rank, stage, last // self.interval), None)
            if stage in self.schedule.reduced:
                self.stepped[stage, last] = self.stepped.get((stage, last), 0) + 1
                if self.stepped[stage, last] == len(self.schedule.placement[stage]):
                    del self.joined[stage, last], self.stepped[stage, last]
            return []
        if op is Op.REDUCE:
            self.joined.setdefault((stage, last), {})[rank] = end
            return self.waiting.pop((stage, last), [])
        if op in SENDS or self.buffer is None:
            return []
        woken = []
        for channel in self.rules.channels(action):
            self.places_of(channel).append(end)
            woken += self.waiting.pop(channel, [])
        return woken

    def obstacle(self, rank: int, action: Action) -> str:
        """What stands in the way of a rank that waits, in words."""
        stage, op, minibatch = action
        done = self.done.get(minibatch)
        for needed, source in self.rules.needs(stage, op, minibatch):
            if done is None or done[self.numbers[needed, source]] is None:
                return str(Action(source, needed, minibatch))
        if op in SENDS:
            return f"room in its channel, which holds {self.buffer} under way"
        if lacking := self.missing(rank, action):
            return f"{lacking} more backward of stage {stage} before it"
        others = set(self.schedule.placement[stage]) - set(self.joined.get((stage, minibatch), {}))
        return f"{Action(stage, Op.REDUCE, minibatch)} of rank {', '.join(map(str, sorted(others)))}"
