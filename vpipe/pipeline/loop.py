"""The loop over the data on one rank: program after program, drained whenever the pipeline must be empty."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from vpipe.communication import agree_on
from vpipe.errors import VPipeError
from vpipe.pipeline.agreement import agree_on_data
from vpipe.pipeline.layout import Layout
from vpipe.pipeline.outputs import OutputExchange, remembering
from vpipe.pipeline.requests import STOP, Requests
from vpipe.runtime import Feed, Fields, StageRuntime
from vpipe.runtime.losses import Arrived
from vpipe.runtime.prefetch import Work
from vpipe.schedule import Action, Op
from vpipe.stage.warm_up import compile_ahead

UpdateHook = Callable[[int, float], object]


class Loop:
    """Every rank has one and calls the same methods. `updates` counts those that this rank has made."""

    def __init__(
        self,
        layout: Layout,
        runtime: StageRuntime,
        loss_weight: Callable[[Fields], float],
        requests: Requests,
        async_after: int = 0,
    ) -> None:
        """`async_after`: updates at the beginning of the run after each of which the pipeline is drained."""
        self.layout = layout
        self.schedule = layout.schedule
        self.runtime = runtime
        self.handler = runtime.handler
        self.world = runtime.handler.world
        self.rank = runtime.rank
        self.loss_weight = loss_weight
        self.updates = 0
        self.requested = 0  # with the update that was yielded last, the same on every rank
        self.stopped = False  # whether the latest `train` ended because that was requested
        self.update_hooks: list[UpdateHook] = []
        self._requests = requests
        self._async_after = 0 if self.schedule.synchronous else async_after
        self._feed: Feed | None = None
        self._running: Iterator[Work] | None = None
        self._drained: list[Arrived] = []  # losses that came while draining
        self._compiled = False
        self._countings = 0
        self._exchange = OutputExchange(layout, runtime)
        self.handler.register_tensor("admitted")

    @property
    def training(self) -> bool:
        return self._feed is not None

    def train(self, batches: Iterable[Any]) -> Iterator[tuple[int, float]]:
        """(update, loss) in order; left early, the pipeline is drained."""
        feed = self._feed = self._open_feed(batches, self.updates)
        self.stopped = False
        agree_on_data(self.world, feed)
        self._compile_ahead(feed)
        try:
            for program in self._programs(feed, self._async_after):
                self._running = self.runtime.run(program, feed)
                yield from self._deliver(self._losses(self._running))
                if 0 < self.updates <= self._async_after:
                    self._drained += self.runtime.losses.arrived(all_of_them=True)
                    self._settle()
                drained, self._drained = self._drained, []
                yield from self._deliver(drained)
                if self.stopped:
                    break
            yield from self._deliver(self.runtime.losses.arrived(all_of_them=True))
        except GeneratorExit:
            self.flush()
            raise
        finally:
            self._running = None
            self._feed = None
        if not self.stopped:
            agree_on(self.world, "number of batches", feed.end, "give every rank a loader of the same length")
        self._settle()

    def _compile_ahead(self, feed: Feed) -> None:
        """Before the first minibatch, for its sizes."""
        fields, self._compiled = None if self._compiled else feed.first_batch, True
        if fields is None:
            return
        sizes = {name: tensor.shape for name, tensor in fields.items()}
        for stage in self.runtime.stages.values():
            if stage.module.compiles:
                with self.world.exclusive:
                    compile_ahead(stage, fields, lambda value: self.layout.graph.shape(value, sizes))

    def flush(self) -> None:
        """Finish every minibatch that is under way on any rank; a `train` loop goes on afterwards."""
        if self._running is None or self._feed is None:
            return
        if self.schedule.synchronous:  # nothing is under way but checks of the last updates
            self.runtime.updates.catch_up()
            return
        running, self._running = self._running, None  # if it fails in here, it is not tried again
        interval = self._feed.interval
        self._feed.limit = -(-self._most_admitted(self._feed) // interval) * interval
        self._drained += self._losses(running)
        self._drained += self.runtime.losses.arrived(all_of_them=True)
        self._settle()

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The mean loss over the batches; the pipeline is empty."""
        feed = self._open_feed(batches, 0)
        for program in self._programs(feed):
            self.runtime.evaluate(program, feed)
        return self.mean_loss()

    def mean_loss(self) -> float:
        """Of what all ranks have evaluated."""
        losses, self.runtime.evaluated = self.runtime.evaluated, []
        sums = [sum(float(loss) * weight for loss, weight in losses), sum(weight for _, weight in losses)]
        # By the rendezvous, not by a channel: a rank that then closes its channels leaves nobody without an answer.
        parts = self.world.all_gather("evaluation", sums)
        total = sum(weight for _, weight in parts)
        if not total:
            raise VPipeError("evaluate was given no batch: there is no loss to report")
        return sum(loss for loss, _ in parts) / total

    def outputs(
        self, batches: Iterable[Any], receiver: Callable[[int], int]
    ) -> Iterator[tuple[Any, bool, Any]]:
        """Each batch, whether this rank receives its output, and the output there; the pipeline is empty.

        `receiver` gives the rank for a minibatch's place. Minibatches are run a few at a time, so that no more outputs
        than those are held.
        """
        read: dict[int, Any] = {}
        feed = self._open_feed(remembering(batches, read), 0)
        length, interval = self.schedule.minibatches, self.schedule.update_interval
        count = length or -(-2 * self.schedule.num_ranks // interval) * interval
        for program in self._programs(feed):
            first = feed.offset
            if length is None:
                feed.limit = first + count
            kept: dict[tuple[int, str], Tensor] = {}
            self.runtime.kept = kept
            try:
                self.runtime.evaluate(program, feed)
            finally:
                self.runtime.kept = None
            for number in range(first, min(first + count, feed.end)):
                batch, place = read.pop(number), number - first
                here, output = self._exchange.output(kept, number, place, batch, receiver(place))
                yield batch, here, output
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """Before a rank may close its channels: it would take with it what is still under way."""
        self.world.all_gather("settled", None)

    def _open_feed(self, batches: Iterable[Any], updates: int) -> Feed:
        interval = self.schedule.update_interval
        return Feed(
            batches,
            self.layout.normalise,
            self.loss_weight,
            interval,
            start=updates * interval,
            # A replica does not keep the minibatches of the other replicas.
            wanted=lambda place: bool(self.runtime.routes.stages_passed(place)),
            read_fields={name for stage in self.runtime.stages.values() for name in stage.graph.fields},
            device=self.handler.device,
        )

    def _programs(self, feed: Feed, async_after: int = 0) -> Iterator[Iterator[Action]]:
        """The programs that use up the data; each starts from the minibatch `feed.offset`.

        A schedule of a given length is run again and again: a synchronous one for each update. One without
        an end is run once, unless it is drained before the data ends: then it starts again. The first
        `async_after` updates have a program each.
        """
        length = self.schedule.minibatches
        if length is not None:
            while count := sum(self._admit(feed, place) for place in range(length)):
                yield self.layout.program(self.rank, count)
                feed.offset += length
                feed.limit = None  # a flush ended this round, not the data
                if not self.schedule.synchronous:
                    self._most_admitted(feed)  # so that `flush` finds every rank in the same round
            return
        while self._admit(feed, 0):
            if feed.offset < async_after * feed.interval:
                feed.limit = feed.offset + feed.interval
            yield self.schedule.program(self.rank, lambda place: self._admit(feed, place))
            if feed.limit is None:
                return
            feed.offset, feed.limit = feed.limit, None

    def _admit(self, feed: Feed, place: int) -> bool:
        """Read the data up to this place of the program, and admit the minibatch if there is one.

        Nothing is read ahead: what was read of the data when a loop is left has been trained on.
        """
        number = feed.offset + place
        if feed.limit is None or number < feed.limit:
            with self.world.exclusive:  # samples may draw random numbers
                feed.read_until(number)
        return feed.admit(number)

    def _most_admitted(self, feed: Feed) -> int:
        """The number of minibatches that any rank has begun."""
        self._countings += 1
        admitted = self.handler.all_gather("admitted", self._countings, [feed.admitted])
        return int(max(count for (count,) in admitted))

    def _losses(self, running: Iterator[Work]) -> Iterator[Arrived]:
        """Run the program; with each update that this rank makes, the losses that are there by then."""
        for work in running:
            if work.action.op is Op.STEP and self.runtime.completes_update:
                self.updates = work.minibatch.update + 1
                yield from self.runtime.losses.arrived()

    def _deliver(self, arrived: Iterable[Arrived]) -> Iterator[tuple[int, float]]:
        """Give each update to the hooks and to the user; a stop that came with it drains the pipeline."""
        for update, loss, requested in arrived:
            self.requested = requested
            self._requests.arrived(requested)
            for hook in self.update_hooks:
                hook(update, loss)
            yield update, loss
            if requested & STOP and not self.stopped:
                self.stopped = True
                self.flush()

    def _settle(self) -> None:
        """The pipeline is empty: apply the updates of tied parameters that are still due; nothing may be left over."""
        self.runtime.updates.catch_up()
        self.runtime.recording.read_clock(wait=True)
        leftovers = self.runtime.leftovers()
        assert not leftovers, f"rank {self.rank} has leftovers: " + "; ".join(leftovers)
        # A rank that goes on may send at once, and that would look like a leftover to the others.
        self.wait_for_all()
