"""The interpreter of a rank's program: one method for each operation, and no knowledge of any schedule."""

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter

from torch import Tensor

from vpipe.communication import CommunicationHandler
from vpipe.graph import edges
from vpipe.record.events import NO_VERSION
from vpipe.record.whereabouts import whereabouts
from vpipe.runtime.faulty import with_faults
from vpipe.runtime.feed import Feed
from vpipe.runtime.gradients import GradientExchange
from vpipe.runtime.look_ahead import BACKWARDS, LookAhead
from vpipe.runtime.losses import Losses
from vpipe.runtime.not_compiled import explain_compiler
from vpipe.runtime.out_of_memory import MEMORY_ERRORS, explain
from vpipe.runtime.recording import Done, Recording
from vpipe.runtime.routes import Link, Route, Routes
from vpipe.runtime.updates import Updates
from vpipe.schedule import Action, Op
from vpipe.stage.held import Held
from vpipe.stage.stage import Stage

Method = Callable[[Stage, int], None]


class StageRuntime:
    """Runs the actions of one rank. Minibatches are numbered from the beginning of the run.

    `routes` say where each stage sits; the program itself is given to `run`, with the data.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        routes: Routes,
        handler: CommunicationHandler,
        exchange: GradientExchange,
        updates: Updates,
        losses: Losses,
    ) -> None:
        self.stages = stages
        self.routes = routes
        self.handler = handler
        self.exchange = exchange
        self.updates = updates
        self.losses = losses
        self.rank = handler.rank
        self.num_ranks = routes.schedule.num_ranks
        self.num_stages = routes.schedule.num_stages
        self.forward_minibatch_id = 0
        self.backward_minibatch_id = 0
        self.offset = 0  # the minibatch that the program under way counts from
        self.steps = 0  # STEP actions of all stages
        self.forward_only = False
        self.recording = Recording(self.rank, edges(routes.stage_graphs), handler.device)
        self.events = self.recording.events
        self.forward_stats = self.recording.forward
        self.backward_stats = self.recording.backward
        self.update_stats = self.recording.update
        self.whereabouts = whereabouts(self.rank)
        self.evaluated: list[tuple[Tensor, float]] = []  # loss and weight of evaluated minibatches
        self.unsent: dict[tuple[int, int], dict[str, Tensor]] = {}  # (stage, minibatch) ▶ made, not sent
        self._look_ahead = LookAhead(handler, stages, routes)
        self._feed: Feed | None = None
        self._methods = with_faults(self, self._table())
        for name in routes.wire_names():
            handler.register_tensor(name)

    def _table(self) -> dict[Op, Method]:
        return {
            Op.RECV_F: self.receive_tensors_forward,
            Op.F: self.run_forward,
            Op.SEND_F: self.send_tensors_forward,
            Op.RECV_B: self.receive_tensors_backward,
            Op.B: self.run_backward,
            Op.I: self.run_input_backward,
            Op.W: self.run_weight_backward,
            Op.SEND_B: self.send_tensors_backward,
            Op.REDUCE: self.send_gradients,
            Op.STEP: self.step,
        }

    def run(self, program: Iterator[Action], feed: Feed) -> Iterator[Action]:
        """Run a program, yielding each action when it is done. Its minibatch 0 is the feed's `offset`."""
        self._feed, self.offset = feed, feed.offset
        self.recording.begin()
        current = None
        try:
            for current in self._look_ahead.actions(program, feed):
                self._execute(current)
                yield current
        except MEMORY_ERRORS as error:
            explained = explain(error, self.rank, current) or explain_compiler(error, self.rank, current)
            if explained is None:
                raise
            raise explained from error

    def wrap(self, op: Op, wrapper: Callable[[Method], Method]) -> None:
        """Put something around an operation: for those who look on, so that nothing is asked where nobody does."""
        self._methods[op] = wrapper(self._methods[op])

    def count_held(self) -> Held:
        """From now on count the bytes that autograd holds on this rank."""
        held = Held()
        for stage in self.stages.values():
            stage.held = held
        return held

    @property
    def completes_update(self) -> bool:
        """Whether the latest STEP was the last of this rank's stages'."""
        return self.steps % len(self.stages) == 0

    @property
    def waited(self) -> float:
        """Seconds in which this rank's device had nothing to do because a message had not come."""
        on_device = self.recording.waited_on_device
        return self.handler.waited if on_device is None else on_device

    def leftovers(self) -> list[str]:
        """What should not be there when a run is over."""
        found = [line for stage in self.stages.values() for line in stage.leftovers()]
        found += [f"stage {stage} did not send for minibatch {m}" for stage, m in self.unsent]
        found += self.feed.leftovers() if self._feed is not None else []
        return found + self.exchange.leftovers() + self.handler.leftovers()

    # Forward

    def receive_tensors_forward(self, stage: Stage, minibatch: int) -> None:
        for link in self._route(stage, minibatch).received:
            tensor = self._receive(link, stage, minibatch, backward=False)
            stage.hand_over(minibatch, link.value, tensor)

    def run_forward(self, stage: Stage, minibatch: int) -> None:
        self.forward_minibatch_id = minibatch
        fields = self.feed.fields(minibatch)
        with self.handler.world.exclusive:
            outputs = (stage.evaluate if self.forward_only else stage.forward)(minibatch, fields)
        if stage.graph.is_criterion:
            self._record_loss(minibatch, outputs.pop("loss"))
        route = self._route(stage, minibatch)
        for value, reader in route.passed_on:
            self.stages[reader].hand_over(minibatch, value, outputs[value])
        if route.sent:
            self.unsent[stage.index, minibatch] = outputs
        elif self.forward_only:
            self._end_evaluation(stage, minibatch)
        if not self.forward_only and stage.index == self._stages_passed(minibatch)[-1]:
            self.feed.forget_values(minibatch)
        self.forward_stats.actions += 1

    def send_tensors_forward(self, stage: Stage, minibatch: int) -> None:
        outputs = self.unsent.pop((stage.index, minibatch))
        for link in self._route(stage, minibatch).sent:
            self.handler.send(link.name, outputs[link.value], minibatch, link.rank)
        if self.forward_only:
            self._end_evaluation(stage, minibatch)

    # Backward

    def receive_tensors_backward(self, stage: Stage, minibatch: int) -> None:
        for link in self._route(stage, minibatch).returned:
            gradient = self._receive(link, stage, minibatch, backward=True)
            stage.gradient_arrived(minibatch, link.value, link.stage, gradient)
            self.handler.confirm(link.name, minibatch, link.rank)

    def run_backward(self, stage: Stage, minibatch: int) -> None:
        self.run_input_backward(stage, minibatch)
        self.run_weight_backward(stage, minibatch)

    def run_input_backward(self, stage: Stage, minibatch: int) -> None:
        self.backward_minibatch_id = minibatch
        seed = self.feed.share(minibatch) * self.updates.loss_scale.value
        with self.handler.world.exclusive:  # recomputation draws again what forward drew
            gradients = stage.backward(minibatch, seed)
        route = self._route(stage, minibatch)
        for value, producer in route.passed_in:
            if value in gradients:
                self.stages[producer].gradient_arrived(minibatch, value, stage.index, gradients[value])
        if route.received:
            self.unsent[stage.index, minibatch] = gradients
        if stage.index == self._stages_passed(minibatch)[0]:
            self.feed.drop(minibatch)
        self.backward_stats.actions += 1

    def run_weight_backward(self, stage: Stage, minibatch: int) -> None:
        stage.weight_gradients(minibatch)
        stage.finish(minibatch)
        self.handler.release((stage.index, minibatch))

    def send_tensors_backward(self, stage: Stage, minibatch: int) -> None:
        gradients = self.unsent.pop((stage.index, minibatch))
        for link in self._route(stage, minibatch).received:
            if link.value in gradients:
                self.handler.send(link.name, gradients[link.value], minibatch, link.rank, backward=True)

    # Update

    def send_gradients(self, stage: Stage, minibatch: int) -> None:
        self.exchange.send_parts(stage.index, minibatch // self.feed.interval)

    def step(self, stage: Stage, minibatch: int) -> None:
        update = minibatch // self.feed.interval
        if stage.graph.is_criterion:
            self.losses.post(update)
        self.updates.step(stage.index, update)
        self.steps += 1
        self.update_stats.actions += 1
        if self.completes_update:
            self.losses.ask(update)

    # Within

    @property
    def feed(self) -> Feed:
        assert self._feed is not None, "an action runs only inside `run`"
        return self._feed

    def _execute(self, action: Action) -> None:
        handler, stage = self.handler, self.stages[action.stage]
        waited, sent, received = handler.waited, handler.bytes_sent, handler.bytes_received
        start = perf_counter()
        self.whereabouts.enter(action, start)
        if self._look_ahead.swaps and action.op in BACKWARDS:
            self._look_ahead.fetch_next()
        self._methods[action.op](stage, action.minibatch)
        done = Done(
            action,
            handler.bytes_sent - sent,
            handler.bytes_received - received,
            _version(stage, action.op),
            self.forward_only,
        )
        self.recording.done(done, start, handler.waited - waited)

    def _receive(self, link: Link, stage: Stage, minibatch: int, *, backward: bool) -> Tensor:
        shape = self.routes.shape(link, self.feed.shapes(minibatch))
        owner = (stage.index, minibatch)
        return self.handler.recv(
            link.name, minibatch, link.rank, shape, link.dtype, owner=owner, backward=backward
        )

    def _route(self, stage: Stage, minibatch: int) -> Route:
        return self.routes.route(stage.index, minibatch - self.offset)

    def _stages_passed(self, minibatch: int) -> list[int]:
        return self.routes.stages_passed(minibatch - self.offset)

    def _record_loss(self, minibatch: int, loss: Tensor) -> None:
        if self.forward_only:
            self.evaluated.append((loss, self.feed.weight(minibatch)))
            return
        update = minibatch // self.feed.interval
        members = range(update * self.feed.interval, min((update + 1) * self.feed.interval, self.feed.end))
        own = sum(self.routes.is_here(self.num_stages - 1, m - self.offset) for m in members)
        self.losses.record(update, minibatch, loss, self.feed.share(minibatch), own)

    def _end_evaluation(self, stage: Stage, minibatch: int) -> None:
        """Once the last of this rank's stages has used a minibatch, nothing received for it is read."""
        passed = self._stages_passed(minibatch)
        if stage.index == passed[-1]:
            self.feed.drop(minibatch)
            for index in passed:
                self.handler.release((index, minibatch))


def _version(stage: Stage, op: Op) -> int:
    """The weight version that an action has just read, or made."""
    if op is Op.F or op is Op.B or op is Op.I:
        return stage.optimizer.current_version
    return stage.optimizer.latest_version if op is Op.STEP else NO_VERSION
