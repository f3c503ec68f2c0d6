"""What is done before its turn: receives are posted, and what was swapped is fetched."""

from collections import deque
from collections.abc import Iterator, Mapping

from vpipe.communication import CommunicationHandler
from vpipe.runtime.feed import Feed
from vpipe.runtime.routes import Routes
from vpipe.schedule import Action, Op
from vpipe.stage.stage import Stage

AHEAD = 8
"""How many actions ahead of the current one receives are posted."""
BACKWARDS = (Op.B, Op.I)


class LookAhead:
    def __init__(self, handler: CommunicationHandler, stages: Mapping[int, Stage], routes: Routes) -> None:
        self._handler = handler
        self._stages = stages
        self._routes = routes
        self._coming: deque[Action] = deque()
        self.swaps = any(stage.module.swaps for stage in stages.values())

    def actions(self, program: Iterator[Action], feed: Feed) -> Iterator[Action]:
        """The program's actions, each when its turn has come, numbered from the beginning of the run."""
        coming = self._coming = deque()
        for stage, op, place in program:
            action = Action(stage, op, place + feed.offset)
            coming.append(action)
            if self._handler.takes_expectations:
                self._post_receives(action, place, feed)
            if len(coming) > AHEAD:
                yield coming.popleft()
        while coming:
            yield coming.popleft()

    def fetch_next(self) -> None:
        """While one backward runs, what the next one reads is on its way."""
        coming = next((action for action in self._coming if action.op in BACKWARDS), None)
        if coming is not None:
            self._stages[coming.stage].fetch(coming.minibatch)

    def _post_receives(self, action: Action, place: int, feed: Feed) -> None:
        if action.op is Op.RECV_F:
            links = self._routes.route(action.stage, place).received
        elif action.op is Op.RECV_B:
            links = self._routes.route(action.stage, place).returned
        else:
            return
        for link in links:
            shape = self._routes.shape(link, feed.shapes(action.minibatch))
            backward = action.op is Op.RECV_B
            self._handler.expect(link.name, action.minibatch, link.rank, shape, link.dtype, backward=backward)
