"""The interpreter of a rank's program: one method for each operation, and no knowledge of any schedule."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import lcm
from time import perf_counter

import torch
from torch import Tensor

from vpipe.communication import CommunicationHandler
from vpipe.graph import ModelGraph, StageGraph
from vpipe.graph.held import Held
from vpipe.observe.events import NO_VERSION
from vpipe.observe.whereabouts import whereabouts
from vpipe.runtime.faulty import with_faults
from vpipe.runtime.feed import Feed
from vpipe.runtime.gradients import GradientExchange
from vpipe.runtime.losses import Losses
from vpipe.runtime.not_compiled import explain_compiler
from vpipe.runtime.out_of_memory import MEMORY_ERRORS, explain
from vpipe.runtime.recording import Done, Recording
from vpipe.runtime.stage import Stage
from vpipe.runtime.updates import Updates
from vpipe.schedule import Action, Op, Schedule

LOOK_AHEAD = 8
"""How many actions ahead of the current one receives are posted."""

Link = tuple[str, str, int, int]  # value, its name on the wire, the other stage, the other rank
Method = Callable[[Stage, int], None]


class StageRuntime:
    """Runs the actions of one rank. Minibatches are numbered from the beginning of the run.

    `schedule` says where each stage sits; the program itself is given to `run`, with the data.
    """

    def __init__(
        self,
        graph: ModelGraph,
        stage_graphs: Sequence[StageGraph],
        stages: Mapping[int, Stage],
        schedule: Schedule,
        handler: CommunicationHandler,
        exchange: GradientExchange,
        updates: Updates,
        losses: Losses,
    ) -> None:
        self.graph = graph
        self.stage_graphs = stage_graphs
        self.stages = stages
        self.schedule = schedule
        self.handler = handler
        self.exchange = exchange
        self.updates = updates
        self.losses = losses
        self.rank = handler.rank
        self.num_ranks = schedule.num_ranks
        self.num_stages = schedule.num_stages
        self.forward_minibatch_id = 0
        self.backward_minibatch_id = 0
        self.steps = 0  # STEP actions of all stages
        self.forward_only = False
        edges = (
            (s.index, reader) for s in stage_graphs for readers in s.writes.values() for reader in readers
        )
        self.recording = Recording(self.rank, edges, handler.device)
        self.events = self.recording.events
        self.forward_stats = self.recording.forward
        self.backward_stats = self.recording.backward
        self.update_stats = self.recording.update
        self.whereabouts = whereabouts(self.rank)
        self.evaluated: list[tuple[Tensor, float]] = []  # loss and weight of evaluated minibatches
        self.unsent: dict[tuple[int, int], dict[str, Tensor]] = {}  # (stage, minibatch) ▶ made, not sent
        self._period = lcm(*(len(ranks) for ranks in schedule.placement))
        self._known_links: dict[tuple[int, int], tuple[list[Link], list[Link]]] = {}
        self._known_running: dict[int, list[int]] = {}
        self._swaps = any(stage.module.swaps for stage in stages.values())
        self._feed: Feed | None = None
        methods: dict[Op, Method] = {
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
        self._methods = with_faults(self, methods)
        for producer in stage_graphs:
            for value, readers in producer.writes.items():
                for reader in readers:
                    handler.register_tensor(_wire_name(value, reader))

    def run(self, program: Iterator[Action], feed: Feed) -> Iterator[Action]:
        """Run a program, yielding each action when it is done. Its minibatch 0 is the feed's `offset`."""
        self._feed = feed
        self.recording.begin()
        ahead: deque[Action] = deque()
        current = None
        try:
            for relative in program:
                action = Action(relative.stage, relative.op, relative.minibatch + feed.offset)
                ahead.append(action)
                if self.handler.takes_expectations:
                    self._post_receives(action)
                if len(ahead) > LOOK_AHEAD:
                    current = ahead.popleft()
                    yield self._execute(current, ahead)
            while ahead:
                current = ahead.popleft()
                yield self._execute(current, ahead)
        except MEMORY_ERRORS as error:
            explained = explain(error, self.rank, current) or explain_compiler(error, self.rank, current)
            if explained is None:
                raise
            raise explained from error

    @property
    def offset(self) -> int:
        """The minibatch that the program under way counts from."""
        return 0 if self._feed is None else self._feed.offset

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
        return found + self.exchange.leftovers() + self.handler.leftovers()

    # Forward

    def receive_tensors_forward(self, stage: Stage, minibatch: int) -> None:
        for link in self._reads_from_afar(stage.index, minibatch):
            tensor = self._receive(link, stage, minibatch, backward=False)
            stage.hand_over(minibatch, link[0], tensor)
            self.forward_stats.bytes_received += tensor.nbytes

    def run_forward(self, stage: Stage, minibatch: int) -> None:
        self.forward_minibatch_id = minibatch
        fields = self.feed.fields(minibatch)
        with self.handler.world.exclusive:
            outputs = (stage.evaluate if self.forward_only else stage.forward)(minibatch, fields)
        if stage.graph.is_criterion:
            self._record_loss(minibatch, outputs.pop("loss"))
        for value, readers in stage.graph.writes.items():
            for reader in readers:
                if self._rank_of(reader, minibatch) == self.rank:
                    self.stages[reader].hand_over(minibatch, value, outputs[value])
        if self._writes_to_afar(stage.index, minibatch):
            self.unsent[stage.index, minibatch] = outputs
        elif self.forward_only:
            self._end_evaluation(stage, minibatch)
        if not self.forward_only and stage.index == self._stages_running(minibatch)[-1]:
            self.feed.forget_values(minibatch)
        self.forward_stats.actions += 1

    def send_tensors_forward(self, stage: Stage, minibatch: int) -> None:
        outputs = self.unsent.pop((stage.index, minibatch))
        for value, name, _, rank in self._writes_to_afar(stage.index, minibatch):
            self.handler.send(name, outputs[value], minibatch, rank)
            self.forward_stats.bytes_sent += outputs[value].nbytes
        if self.forward_only:
            self._end_evaluation(stage, minibatch)

    # Backward

    def receive_tensors_backward(self, stage: Stage, minibatch: int) -> None:
        for link in self._writes_to_afar(stage.index, minibatch):
            value, name, reader, rank = link
            if not self.stage_graphs[reader].needs_gradient(value):
                continue
            gradient = self._receive(link, stage, minibatch, backward=True)
            stage.gradient_arrived(minibatch, value, reader, gradient)
            self.handler.confirm(name, minibatch, rank)
            self.backward_stats.bytes_received += gradient.nbytes

    def run_backward(self, stage: Stage, minibatch: int) -> None:
        self.run_input_backward(stage, minibatch)
        self.run_weight_backward(stage, minibatch)

    def run_input_backward(self, stage: Stage, minibatch: int) -> None:
        self.backward_minibatch_id = minibatch
        seed = self.feed.share(minibatch) * self.updates.loss_scale.value
        with self.handler.world.exclusive:  # recomputation draws again what forward drew
            gradients = stage.backward(minibatch, seed)
        for value, gradient in gradients.items():
            producer = stage.graph.reads[value]
            if self._rank_of(producer, minibatch) == self.rank:
                self.stages[producer].gradient_arrived(minibatch, value, stage.index, gradient)
        if self._reads_from_afar(stage.index, minibatch):
            self.unsent[stage.index, minibatch] = gradients
        if stage.index == self._stages_running(minibatch)[0]:
            self.feed.drop(minibatch)
        self.backward_stats.actions += 1

    def run_weight_backward(self, stage: Stage, minibatch: int) -> None:
        stage.weight_gradients(minibatch)
        stage.finish(minibatch)
        self.handler.release((stage.index, minibatch))

    def send_tensors_backward(self, stage: Stage, minibatch: int) -> None:
        gradients = self.unsent.pop((stage.index, minibatch))
        for value, name, _, rank in self._reads_from_afar(stage.index, minibatch):
            if value in gradients:
                self.handler.send(name, gradients[value], minibatch, rank, backward=True)
                self.backward_stats.bytes_sent += gradients[value].nbytes

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

    def _rank_of(self, stage: int, minibatch: int) -> int:
        return self.schedule.rank_of(stage, minibatch - self.feed.offset)

    def _execute(self, action: Action, ahead: Iterable[Action]) -> Action:
        handler, stage = self.handler, self.stages[action.stage]
        waited, sent, received = handler.waited, handler.bytes_sent, handler.bytes_received
        start = perf_counter()
        self.whereabouts.enter(action, start)
        if self._swaps and action.op in (Op.B, Op.I):
            self._fetch_next(ahead)
        self._methods[action.op](stage, action.minibatch)
        done = Done(
            action,
            handler.bytes_sent - sent,
            handler.bytes_received - received,
            _version(stage, action.op),
            self.forward_only,
        )
        self.recording.done(done, start, handler.waited - waited)
        return action

    def _fetch_next(self, ahead: Iterable[Action]) -> None:
        """While one backward runs, what the next one reads is on its way."""
        coming = next((action for action in ahead if action.op in (Op.B, Op.I)), None)
        if coming is not None:
            self.stages[coming.stage].fetch(coming.minibatch)

    def _receive(self, link: Link, stage: Stage, minibatch: int, *, backward: bool) -> Tensor:
        value, name, _, rank = link
        shape, dtype = self._kind(value, minibatch)
        owner = (stage.index, minibatch)
        return self.handler.recv(name, minibatch, rank, shape, dtype, owner=owner, backward=backward)

    def _post_receives(self, action: Action) -> None:
        stage, op, minibatch = action
        if op is Op.RECV_F:
            for value, name, _, rank in self._reads_from_afar(stage, minibatch):
                self.handler.expect(name, minibatch, rank, *self._kind(value, minibatch))
        elif op is Op.RECV_B:
            for value, name, reader, rank in self._writes_to_afar(stage, minibatch):
                if self.stage_graphs[reader].needs_gradient(value):
                    self.handler.expect(name, minibatch, rank, *self._kind(value, minibatch), backward=True)

    def _kind(self, value: str, minibatch: int) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of a value, from the sizes of the raw batch: no header travels."""
        return self.graph.shape(value, self.feed.shapes(minibatch)), self.stage_graphs[0].value_dtype(value)

    def _reads_from_afar(self, stage: int, minibatch: int) -> list[Link]:
        return self._links(stage, minibatch)[0]

    def _writes_to_afar(self, stage: int, minibatch: int) -> list[Link]:
        return self._links(stage, minibatch)[1]

    def _links(self, stage: int, minibatch: int) -> tuple[list[Link], list[Link]]:
        """What a stage reads from and writes to other ranks; replicas take turns, so it repeats itself."""
        key = (stage, (minibatch - self.feed.offset) % self._period)
        if key not in self._known_links:
            graph = self.stage_graphs[stage]
            reads = [(value, producer, stage) for value, producer in graph.reads.items()]
            writes = [(value, r, r) for value, readers in graph.writes.items() for r in readers]
            here, there = (
                [
                    (v, _wire_name(v, reader), other, self._rank_of(other, minibatch))
                    for v, other, reader in ends
                ]
                for ends in (reads, writes)
            )
            self._known_links[key] = (
                [link for link in here if link[3] != self.rank],
                [link for link in there if link[3] != self.rank],
            )
        return self._known_links[key]

    def _stages_running(self, minibatch: int) -> list[int]:
        """The stages of this rank that this minibatch passes through, the first one first."""
        key = (minibatch - self.feed.offset) % self._period
        if key not in self._known_running:
            running = sorted(s for s in self.stages if self._rank_of(s, minibatch) == self.rank)
            self._known_running[key] = running
        return self._known_running[key]

    def _record_loss(self, minibatch: int, loss: Tensor) -> None:
        if self.forward_only:
            self.evaluated.append((loss, self.feed.weight(minibatch)))
            return
        update = minibatch // self.feed.interval
        members = range(update * self.feed.interval, min((update + 1) * self.feed.interval, self.feed.end))
        own = sum(self._rank_of(self.num_stages - 1, m) == self.rank for m in members)
        self.losses.record(update, minibatch, loss, self.feed.share(minibatch), own)

    def _end_evaluation(self, stage: Stage, minibatch: int) -> None:
        """Once the last of this rank's stages has used a minibatch, nothing received for it is read."""
        running = self._stages_running(minibatch)
        if stage.index == running[-1]:
            self.feed.drop(minibatch)
            for index in running:
                self.handler.release((index, minibatch))


def _version(stage: Stage, op: Op) -> int:
    """The weight version that an action has just read, or made."""
    if op is Op.F or op is Op.B or op is Op.I:
        return stage.optimizer.current_version
    return stage.optimizer.latest_version if op is Op.STEP else NO_VERSION


def _wire_name(value: str, reader: int) -> str:
    return f"{value} for stage {reader}"
