"""Work done before its turn: receives are posted, and swapped activations fetched."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from vpipe.communication import CommunicationHandler
from vpipe.runtime.feed import Feed, Minibatch
from vpipe.runtime.routes import Routes
from vpipe.schedule import Action, Op
from vpipe.stage.stage import Stage

AHEAD = 8
"""How many actions ahead of the current one receives are posted."""
BACKWARDS = (Op.B, Op.I)
_GRADIENTS = (*BACKWARDS, Op.W, Op.REDUCE)


class Work(NamedTuple):
    """An action whose turn has come, with the stage and the minibatch that it is about."""

    action: Action
    """Its minibatch is numbered from the beginning of the run."""
    stage: Stage
    minibatch: Minibatch
    evaluation: bool
    """Whether it is part of an evaluation: no dropout, no gradients."""


class Prefetch:
    def __init__(self, handler: CommunicationHandler, stages: Mapping[int, Stage], routes: Routes) -> None:
        self._handler = handler
        self._stages = stages
        self._routes = routes
        self._coming: deque[Work] = deque()
        self.swaps = any(stage.module.swaps for stage in stages.values())

    def works(self, program: Iterator[Action], feed: Feed, *, evaluation: bool) -> Iterator[Work]:
        """The program's actions, each when its turn has come."""
        coming = self._coming = deque()
        for stage, op, place in program:
            minibatch = feed.identify(place)
            work = Work(Action(stage, op, minibatch.number), self._stages[stage], minibatch, evaluation)
            coming.append(work)
            if self._handler.takes_expectations:
                self._post_receives(work, feed)
            if len(coming) > AHEAD:
                yield coming.popleft()
        while coming:
            yield coming.popleft()

    def fetch_next(self) -> None:
        """While one backward runs, fetch what the next one reads."""
        coming = next((work for work in self._coming if work.action.op in BACKWARDS), None)
        if coming is not None:
            coming.stage.fetch(coming.minibatch.number)

    def reduces_next(self, stage: int) -> bool:
        """Whether this rank sums the stage's gradients before it computes any others."""
        coming = next((work.action for work in self._coming if work.action.op in _GRADIENTS), None)
        return coming is not None and coming.op is Op.REDUCE and coming.stage == stage

    def _post_receives(self, work: Work, feed: Feed) -> None:
        op, minibatch = work.action.op, work.minibatch
        if op not in (Op.RECV_F, Op.RECV_B):
            return
        route, backward = self._routes.route(work.action.stage, minibatch.place), op is Op.RECV_B
        for link in route.returned if backward else route.received:
            shape = self._routes.shape(link, feed.shapes(minibatch))
            self._handler.expect(link.name, minibatch.number, link.rank, shape, link.dtype, backward=backward)
