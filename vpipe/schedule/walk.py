"""The walk: the one event loop that runs a schedule's programs against a clock.

Each rank runs its program in order, one action at a time; an action starts when its rank is free and all that
the rules ask for is done. Only what is still needed is remembered, so an endless schedule can be walked.

`done[number][minibatch]` is when the action that a dependency (`dependencies.py`) starts from has ended; until then,
where a rank already waits for it, it is -1 - rank. A dependency has one reader and is deleted when that one starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from vpipe.errors import ScheduleError
from vpipe.schedule.action import UPDATE, Action, Op
from vpipe.schedule.dependencies import DependencyTables
from vpipe.schedule.program import Exists, Schedule
from vpipe.schedule.rules import Channel, Rules
from vpipe.schedule.shared_lines import LineQueue, SharedLines

Cost = Callable[[Action], float]
Transit = Callable[[Action, int, float], float | None]
"""When what an action made is at the stage, on another rank, that reads it: action, reader, the action's end. None: it
goes over lines that ranks share."""
Hold = Callable[[int, Action, float], float]
"""When an action that a rank could start at this time really starts."""

F, B, W, STEP, REDUCE = Op.F, Op.B, Op.W, Op.STEP, Op.REDUCE  # members are slow to look up
SENDS = frozenset({Op.SEND_F, Op.SEND_B})


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
    transit: Transit | None = None,
    shared: SharedLines | None = None,
    hold: Hold | None = None,
    by_start: bool = True,
) -> Iterator[Event]:
    """Yields the events of a run in the order of their starts; raises `Deadlock` where it cannot end.

    `buffer`: how many messages of one channel may be under way before a send has to wait; None: any number.
    `transit` and `hold` tell what a schedule that is not lowered leaves out: how long messages are under way,
    and what else a rank waits for. They are asked once for each message and action, in the order of the rank
    that sends or acts. `shared` carries what `transit` leaves to it, and reductions: what one rank sends may wait for
    what another one sent. Not `by_start`, events are in order on each rank only, which is faster.
    """
    if buffer is not None and buffer < 1:
        raise ScheduleError(f"a channel buffers at least one message, not {buffer}")
    walked = _Walk(schedule, Rules(schedule, edges), cost, buffer, exists)
    lines = None if shared is None else LineQueue(shared, schedule.placement)
    return walked.events(transit, lines, hold, by_start or shared is not None)


TILE = 16
"""Where the order of ranks is free, minibatches that neighbours run before the next ranks have their turn.

A thousand ranks hold more than a cache does. In a pipeline in steady state, stage s runs B of minibatch m when
the stages before it run those of m + 1, m + 2, ...: so tiles are cut along that diagonal (F is ahead of B by the
stages that follow). In each the lowest rank that can goes first. It is a matter of speed only.
"""


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
        self.interval = schedule.update_interval
        self.dependencies = DependencyTables(rules)
        self.done: list[dict[int, float]] = [{} for _ in range(len(self.dependencies.numbers))]
        # Ranks that wait for room in a channel, or for the other ranks of a stage.
        self.waiting: dict[object, list[int]] = {}
        # For each stage how many W of a group a replica has done, by group * replicas + replica;
        # when each rank of a (stage, group) did its REDUCE.
        self.gathered: list[dict[int, int]] = [{} for _ in schedule.placement]
        self.joined: dict[tuple[int, int], dict[int, float]] = {}
        self.stepped: dict[tuple[int, int], int] = {}
        # Since when each free place of a channel has been free.
        self.places: dict[Channel, deque[float]] = {}

    def events(
        self, transit: Transit | None, lines: LineQueue | None, hold: Hold | None, by_start: bool
    ) -> Iterator[Event]:
        # Runs once for each action of a simulation: names are local, and calls are few.
        programs, pending = self.programs, self.pending
        dependencies, period = self.dependencies.phases, self.rules.period
        done, gathered, interval = self.done, self.gathered, self.interval
        cost, make_event = self.cost, partial(tuple.__new__, Event)
        replicas = [len(ranks) for ranks in self.schedule.placement]
        # Stages whose updates concern one rank alone.
        lone = [count == 1 and stage not in self.schedule.reduced for stage, count in enumerate(replicas)]
        free = [0.0] * len(programs)
        # Ranks that can go on, by start or by tile, and what each would do.
        timed: list[tuple[float, int]] = []
        tiled: list[int] = []
        starts, found = [0.0] * len(programs), [dependencies[0][0][F]] * len(programs)
        rank, ranks, last = -1, len(programs), self.schedule.num_stages - 1
        turned = list(range(len(programs)))
        waiters = [-1.0 - number for number in turned]
        for number in turned:
            pending[number] = next(programs[number], None)
            if lines is not None:
                lines.announce(number, pending[number], 0.0)
        while True:
            # Those whose action's wait is over, and then the rank that has a new one, start it or wait (again).
            goes_on = False
            for number in turned:
                action = pending[number]
                if action is None:
                    continue
                stage, op, minibatch = action
                start = free[number]
                own = dependencies[minibatch % period][stage][op]
                for dependency in own[0]:
                    time = done[dependency].get(minibatch)
                    if time is None:
                        done[dependency][minibatch] = waiters[number]
                        break
                    if time > start:
                        start = time
                else:
                    if op is STEP and lone[stage]:
                        group = minibatch // interval
                        if gathered[stage].get(group) != minibatch + 1 - group * interval:
                            continue  # for good: what is missing stands later in the same program
                    elif not own[3]:
                        gate = self.gate(number, action)
                        if gate is None:
                            continue
                        if gate > start:
                            start = gate
                    if number == rank and not by_start:
                        goes_on = True
                        continue
                    starts[number], found[number] = start, own
                    if by_start:
                        heappush(timed, (start, number))
                    else:
                        tile = (minibatch - (last if op is F else stage)) // TILE
                        heappush(tiled, tile * ranks + number)
            if not goes_on:
                if lines is not None and lines.queued and (not timed or lines.queued[0].time <= timed[0][0]):
                    turned = self.carried(lines)
                    continue
                if timed:
                    rank = heappop(timed)[1]
                elif tiled:
                    rank = heappop(tiled) % ranks
                else:
                    break
                start, own, action = starts[rank], found[rank], pending[rank]
                assert action is not None
                stage, op, minibatch = action
            assert action is not None
            needs, makes, sends, computes = own
            for dependency in needs:
                del done[dependency][minibatch]
            if hold is not None:
                start = hold(rank, action, start)
            end = start + cost(action)
            yield make_event((rank, action, start, end))
            turned = []
            for dependency in makes:
                waiter = done[dependency].get(minibatch)
                if waiter is not None:
                    turned.append(-1 - int(waiter))
                done[dependency][minibatch] = end
            for dependency, reader in sends:
                arrival = end if transit is None else transit(action, reader, end)
                if arrival is None:
                    assert lines is not None
                    lines.send(rank, action, reader, dependency, end)
                    continue
                waiter = done[dependency].get(minibatch)
                if waiter is not None:
                    turned.append(-1 - int(waiter))
                done[dependency][minibatch] = arrival
            if op is B or op is W:
                groups = gathered[stage]
                turn = minibatch // interval * replicas[stage] + minibatch % replicas[stage]
                groups[turn] = groups.get(turn, 0) + 1
                if lines is not None:
                    lines.backwards[rank, stage] = start, end
            elif op is STEP and lone[stage]:
                del gathered[stage][minibatch // interval]
            elif op is REDUCE and lines is not None:
                turned += self.reduced(lines, rank, action, end)
            elif not computes:
                turned += self.freed(rank, action, end)
            turned.append(rank)
            pending[rank] = next(programs[rank], None)
            free[rank] = end
            if lines is not None:
                lines.announce(rank, pending[rank], end)
        waits = [
            Wait(rank, action, self.obstacle(rank, action)) for rank, action in enumerate(pending) if action
        ]
        if waits:
            raise Deadlock(waits)

    def carried(self, lines: LineQueue) -> list[int]:
        """Takes the first message to its next line, or to its end; the ranks that waited for it."""
        message = lines.carry()
        if message is None:
            return []
        if message.reduces:
            return self.reduced(lines, message.rank, message.action, message.time)
        arrived = self.done[message.dependency]
        waiter = arrived.get(message.minibatch)
        arrived[message.minibatch] = message.time
        return [] if waiter is None else [-1 - int(waiter)]

    def reduced(self, lines: LineQueue, rank: int, action: Action, time: float) -> list[int]:
        """One of both halves of a reduction is done; the ranks that waited for both."""
        both = lines.join_halves(rank, action, time)
        return [] if both is None else self.freed(rank, action, both)

    def gate(self, rank: int, action: Action) -> float | None:
        """Since when an update or message may start, as far as other minibatches go; None: it waits."""
        stage, op, last = action
        if op not in UPDATE:
            return self.send_gate(action) if op in SENDS and self.buffer is not None else 0.0
        if self.missing(rank, action):
            return None  # for good: what is missing stands later in the same program
        if stage not in self.schedule.reduced or op is REDUCE:
            return 0.0
        joined = self.joined.get((stage, last), {})
        if len(joined) < len(self.schedule.placement[stage]):
            self.waiting.setdefault((stage, last), []).append(rank)
            return None
        return max(joined.values())

    def send_gate(self, action: Action) -> float | None:
        """Since when all channels of a send have a free place, which it takes; None: wait for one."""
        places = [self.places_of(channel) for channel in self.rules.channels(action)]
        for channel, free in zip(self.rules.channels(action), places, strict=True):
            if not free:
                self.waiting.setdefault(channel, []).append(channel[2])
                return None
        return max((free.popleft() for free in places), default=0.0)

    def missing(self, rank: int, action: Action) -> int:
        """How many W of its group an update still lacks."""
        stage, _, last = action
        group, ranks = last // self.interval, self.schedule.placement[stage]
        if len(ranks) == 1:
            return last + 1 - group * self.interval - self.gathered[stage].get(group, 0)
        done = self.gathered[stage].get(group * len(ranks) + ranks.index(rank), 0)
        return len(self.rules.own(stage, rank, last)) - done

    def places_of(self, channel: Channel) -> deque[float]:
        if channel not in self.places:
            self.places[channel] = deque([0.0] * (self.buffer or 0))
        return self.places[channel]

    def freed(self, rank: int, action: Action, end: float) -> list[int]:
        """Remembers what an update or message leaves behind; the ranks that waited for it."""
        stage, op, last = action
        if op is STEP:
            ranks = self.schedule.placement[stage]
            self.gathered[stage].pop(last // self.interval * len(ranks) + ranks.index(rank), None)
            if stage in self.schedule.reduced:
                self.stepped[stage, last] = self.stepped.get((stage, last), 0) + 1
                if self.stepped[stage, last] == len(self.schedule.placement[stage]):
                    del self.joined[stage, last], self.stepped[stage, last]
            return []
        if op is REDUCE:
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
        for needed, source in self.rules.needs(stage, op, minibatch):
            dependency = self.dependencies.number((needed, source), (op, stage))
            if dependency is not None and self.done[dependency].get(minibatch, -1.0) < 0:
                return str(Action(source, needed, minibatch))
        if op in SENDS:
            return f"room in its channel, which holds {self.buffer} under way"
        if lacking := self.missing(rank, action):
            return f"{lacking} more backward of stage {stage} before it"
        others = set(self.schedule.placement[stage]) - set(self.joined.get((stage, minibatch), {}))
        return f"{Action(stage, REDUCE, minibatch)} of rank {', '.join(map(str, sorted(others)))}"
