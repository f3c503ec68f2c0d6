"""The loop over the data on one rank: program after program, drained whenever the pipeline must be empty."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vpipe.communication import agree_on
from vpipe.errors import VPipeError
from vpipe.pipeline.agreement import agree_on_data
from vpipe.pipeline.layout import Layout
from vpipe.runtime import Feed, Fields, StageRuntime
from vpipe.runtime.placing import placed_on
from vpipe.schedule import Action, Op

FORWARD = (Op.RECV_F, Op.F, Op.SEND_F)


class Loop:
    """Every rank has one and calls the same methods. `updates` counts those that this rank has made."""

    def __init__(self, layout: Layout, runtime: StageRuntime, loss_weight: Callable[[Fields], float]) -> None:
        self.layout = layout
        self.schedule = layout.schedule
        self.runtime = runtime
        self.handler = runtime.handler
        self.world = runtime.handler.world
        self.rank = runtime.rank
        self.loss_weight = loss_weight
        self.updates = 0
        self._place = placed_on(self.handler.device, runtime.stages.values())
        self._feed: Feed | None = None
        self._running: Iterator[Action] | None = None
        self._arrived: list[tuple[int, float]] = []  # losses that came while draining
        self._countings = 0
        self._evaluations = 0
        for name in ("admitted", "evaluation"):
            self.handler.register_tensor(name)

    @property
    def training(self) -> bool:
        return self._feed is not None

    def train(self, batches: Iterable[Any]) -> Iterator[tuple[int, float]]:
        """(update, loss) in order; left early, the pipeline is drained."""
        feed = self._feed = self._open_feed(batches, self.updates)
        agree_on_data(self.world, feed)
        try:
            for program in self._programs(feed):
                self._running = self.runtime.run(program, feed)
                for action in self._running:
                    if self._completes_update(action):
                        yield from self._made_update(action.minibatch)
                yield from self._take_arrived()
            yield from self._losses_to_come()
        except GeneratorExit:
            self.flush()
            raise
        finally:
            self._running = None
            self._feed = None
        agree_on(self.world, "number of batches", feed.end, "give every rank a loader of the same length")
        self._settle()

    def flush(self) -> None:
        """Finish every minibatch that is under way on any rank; a `train` loop goes on afterwards."""
        if self._running is None or self._feed is None or self.schedule.synchronous:
            return
        running, self._running = self._running, None  # whoever fails in here need not try it again
        interval = self._feed.interval
        self._feed.limit = -(-self._most_admitted(self._feed) // interval) * interval
        for action in running:
            if self._completes_update(action):
                self._arrived += self._made_update(action.minibatch)
        self._arrived += self._losses_to_come()
        self._settle()

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The mean loss over the batches; the pipeline is empty."""
        feed = self._open_feed(batches, 0)
        self.runtime.forward_only = True
        try:
            for program in self._programs(feed):
                for _ in self.runtime.run((action for action in program if action.op in FORWARD), feed):
                    pass
        finally:
            self.runtime.forward_only = False
        losses, self.runtime.evaluated = self.runtime.evaluated, []
        sums = [sum(float(loss) * weight for loss, weight in losses), sum(weight for _, weight in losses)]
        self._evaluations += 1
        parts = self.handler.all_gather("evaluation", self._evaluations, sums)
        total = sum(weight for _, weight in parts)
        if not total:
            raise VPipeError("evaluate was given no batch: there is no loss to tell")
        return sum(loss for loss, _ in parts) / total

    def wait_for_all(self) -> None:
        self.world.all_gather("settled", None)

    def _open_feed(self, batches: Iterable[Any], updates: int) -> Feed:
        schedule = self.schedule
        stages = schedule.stages_of(self.rank)
        return Feed(
            batches,
            self.layout.normalise,
            self.loss_weight,
            schedule.update_interval,
            start=updates * schedule.update_interval,
            wanted=lambda place: any(schedule.rank_of(stage, place) == self.rank for stage in stages),
            place=self._place,
        )

    def _programs(self, feed: Feed) -> Iterator[Iterator[Action]]:
        """The programs that use up the data; each starts from the minibatch `feed.offset`.

        A schedule of a given length is run again and again: a synchronous one for each update. One without
        an end is run once, unless it is drained before the data ends: then it starts again.
        """
        length = self.schedule.minibatches
        if length is not None:
            while count := feed.count(length):
                yield self.layout.program(self.rank, count)
                feed.offset += length
                feed.limit = None  # a flush ended this round, not the data
                if not self.schedule.synchronous:
                    self._most_admitted(feed)  # so that `flush` finds every rank in the same round
            return
        while feed.exists(feed.offset):
            yield self.schedule.program(self.rank, lambda place: feed.exists(feed.offset + place))
            if feed.limit is None:
                return
            feed.offset, feed.limit = feed.limit, None

    def _most_admitted(self, feed: Feed) -> int:
        """The number of minibatches that any rank has begun."""
        self._countings += 1
        admitted = self.handler.all_gather("admitted", self._countings, [feed.admitted])
        return int(max(count for (count,) in admitted))

    def _completes_update(self, action: Action) -> bool:
        return action.op is Op.STEP and self.runtime.completes_update

    def _made_update(self, minibatch: int) -> Iterator[tuple[int, float]]:
        """This rank has made an update: the losses that are there now."""
        update = minibatch // self.schedule.update_interval
        self.updates = update + 1
        return self.runtime.losses.arrived()

    def _losses_to_come(self) -> Iterator[tuple[int, float]]:
        return self.runtime.losses.arrived(all_of_them=True)

    def _take_arrived(self) -> Iterator[tuple[int, float]]:
        arrived, self._arrived = self._arrived, []
        yield from arrived

    def _settle(self) -> None:
        """The pipeline is empty: apply what was to come later, and see that nothing is left over."""
        self.runtime.updates.catch_up()
        self.runtime.recording.read_clock(wait=True)
        leftovers = self.runtime.leftovers()
        assert not leftovers, f"rank {self.rank} has leftovers: " + "; ".join(leftovers)
        # Whoever goes on may send at once, and that would look like a leftover to the others.
        self.wait_for_all()
