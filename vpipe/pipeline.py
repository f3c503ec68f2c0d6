"""The pipeline: a model, cut into stages, trained by a schedule; what users hold in their hands."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vpipe import faults
from vpipe.assembly import assemble
from vpipe.communication import HOST, CommunicationHandler, ProcessWorld, World, agree, agree_on
from vpipe.device import choose_device
from vpipe.errors import VPipeError
from vpipe.layout import Layout, Options, make_layout
from vpipe.runtime import Feed, Fields, StageRuntime, count_samples
from vpipe.runtime.replica_buffers import equalise
from vpipe.runtime.stage import StageState
from vpipe.schedule import Action, Op, Schedule
from vpipe.weights import OptimizerFactory, SchedulerFactory


class Pipeline:
    """Trains `model` over the ranks of a torchrun job; every rank runs the same script.

    The loader that `train` is given yields minibatches like `example_batch`, the same on every rank. A
    synchronous schedule makes one update from `minibatches` of them, an asynchronous one from
    `update_interval` (1 for pipedream). `policies` say for each block of the model what becomes of its
    activations between forward and backward: "keep", "recompute" or "swap" (they wait in host memory);
    `recompute_ratio` says for each stage how large a share of its blocks, from its end, is recomputed.
    `on_nonfinite` says what a loss or a gradient that is not finite does: "stop" raises a NonFiniteError before
    the update, "skip" passes over the update; None: nobody looks. `compile` lets torch.compile compile the
    blocks: True, or the name of a backend other than inductor.
    """

    def __init__(
        self,
        model: nn.Module,
        example_batch: Any,
        *,
        optimizer: OptimizerFactory,
        stages: int | None = None,
        schedule: str | Schedule = "1f1b",
        minibatches: int | None = None,
        update_interval: int | None = None,
        chunks: int | None = None,
        replicas: Sequence[int] | None = None,
        partition: Sequence[int] | None = None,
        recompute_ratio: Sequence[float] | float = 0.0,
        policies: Sequence[str] | None = None,
        precision: str = "fp32",
        compile: bool | str = False,
        clip_norm: float | None = None,
        on_nonfinite: str | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        loss_weight: Callable[[Fields], float] = count_samples,
        lr_scheduler: SchedulerFactory | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        channel: str = "auto",
        timeout: float = 600.0,
        world: World | None = None,
    ) -> None:
        if on_nonfinite not in (None, "stop", "skip"):
            raise VPipeError(f"unknown on_nonfinite {on_nonfinite!r}: choose stop, skip or None")
        self.world = world or ProcessWorld(channel, timeout)
        self.device = agree(self.world, "device", lambda: choose_device(device, self.world.local_rank))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.loss_weight = loss_weight
        faults.point("init")
        options = Options(
            stages=stages,
            schedule=schedule,
            minibatches=minibatches,
            update_interval=update_interval,
            chunks=chunks,
            replicas=replicas,
            partition=partition,
            recompute_ratio=recompute_ratio,
            policies=policies,
            precision=precision,
        )

        def lay_out() -> Layout:
            with self.world.exclusive:
                return make_layout(model, example_batch, loss_fn, self.world.size, options)

        self.layout = agree(self.world, "layout", lay_out)
        for what, value, fix in self.layout.must_agree(model, seed, clip_norm):
            agree_on(self.world, what, value, fix)
        agree_on(self.world, "on_nonfinite", on_nonfinite, "give every rank the same arguments")
        self.handler = CommunicationHandler(self.world, self.layout.buffer, self.device)
        for name in ("admitted", "evaluation", "state"):
            self.handler.register_tensor(name)

        def build_stages() -> StageRuntime:
            with self.world.exclusive:
                return assemble(
                    self.layout,
                    model,
                    self.handler,
                    optimizer,
                    lr_scheduler,
                    clip_norm=clip_norm,
                    on_nonfinite=on_nonfinite,
                    compile="inductor" if compile is True else compile or None,
                    seed=seed,
                )

        try:
            self.runtime = agree(self.world, "stages", build_stages)
            self.handler.open()
        except BaseException:
            self.close()
            raise
        self.rank = self.world.rank
        self.updates = 0
        self._feed: Feed | None = None
        self._running: Iterator[Action] | None = None
        self._arrived: list[tuple[int, float]] = []  # losses that came while draining
        self._evaluations = 0
        self._gathers = 0

    @property
    def schedule(self) -> Schedule:
        return self.layout.schedule

    @property
    def learning_rate(self) -> float:
        """The learning rate of this rank's next update; nan where it trains nothing."""
        rates = [stage.optimizer.learning_rate for stage in self.runtime.stages.values()]
        return next((rate for rate in rates if rate is not None), float("nan"))

    def train(self, batches: Iterable[Any]) -> Iterator[tuple[int, float]]:
        """Train on the batches, yielding (update, loss) in order, the same on every rank.

        A loss comes when this rank has made the update (on a GPU some updates later, so that nobody has to wait
        for it), so an asynchronous pipeline is then at work on later minibatches already. Leaving the loop early
        drains it: leave at the same update on every rank.
        """
        feed = self._feed = self._open_feed(batches, self.updates)
        self._check_data(feed)
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
        """Finish every minibatch that is under way on any rank. Call it on all ranks at the same update.

        Inside a `train` loop training goes on afterwards, with an empty pipeline.
        """
        if self._running is None or self._feed is None or self.schedule.synchronous:
            return
        running, self._running = self._running, None  # whoever fails in here need not try it again
        interval = self._feed.interval
        self._feed.limit = -(-self._gather_admitted(self._feed) // interval) * interval
        for action in running:
            if self._completes_update(action):
                self._arrived += self._made_update(action.minibatch)
        self._arrived += self._losses_to_come()
        self._settle()

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The mean loss over the batches, weighted by their sizes, on every rank; no dropout, no update."""
        self.flush()
        self._equalise_buffers()
        feed = self._open_feed(batches, 0)
        self.runtime.forward_only = True
        try:
            for program in self._programs(feed):
                forward = (a for a in program if a.op in (Op.RECV_F, Op.F, Op.SEND_F))
                for _ in self.runtime.run(forward, feed):
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

    def state_dict(self) -> dict[str, Tensor]:
        """The newest weights and buffers of this rank's stages, under the model's own names."""
        self.flush()
        state: dict[str, Tensor] = {}
        for stage in self.runtime.stages.values():
            state |= stage.state()
        return state

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """The whole model's weights and buffers on rank 0; None elsewhere. Call it on every rank."""
        own = self.state_dict()
        self._equalise_buffers()
        gathered: dict[str, Tensor] = {}
        self._gathers += 1
        for number, (name, owner, shape, dtype) in enumerate(self.layout.state_entries()):
            key = self._gathers << 20 | number
            if owner == self.rank == 0:
                gathered[name] = own[name].to("cpu", dtype, copy=True)
            elif owner == self.rank:
                self.handler.send("state", own[name].to("cpu", dtype), key, 0)
            elif self.rank == 0:
                received = self.handler.recv("state", key, owner, shape, dtype, owner=name, device=HOST)
                gathered[name] = received.clone()
                self.handler.release(name)
        self._wait_for_all()  # whoever closes now would take with it what is still under way
        return gathered if self.rank == 0 else None

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set the weights and buffers of this rank's stages; names of other stages are passed over."""
        self.flush()
        for stage in self.runtime.stages.values():
            stage.load_state(state)

    def training_state(self) -> tuple[dict[int, StageState], dict[str, Any]]:
        """What resuming needs: of each stage that this rank answers for, and plain values equal on all ranks.

        Names do not depend on the partition. What several stages hold is told by the first of them, and a
        stage by the first of its replicas. An asynchronous pipeline is drained: call it on every rank.
        """
        self.flush()
        self._equalise_buffers()
        told: set[str] = set()
        stages: dict[int, StageState] = {}
        for graph in self.layout.stage_graphs:
            if self.schedule.placement[graph.index][0] == self.rank:
                stages[graph.index] = self.runtime.stages[graph.index].training_state(told)
            told.update(graph.parameters, graph.buffers)
        return stages, {"updates": self.updates, **self.runtime.updates.state()}

    def load_training_state(self, state: StageState, plain: Mapping[str, Any]) -> None:
        """Go on from the training state of all stages, of which the tensors of this rank's will do."""
        if self._feed is not None:
            raise VPipeError("a training state cannot be loaded inside a `train` loop: leave the loop first")
        for stage in self.runtime.stages.values():
            stage.load_training_state(state)
        self.runtime.updates.load_state(plain, plain["updates"])
        self.updates = plain["updates"]

    def close(self) -> None:
        """Free channels and connections. The pipeline cannot be used afterwards."""
        faults.point("shutdown")
        self.handler.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def _place(self, fields: Fields) -> Fields:
        """What this rank's stages read of a batch, on its device."""
        if self.device.type == "cpu":
            return fields
        read = {name for stage in self.runtime.stages.values() for name in stage.graph.fields}
        return {name: _on_device(tensor, self.device) for name, tensor in fields.items() if name in read}

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
                if not self.schedule.synchronous:
                    self._gather_admitted(feed)  # so that `flush` finds every rank in the same round
            return
        while feed.exists(feed.offset):
            yield self.schedule.program(self.rank, lambda place: feed.exists(feed.offset + place))
            if feed.limit is None:
                return
            feed.offset, feed.limit = feed.limit, None

    def _gather_admitted(self, feed: Feed) -> int:
        """The number of minibatches that any rank has begun."""
        self._gathers += 1
        admitted = self.handler.all_gather("admitted", self._gathers, [feed.admitted])
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
        self._wait_for_all()

    def _equalise_buffers(self) -> None:
        """Replicas that saw different minibatches have different statistics: from here on the same."""
        self._gathers += 1
        stages = self.runtime.stages
        placement = self.schedule.placement
        equalise(self.handler, placement, self.layout.stage_graphs, stages, self._gathers << 20)

    def _wait_for_all(self) -> None:
        self.world.all_gather("settled", None)

    def _check_data(self, feed: Feed) -> None:
        """Every rank reads the data itself, so all must read the same."""
        agree(self.world, "first batch", lambda: feed.exists(feed.offset))
        digest = hashlib.sha256()
        for name, tensor in (feed.first_batch or {}).items():
            digest.update(name.encode() + str(tuple(tensor.shape)).encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        fix = "give every rank a loader that yields the same batches in the same order (seed its shuffling)"
        agree_on(self.world, "first batch", digest.hexdigest()[:16], fix)


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Behind what was issued, without waiting for it: the copy needs memory that stays in place."""
    return tensor.to(device) if tensor.is_cuda else tensor.pin_memory().to(device, non_blocking=True)
