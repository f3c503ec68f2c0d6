"""The interpreter of a rank's program: one method for each operation, and no knowledge of any schedule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TypeVar

from torch import Tensor

from vpipe.communication import CommunicationHandler
from vpipe.graph import edges
from vpipe.record.events import NO_VERSION, Recorded
from vpipe.record.whereabouts import whereabouts
from vpipe.runtime.clocks import align_clocks
from vpipe.runtime.failures import EXPLAINED, explain
from vpipe.runtime.faulty import with_faults
from vpipe.runtime.feed import Feed, Minibatch
from vpipe.runtime.gradients import GradientExchange
from vpipe.runtime.identity import StageIdentity
from vpipe.runtime.losses import Losses
from vpipe.runtime.prefetch import BACKWARDS, Prefetch, Work
from vpipe.runtime.recording import Recording
from vpipe.runtime.routes import Link, Route, Routes
from vpipe.runtime.updates import Updates
from vpipe.schedule import Action, Op
from vpipe.stage.held import Held
from vpipe.stage.stage import Stage
from vpipe.system.faults import wanted

T = TypeVar("T")
Method = Callable[[Stage, Minibatch], None]
ActionHook = Callable[[Work], Callable[[], object] | None]
"""Called before an action; what it returns is called after it."""


class StageRuntime(StageIdentity):
    """Runs the actions of one rank.

    `routes` say where each stage sits; the program itself is given to `run`, with the data. Training and evaluation
    are two tables from operation to method.
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
        self.forward_minibatch_id = 0
        self.backward_minibatch_id = 0
        self.forward_only = False  # while it evaluates
        self.forwards = 0  # F actions of all stages
        self.steps = 0  # STEP actions of all stages
        self.recording = Recording(self.rank, edges(routes.stage_graphs), handler.device)
        self.events = self.recording.events
        self.forward_stats = self.recording.forward
        self.backward_stats = self.recording.backward
        self.update_stats = self.recording.update
        self.whereabouts = whereabouts(self.rank)
        self.evaluated: list[tuple[Tensor, float]] = []  # loss and weight of evaluated minibatches
        self.kept: dict[tuple[int, str], Tensor] | None = (
            None  # (minibatch, value) of outputs, if they are wanted
        )
        self.unsent: dict[tuple[int, int], dict[str, Tensor]] = {}  # (stage, minibatch) ▶ made, not sent
        self._prefetch = Prefetch(handler, stages, routes)
        self._feed: Feed | None = None
        self._hooks: dict[Op, list[ActionHook]] = {op: [] for op in Op}
        training: dict[Op, Method] = {
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
        evaluation: dict[Op, Method] = {
            Op.RECV_F: self.receive_tensors_forward,
            Op.F: self.evaluate_forward,
            Op.SEND_F: self.send_evaluated,
        }
        self._faulty = bool(wanted(self.rank))
        self._training = with_faults(self, training)
        self._evaluation = with_faults(self, evaluation, evaluation=True)
        for name, differentiable in routes.wire_names():
            handler.register_tensor(name, compressible=differentiable)

    def connect(self) -> None:
        """Connect the ranks that exchange tensors. Called once, by every rank."""
        pairs = self.routes.pairs() | self.exchange.pairs()
        self.handler.open(pairs, self.exchange.groups())

    def run(self, program: Iterator[Action], feed: Feed) -> Iterator[Work]:
        """Run a program, yielding each action when it is done. Its minibatch 0 is the feed's `offset`."""
        return self._run(self._prefetch.works(program, feed, evaluation=False), self._training, feed)

    def evaluate(self, program: Iterator[Action], feed: Feed) -> None:
        """Run the forwards of a program without training; the losses are added to `evaluated`."""
        forwards = (action for action in program if action.op in self._evaluation)
        self.forward_only = True
        for _ in self._run(self._prefetch.works(forwards, feed, evaluation=True), self._evaluation, feed):
            pass
        self.forward_only = False

    def _run(self, works: Iterator[Work], methods: Mapping[Op, Method], feed: Feed) -> Iterator[Work]:
        self._feed = feed
        self.recording.begin()
        action = None
        try:
            for work in works:
                action = work.action
                self._execute(work, methods)
                yield work
        except EXPLAINED as error:
            explained = explain(error, self.rank, action)
            if explained is None:
                raise
            raise explained from error

    def add_hook(self, hook: ActionHook, ops: Iterable[Op]) -> Callable[[], None]:
        """Call `hook` around each action of these operations; returns a function that removes it."""
        return add_hook_to([self._hooks[op] for op in ops], hook)

    def align_clocks(self) -> None:
        """Compare this rank's clock with rank 0's, so that the ranks' events can be merged. Call it on every rank."""
        self.events.clock = align_clocks(self.handler)

    def count_held(self) -> Held:
        """From now on count the bytes that autograd holds on this rank."""
        held = Held()
        for stage in self.stages.values():
            stage.held = held
        return held

    @property
    def offset(self) -> int:
        """The minibatch that the program under way counts from."""
        return 0 if self._feed is None else self._feed.offset

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

    def receive_tensors_forward(self, stage: Stage, minibatch: Minibatch) -> None:
        for link in self._route(stage, minibatch).received:
            tensor = self._receive(link, stage, minibatch, backward=False)
            stage.hand_over(minibatch.number, link.value, tensor)

    def run_forward(self, stage: Stage, minibatch: Minibatch) -> None:
        self.forward_minibatch_id = minibatch.number
        self.losses.begin(minibatch.update)
        fields = self.feed.fields(minibatch)
        with self.handler.world.exclusive:
            outputs = stage.forward(minibatch.number, fields, self.updates.delay(stage, minibatch.update))
        if stage.graph.is_criterion:
            members = self.feed.members(minibatch.update)
            own = sum(self.routes.is_here(stage.index, member.place) for member in members)
            loss, share = outputs.pop("loss"), self.feed.share(minibatch)
            self.losses.record(minibatch.update, minibatch.number, loss, share, own)
        self._hand_on(stage, minibatch, outputs)
        if stage.index == self._stages_passed(minibatch)[-1]:
            self.feed.forget_values(minibatch)
        self.forwards += 1

    def send_tensors_forward(self, stage: Stage, minibatch: Minibatch) -> None:
        outputs = self.unsent.pop((stage.index, minibatch.number))
        for link in self._route(stage, minibatch).sent:
            self.handler.send(link.name, outputs[link.value], minibatch.number, link.rank)

    # Backward

    def receive_tensors_backward(self, stage: Stage, minibatch: Minibatch) -> None:
        for link in self._route(stage, minibatch).returned:
            gradient = self._receive(link, stage, minibatch, backward=True)
            stage.gradient_arrived(minibatch.number, link.value, link.stage, gradient)
            self.handler.confirm(link.name, minibatch.number, link.rank)

    def run_backward(self, stage: Stage, minibatch: Minibatch) -> None:
        self._announce_gradients(stage, minibatch)
        self.run_input_backward(stage, minibatch)
        self.run_weight_backward(stage, minibatch)

    def run_input_backward(self, stage: Stage, minibatch: Minibatch) -> None:
        number = self.backward_minibatch_id = minibatch.number
        seed = self.feed.share(minibatch) * self.updates.loss_scale.value
        with self.handler.world.exclusive:  # recomputation draws the same random numbers as forward
            gradients = stage.backward(number, seed)
        route = self._route(stage, minibatch)
        for value, producer in route.passed_in:
            if value in gradients:
                self.stages[producer].gradient_arrived(number, value, stage.index, gradients[value])
        if route.received:
            self.unsent[stage.index, number] = gradients
        if stage.index == self._stages_passed(minibatch)[0]:
            self.feed.drop(minibatch)

    def run_weight_backward(self, stage: Stage, minibatch: Minibatch) -> None:
        if stage.gradients_ready is None:
            self._announce_gradients(stage, minibatch)
        stage.weight_gradients(minibatch.number)
        stage.gradients_ready = None
        stage.finish(minibatch.number)
        self.handler.release((stage.index, minibatch.number))

    def _announce_gradients(self, stage: Stage, minibatch: Minibatch) -> None:
        """Before the last part of a backward: if it is the update's last one, gradients can be summed as it goes."""
        if self._prefetch.reduces_next(stage.index) and not self._faulty:
            self.exchange.await_gradients(stage.index, minibatch.update)

    def send_tensors_backward(self, stage: Stage, minibatch: Minibatch) -> None:
        gradients = self.unsent.pop((stage.index, minibatch.number))
        for link in self._route(stage, minibatch).received:
            if link.value in gradients:
                gradient = gradients[link.value]
                self.handler.send(link.name, gradient, minibatch.number, link.rank, backward=True)

    # Update

    def send_gradients(self, stage: Stage, minibatch: Minibatch) -> None:
        self.exchange.send_parts(stage.index, minibatch.update)

    def step(self, stage: Stage, minibatch: Minibatch) -> None:
        if stage.graph.is_criterion:
            self.losses.post(minibatch.update)
        self.updates.step(stage.index, minibatch.update)
        self.steps += 1
        if self.completes_update:
            self.losses.expect(minibatch.update)

    # Evaluation

    def evaluate_forward(self, stage: Stage, minibatch: Minibatch) -> None:
        fields = self.feed.fields(minibatch)
        with self.handler.world.exclusive:
            outputs = stage.evaluate(minibatch.number, fields, keep_output=self.kept is not None)
        if self.kept is not None:
            self.kept |= {(minibatch.number, name): tensor for name, tensor in outputs.items()}
        if stage.graph.is_criterion:
            self.evaluated.append((outputs.pop("loss"), self.feed.weight(minibatch)))
        self._hand_on(stage, minibatch, outputs)
        if not self._route(stage, minibatch).sent:
            self._end_evaluation(stage, minibatch)

    def send_evaluated(self, stage: Stage, minibatch: Minibatch) -> None:
        self.send_tensors_forward(stage, minibatch)
        self._end_evaluation(stage, minibatch)

    def _end_evaluation(self, stage: Stage, minibatch: Minibatch) -> None:
        """Once the last of this rank's stages has used a minibatch, nothing received for it is read."""
        passed = self._stages_passed(minibatch)
        if stage.index == passed[-1]:
            self.feed.drop(minibatch)
            for index in passed:
                self.handler.release((index, minibatch.number))

    # Within

    @property
    def feed(self) -> Feed:
        assert self._feed is not None, "an action runs only inside `run`"
        return self._feed

    def _execute(self, work: Work, methods: Mapping[Op, Method]) -> None:
        handler, (action, stage, minibatch, evaluation) = self.handler, work
        waited, sent, received = handler.waited, handler.bytes_sent, handler.bytes_received
        start = perf_counter()
        self.whereabouts.enter(action, start)
        if self._prefetch.swaps and action.op in BACKWARDS:
            self._prefetch.fetch_next()
        after = [hook(work) for hook in tuple(self._hooks[action.op])]
        methods[action.op](stage, minibatch)
        for finish in after:
            if finish is not None:
                finish()
        launched = Recorded(
            action,
            start,
            perf_counter(),
            handler.waited - waited,
            handler.bytes_sent - sent,
            handler.bytes_received - received,
            _version(stage, action.op),
            evaluation,
        )
        self.recording.add(launched)

    def _hand_on(self, stage: Stage, minibatch: Minibatch, outputs: dict[str, Tensor]) -> None:
        """A forward's outputs: to later stages of this rank at once, to those of other ranks with its SEND."""
        route = self._route(stage, minibatch)
        for value, reader in route.passed_on:
            self.stages[reader].hand_over(minibatch.number, value, outputs[value])
        if route.sent:
            self.unsent[stage.index, minibatch.number] = outputs

    def _receive(self, link: Link, stage: Stage, minibatch: Minibatch, *, backward: bool) -> Tensor:
        shape = self.routes.shape(link, self.feed.shapes(minibatch))
        owner = (stage.index, minibatch.number)
        return self.handler.recv(
            link.name, minibatch.number, link.rank, shape, link.dtype, owner=owner, backward=backward
        )

    def _route(self, stage: Stage, minibatch: Minibatch) -> Route:
        return self.routes.route(stage.index, minibatch.place)

    def _stages_passed(self, minibatch: Minibatch) -> list[int]:
        return self.routes.stages_passed(minibatch.place)


def add_hook_to(lists: Sequence[list[T]], hook: T) -> Callable[[], None]:
    """Add a hook to each list; returns a function that removes it."""
    for hooks in lists:
        hooks.append(hook)

    def remove() -> None:
        for hooks in lists:
            if hook in hooks:
                hooks.remove(hook)

    return remove


def _version(stage: Stage, op: Op) -> int:
    """The weight version that an action has just read, or made."""
    if op in (Op.F, Op.B, Op.I):
        return stage.optimizer.current_version
    return stage.optimizer.latest_version if op is Op.STEP else NO_VERSION
