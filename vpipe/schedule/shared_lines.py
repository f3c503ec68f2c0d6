"""Messages and reductions on lines that ranks share, in the order of time: what one rank sends waits for another's.

A reduction has two halves, the action of its rank and its way over the lines, and is done when both are.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from vpipe.schedule.action import Action, Op


class SharedLines(Protocol):
    """Lines that ranks share; asked in the order of time."""

    def carry(self, rank: int, action: Action, reader: int, before: int, time: float) -> tuple[float, bool]:
        """When a message leaves a line, or comes to it again, and whether it is there then: reader (-1: the other ranks
        of a stage that is reduced), how many lines it has left before, when it comes to this one."""

    def begin(self, rank: int, action: Action, start: float, end: float) -> float:
        """When a rank's part of a reduction comes to its first line; the replicas' last backward goes from `start` to
        `end`."""


class Queued(NamedTuple):
    """A message that comes to a line. Equal times are ordered by what is sent, whoever sends it."""

    time: float
    reduces: bool
    """Of what comes at one time, messages go before reductions."""
    minibatch: int
    stage: int
    reader: int
    lines: int
    """That it has left before."""
    rank: int
    action: Action
    dependency: int
    """That it fulfils, unless it is a reduction."""


class LineQueue:
    """What is under way on the lines of one walk; `placement` names the ranks of each stage."""

    def __init__(self, lines: SharedLines, placement: Sequence[Sequence[int]]) -> None:
        self._lines, self._placement = lines, placement
        self.queued: list[Queued] = []
        """A heap."""
        self.backwards: dict[tuple[int, int], tuple[float, float]] = {}
        """The last backward of a (rank, stage) since its reduction."""
        # The last backwards of the replicas of a (stage, group) that reduce next; halves that are done, and since when.
        self._spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
        self._halves: dict[tuple[int, Action], float] = {}

    def send(self, rank: int, action: Action, reader: int, dependency: int, time: float) -> None:
        """A message comes to its first line."""
        stage, _, minibatch = action
        heappush(self.queued, Queued(time, False, minibatch, stage, reader, 0, rank, action, dependency))

    def announce(self, rank: int, action: Action | None, time: float) -> None:
        """What a rank does next. If it reduces, its last backward has just begun; when the last of its replicas has
        come that far, all begin: only then there is a sum."""
        if action is None or action.op is not Op.REDUCE:
            return
        stage, _, minibatch = action
        spans = self._spans.setdefault((stage, minibatch), [])
        spans.append(self.backwards.pop((rank, stage), (time, time)))
        ranks = self._placement[stage]
        if len(spans) == len(ranks):
            del self._spans[stage, minibatch]
            start, end = max(spans, key=lambda span: span[::-1])
            for other in ranks:
                comes = self._lines.begin(other, action, start, end)
                heappush(self.queued, Queued(comes, True, minibatch, stage, -1, 0, other, action, -1))

    def carry(self) -> Queued | None:
        """Takes the first message to its next line; the message, with the time when it is there, if it has arrived."""
        message = heappop(self.queued)
        rank, action, reader = message.rank, message.action, message.reader
        time, arrived = self._lines.carry(rank, action, reader, message.lines, message.time)
        if arrived:
            return message._replace(time=time)
        heappush(self.queued, message._replace(time=time, lines=message.lines + 1))
        return None

    def join_halves(self, rank: int, action: Action, time: float) -> float | None:
        """One half of a reduction is done; when both are, if the other one is."""
        other = self._halves.pop((rank, action), None)
        if other is None:
            self._halves[rank, action] = time
            return None
        return max(time, other)
