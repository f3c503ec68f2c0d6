"""The pipeline: a model, cut into stages, trained by a schedule; what users hold in their hands."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from vpipe.communication import CommunicationHandler, ProcessWorld, World, agree, agree_on
from vpipe.communication.compression import LinkCompression, read_compression
from vpipe.communication.devices import take_device
from vpipe.errors import VPipeError
from vpipe.pipeline.agreement import agree_on_run, weights_differ
from vpipe.pipeline.assembly import TrainingOptions, assemble
from vpipe.pipeline.hooks import warn_about_hooks, warn_about_lengths
from vpipe.pipeline.layout import LayoutOptions, make_layout
from vpipe.pipeline.loop import Loop, UpdateHook
from vpipe.pipeline.loss_weight import LossWeight, loss_weigher
from vpipe.pipeline.outputs import Metrics, MetricSums
from vpipe.pipeline.requests import SAVE, STOP, Requests
from vpipe.pipeline.state import WholeState
from vpipe.runtime.failures import EXPLAINED, explain
from vpipe.runtime.stage_runtime import ActionHook, add_hook_to
from vpipe.schedule import Op, Schedule
from vpipe.schedule.staleness import Remedy, Staleness, read_staleness
from vpipe.stage.stage import StageState
from vpipe.system import faults
from vpipe.system.start import Phases
from vpipe.weights import Changes, OptimizerFactory, SchedulerFactory, name_of

T = TypeVar("T")


class Given(NamedTuple):
    """The arguments that a pipeline was made from."""

    model: nn.Module | None
    example_batch: Any
    loss_fn: Callable[..., Tensor] | None
    loss_weight: str | LossWeight
    layout: LayoutOptions
    training: TrainingOptions


class Pipeline:
    """A model cut into stages and trained by a schedule, over the ranks of a torchrun job.

    Every rank runs the same script and reads the same minibatches, but holds only its own stages:

        with vpipe.Pipeline(model, batch, optimizer=lambda params: torch.optim.AdamW(params, 1e-3)) as pipe:
            for update, loss in pipe.train(loader):
                ...

    Minibatches have the form of `example_batch`. Fields that `forward` does not take go to `loss_fn(output, *rest)`.

    Args:
        model: Any module that `torch.export` can capture. On the `meta` device each rank initialises only its blocks.
        example_batch: A minibatch: a dict (keys: parameters of `forward`), a sequence or one tensor.
        optimizer: A function from the parameters of a stage to an optimizer, or a list of them; called for each stage,
            and for each parameter that several stages share. `params.named()` gives (name, parameter) pairs, for
            groups as torch's optimizers take them; a group may be empty. `vpipe.optimizer_groups` makes such a function
            from patterns of names.
        stages: Positions of the pipeline; by default as many as there are ranks.
        schedule: The order of the work: a name such as "1f1b" or "pipedream", or a `Schedule`.
        minibatches: Minibatches of an update in a synchronous schedule; by default two for each position.
        update_interval: Minibatches of an update in an asynchronous schedule; 1 for "pipedream".
        depth: For each stage the forwards before its first pair of forward and backward, such as [6, 4, 2, 0]: more of
            them hide slow links, for more memory ("1f1b", "zb-h1", "pipedream", "vpipe", "2bw").
        chunks: Stages on each rank, for "interleaved".
        replicas: Ranks of each position, such as [2, 1].
        placement: The ranks of each position, such as [[0, 2], [1]]; by default numbered position by position.
        partition: Blocks of each stage (`vpipe blocks` lists them); by default stages of about equal work.
        recompute_ratio: The share of each stage's blocks, from its end, whose activations are recomputed.
        policies: For each block "keep", "recompute" or "swap": whether its activations are kept until the backward,
            recomputed, or wait in host memory.
        precision: "fp32", "bf16" or "fp16"; weights stay float32 for the optimizer.
        loss_scale: What the loss scale of fp16 begins with, 65536 by default: an overflow halves it, and 2000 updates
            without one double it.
        compile: True, or the name of a backend other than inductor: torch.compile compiles the blocks.
        cuda_graphs: On a GPU, record a stage's work for a minibatch as CUDA graphs. Small minibatches are then no
            longer as slow as their host (see docs/performance.md). "auto": where that gains, and none on a CPU.
        chunked_loss: Compute the head and the loss of a large vocabulary for some tokens at a time, so that the logits
            of a minibatch are never there as a whole.
        clip_norm: The largest norm of the gradients.
        on_nonfinite: Reaction to a loss or gradient that is not finite: "stop" raises a NonFiniteError before the
            update of a stage that has one, "skip" leaves the update out on every stage (asynchronous: on that stage);
            None: it is not checked. With "stop" and without `clip_norm` and fp16 no synchronous update waits for the
            gradients of other ranks.
        nonfinite_limit: With "skip": the error is raised when so many of the last so many updates were skipped.
        loss_fn: The loss from the model's output and the fields that `forward` does not take; without it the output
            has to contain the loss.
        loss_weight: What a minibatch counts in the loss of its update: "samples", their number; "tokens", the number of
            targets that its loss is a mean over, so that an update equals the plain model's over the whole batch,
            whatever labels are ignored (-100); or a function from the fields of a minibatch to a number. "auto":
            tokens, if the loss is such a mean, else labels that are not ignored, else samples.
        lr_scheduler: A function from an optimizer to its scheduler, which is stepped at each update; one that is driven
            by a metric (ReduceLROnPlateau) is stepped by `step_schedulers`.
        staleness: Remedies for the stale weights of an asynchronous schedule: "predict" lets forwards read the weights
            as they are expected to be when their gradients are applied; "split_tied" applies the last stage's part of a
            tied parameter's gradient at once and the other parts when they have come; {"async_after": 100} makes the
            first 100 updates one after the other, with an empty pipeline between them (see docs/convergence.md).
        seed: Seed of dropout, whose masks depend on it, the block and the minibatch alone, not on partition or
            schedule; and of the weights of a model on `meta`.
        initial_weights: "rank 0": where the ranks have built the model with different values, those of rank 0 count;
            "refuse": that is an error.
        device: "cpu" or "cuda:0"; by default a GPU for each rank, where there are any.
        channel: What carries tensors between ranks; by default chosen for each pair of them.
        compress: Of activations and their gradients between hosts: "bf16", "int8" or "int4", or one for each direction,
            such as {"forward": "int8", "backward": "bf16"}; "none": they are sent as they are. "replicas" in that
            mapping is for the gradients of replicas, and pairs of ranks such as (0, 2) are links that have a mode, or
            such a mapping, of their own (see docs/many_machines.md). Ranks that are threads compress all that they
            exchange.
        timeout: The most seconds that a rank waits for another.
        world: Ranks that are not processes of torchrun, such as the threads of `vpipe.run_ranks`.
        run_dir: A folder for what `vpipe train` writes about a run: events, trace, report, metrics, TensorBoard,
            memory, and `checkpoints/` for `save` and `resume`. `vpipe top`, `report` and `diagnose` read it. Report,
            trace and summary are written by `close`, or at the end of a `with` block.
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
        depth: Sequence[int] | None = None,
        placement: Sequence[Sequence[int]] | None = None,
        partition: Sequence[int] | None = None,
        recompute_ratio: Sequence[float] | float = 0.0,
        policies: Sequence[str] | None = None,
        precision: str = "fp32",
        compile: bool | str = False,
        cuda_graphs: bool | str = False,
        chunked_loss: bool = True,
        clip_norm: float | None = None,
        on_nonfinite: str | None = None,
        nonfinite_limit: tuple[int, int] = (10, 100),
        staleness: Iterable[Remedy] | Staleness = (),
        loss_scale: float | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        loss_weight: str | LossWeight = "samples",
        lr_scheduler: SchedulerFactory | None = None,
        seed: int = 0,
        initial_weights: str = "rank 0",
        device: str | torch.device | None = None,
        channel: str = "auto",
        compress: str | Mapping[Any, Any] | LinkCompression = "none",
        timeout: float = 600.0,
        world: World | None = None,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.run_dir = None if run_dir is None else Path(run_dir)
        layout_options = LayoutOptions(
            stages=stages,
            schedule=schedule,
            minibatches=minibatches,
            update_interval=update_interval,
            chunks=chunks,
            replicas=replicas,
            depth=depth,
            placement=placement,
            partition=partition,
            recompute_ratio=recompute_ratio,
            policies=policies,
            precision=precision,
            chunked_loss=chunked_loss,
            compiled=bool(compile),
        )
        training_options = TrainingOptions(
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            compile=compile,
            cuda_graphs=cuda_graphs,
            clip_norm=clip_norm,
            on_nonfinite=on_nonfinite,
            nonfinite_limit=nonfinite_limit,
            staleness=read_staleness(staleness),
            loss_scale=loss_scale,
            compress=read_compression(compress),
            seed=seed,
        )
        self.phases = Phases("rendezvous")
        self.world = world or ProcessWorld(channel, timeout)
        self.rank = self.world.rank
        self.device = self._take_device(device)
        faults.point("init")
        self.phases.begin("capture")
        self.layout = self._in_turn(
            "layout",
            lambda: make_layout(model, example_batch, loss_fn, self.world, layout_options, self.device),
        )
        self.phases.begin("build")
        agree_on_run(self.world, self.layout, model, training_options)
        weigh = loss_weigher(loss_weight, self.layout.graph)
        differ = weights_differ(self.world, model, initial_weights)
        if self.rank == 0:
            warn_about_hooks(model, self.layout.graph)
            warn_about_lengths(self.layout.graph)
        self.handler = CommunicationHandler(
            self.world, self.layout.buffer, self.device, training_options.compress
        )
        try:
            self._requests = Requests(self.world, self.schedule.placement[-1])
            self.runtime = self._in_turn(
                "stages",
                lambda: assemble(self.layout, model, self.handler, training_options, self._requests.take),
            )
            self._loop = Loop(
                self.layout,
                self.runtime,
                weigh,
                self._requests,
                training_options.staleness.async_after,
            )
            self._whole = WholeState(self.layout, self.runtime, model, seed)
            self.runtime.connect()
            if differ:
                self._whole.take_from_first(model, seed)
                self._loop.wait_for_all()
            self.phases.end()
            self._opened(Given(model, example_batch, loss_fn, loss_weight, layout_options, training_options))
        except BaseException:
            self.close()
            raise

    def _opened(self, given: Given) -> None:
        """The pipeline can be used; for classes that add to it."""

    @property
    def schedule(self) -> Schedule:
        """The schedule, with its programs."""
        return self.layout.schedule

    @property
    def updates(self) -> int:
        """How many updates this rank has made."""
        return self._loop.updates

    @property
    def learning_rate(self) -> float:
        """The learning rate of this rank's next update; nan where it trains nothing."""
        rates = [stage.optimizer.learning_rate for stage in self.runtime.stages.values()]
        return next((rate for rate in rates if rate is not None), float("nan"))

    @property
    def optimizer_name(self) -> str:
        """The kind of this rank's optimizers, such as adamw or muon, also if they are a user's own."""
        return name_of(one for stage in self.runtime.stages.values() for one in stage.optimizer.optimizers)

    def train(self, batches: Iterable[Any]) -> Iterator[tuple[int, float]]:
        """Train on the batches, yielding (update, loss) in order, the same on every rank.

        A loss comes when this rank has made the update (on a GPU some updates later, so that nobody has to wait
        for it), so an asynchronous pipeline is then at work on later minibatches already. Leaving the loop early
        drains it: leave at the same update on every rank.

        Args:
            batches: The minibatches, the same on every rank.
        """
        self._check_trains()
        return self._loop.train(batches)

    def on_action(self, hook: ActionHook, ops: Iterable[Op | str] = Op) -> Callable[[], None]:
        """Call `hook(work)` before each action of this rank; what it returns, if anything, is called after the action.

        The time that a hook takes counts as the action's.

        Args:
            hook: Its argument has the action (it prints as `2F0`: stage 2, forward, minibatch 0), the stage, the
                minibatch and whether it belongs to an evaluation.
            ops: Some operations only, such as ("F", "B", "STEP").

        Returns:
            A function that removes the hook.
        """
        return self.runtime.add_hook(hook, [Op(op) for op in ops])

    def on_update(self, hook: UpdateHook) -> Callable[[], None]:
        """Call `hook(update, loss)` for each update, in order, before `train` yields it.

        Args:
            hook: The function.

        Returns:
            A function that removes the hook.
        """
        return add_hook_to([self._loop.update_hooks], hook)

    def on_warning(self, hook: Callable[[str], object]) -> None:
        """Call `hook(text)` instead of `warnings.warn`, for updates that are skipped because of `on_nonfinite`.

        Args:
            hook: The function.
        """
        self.runtime.updates.warn = hook

    def request_save(self) -> None:
        """Ask all ranks to save at the same update: `save_requested` is true there.

        From any thread of any rank; like a stop, it travels with the losses.
        """
        self._requests.make(SAVE)

    def request_stop(self) -> None:
        """Ask all ranks to end `train` after the same update: the loop ends, drained; `stop_requested` is true."""
        self._requests.make(STOP)

    @property
    def save_requested(self) -> bool:
        """Whether a save was requested with the update that `train` has yielded last; the same on every rank."""
        return bool(self._loop.requested & SAVE)

    @property
    def stop_requested(self) -> bool:
        """Whether the latest `train` ends, or has ended, because a rank requested it."""
        return self._loop.stopped or bool(self._loop.requested & STOP)

    def step_schedulers(self, metric: float) -> None:
        """Step the schedulers that wait for a metric (ReduceLROnPlateau), with the same value on every rank.

            pipe.step_schedulers(pipe.evaluate(validation))

        Other schedulers are stepped at each update.

        Args:
            metric: The value, such as a loss.
        """
        self.flush()
        agree_on(self.world, "metric for the schedulers", float(metric), "give what pipe.evaluate returns")
        stepped = [stage.optimizer.step_by_metric(float(metric)) for stage in self.runtime.stages.values()]
        if not any(self.world.all_gather("schedulers", any(stepped))):
            raise VPipeError(
                "no lr_scheduler waits for a metric: use ReduceLROnPlateau, or leave step_schedulers out"
            )

    def _check_trains(self) -> None:
        graph = self.layout.graph
        held = {name for stage in self.layout.stage_graphs for name in stage.parameters}
        trained = [name for name in held if graph.parameters[name].requires_grad]
        if not trained:
            raise VPipeError(
                f"there is nothing to train: none of the {len(held)} parameters that the loss depends on requires a "
                "gradient: call requires_grad_(True) on some, or only evaluate"
            )
        if graph.trace.loss not in graph.ownership.differentiable:
            raise VPipeError(
                f"there is nothing to train: the loss has no gradient for {sorted(trained)[0]!r} and the other "
                "parameters: look for torch.no_grad or detach in the model or in loss_fn"
            )

    def flush(self) -> None:
        """Finish every minibatch that is under way on any rank. Call it on all ranks at the same update.

        Inside a `train` loop training goes on afterwards, with an empty pipeline.
        """
        self._loop.flush()

    @overload
    def evaluate(self, batches: Iterable[Any], metrics: None = None) -> float: ...

    @overload
    def evaluate(self, batches: Iterable[Any], metrics: Metrics) -> dict[str, float]: ...

    def evaluate(self, batches: Iterable[Any], metrics: Metrics | None = None) -> float | dict[str, float]:
        """The mean loss over the batches, weighted by their sizes, on every rank; no dropout, no update.

        Args:
            batches: The minibatches, the same on every rank.
            metrics: `metrics(output, batch)` is called for each minibatch, on the rank that computes its loss, with the
                model's output on the host, and returns numbers by name. A number is averaged with the minibatches'
                weights (`loss_weight`); a pair (sum, count) becomes the ratio of their totals.

        Returns:
            The loss; with `metrics` a dict of the `loss` and what they find.
        """
        self.flush()
        self._whole.equalise_buffers()
        if metrics is None:
            return self._loop.evaluate(batches)
        sums, last = MetricSums(metrics), self.schedule.num_stages - 1
        weigh = self._loop.loss_weight
        for batch, here, output in self._loop.outputs(
            batches, lambda place: self.schedule.rank_of(last, place)
        ):
            if here:
                sums.add(output, batch, weigh(self.layout.normalise(batch)))
        return {"loss": self._loop.mean_loss(), **sums.gather(self.world)}

    def predict(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The model's output for each batch, in order: on rank 0, on the host; None on the other ranks.

        Every rank iterates over it to the end. Only the outputs of a few minibatches are held at a time. The batches
        have all fields that training has; what the model returns without needing it for the loss is computed too,
        unless that takes parameters that the loss does not depend on: it is None then.

            for output in pipe.predict(batches):
                if pipe.rank == 0:
                    print(output["logits"].argmax(-1))

        Args:
            batches: The minibatches, the same on every rank.
        """
        self.flush()
        self._whole.equalise_buffers()
        for _, _, output in self._loop.outputs(batches, lambda place: 0):
            yield output
        self.runtime.evaluated.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """The newest weights and buffers of this rank's stages, under the model's own names."""
        self.flush()
        return self._whole.own()

    def full_state_dict(self) -> dict[str, Any] | None:
        """The whole model's `state_dict` on rank 0; None elsewhere. Call it on every rank.

        `model.load_state_dict` takes it as it is: it has all names of tied tensors, no buffers that are not
        persistent, and what the loss does not depend on with its initial values.
        """
        self.flush()
        state = self._whole.gather()
        self._loop.wait_for_all()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set the weights and buffers of this rank's stages; names of other stages are skipped.

        Args:
            state: Tensors by the model's own names.
        """
        self._check_state(state)
        self.flush()
        for stage in self.runtime.stages.values():
            stage.load_state(state)

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        graph = self.layout.graph
        infos = {
            known: info
            for name, info in (*graph.parameters.items(), *graph.buffers.items())
            for known in (name, *info.aliases)
        }
        for name, tensor in state.items():
            if name not in infos:
                raise VPipeError(f"the state has {name!r}, which is no parameter or buffer of the model")
            if tensor.shape != infos[name].shape:
                raise VPipeError(
                    f"the state has {name!r} with the shape {list(tensor.shape)}, the model's has "
                    f"{list(infos[name].shape)}: give the state of a model of the same sizes"
                )

    def training_state(self) -> tuple[dict[int, StageState], dict[str, Any]]:
        """What resuming needs: of each stage that this rank answers for, and plain values equal on all ranks.

        Names do not depend on the partition. What several stages hold comes from the first of them, and a
        stage by the first of its replicas. An asynchronous pipeline is drained: call it on every rank.
        """
        self.flush()
        return self._whole.for_resuming(), {"updates": self.updates, **self.runtime.updates.state()}

    def load_training_state(self, state: StageState, plain: Mapping[str, Any]) -> Changes:
        """Go on from the training state of all stages; the tensors of this rank's stages are enough.

        Args:
            state: Tensors by the model's own names, as `training_state` gives them.
            plain: The plain values that it gives.

        Returns:
            The hyperparameters of this rank's optimizers that were saved with other values.
        """
        if self._loop.training:
            raise VPipeError("a training state cannot be loaded inside a `train` loop: leave the loop first")
        changes: Changes = {}
        for stage in self.runtime.stages.values():
            changes = stage.load_training_state(state) | changes
        self.runtime.updates.load_state(plain, plain["updates"])
        self._loop.updates = plain["updates"]
        return changes

    def close(self) -> None:
        """Free channels and connections. The pipeline cannot be used afterwards."""
        faults.point("shutdown")
        self.handler.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_device(self, wanted: str | torch.device | None) -> torch.device:
        device = take_device(self.world, wanted)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    def _in_turn(self, what: str, make: Callable[[], T]) -> T:
        """What `make` returns; ranks that are threads of one process take turns, and if it fails on one all end."""

        def made() -> T:
            with self.world.exclusive:
                try:
                    return make()
                except EXPLAINED as error:
                    explained = explain(error, self.rank, None)
                    if explained is None:
                        raise
                    raise explained from error

        return agree(self.world, what, made)
