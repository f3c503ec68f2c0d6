"""The pipeline of a script: what `vpipe.pipeline.Pipeline` does, with a run's folder and checkpoints."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, overload

from torch import nn

from vpipe import checkpoint
from vpipe.api.run_record import RunRecord
from vpipe.checkpoint.inspection import newest_whole
from vpipe.communication import agree
from vpipe.cost import StaleTraining
from vpipe.errors import VPipeError
from vpipe.pipeline import Pipeline
from vpipe.pipeline.outputs import Metrics
from vpipe.pipeline.pipeline import Given
from vpipe.plan import PlanResult, plan
from vpipe.profile import profile
from vpipe.schedule import Schedule
from vpipe.verify import Verification, verify
from vpipe.verify.comparison import Difference

DATA, OWN = "data", "own"
"""Keys in a checkpoint: the position in the data, and the user's own values."""


class UserPipeline(Pipeline):
    __doc__ = Pipeline.__doc__

    _record: RunRecord | None = None
    _loader: Any = None  # of the latest `train`, whose position `save` keeps
    _position: Any = None  # of a checkpoint, for the loader of the next `train`

    def _opened(self, given: Given) -> None:
        self._given = given._replace(
            model=None
        )  # its stages have their own copies: the user may let go of it
        self._model_reference = weakref.ref(given.model) if given.model is not None else lambda: None
        stale = StaleTraining(self.optimizer_name, given.training.staleness.predict)
        if self.rank == 0 and (text := stale.warning(self.schedule)) is not None:
            warnings.warn(text, stacklevel=3)
        if self.run_dir is not None:
            self._record = RunRecord(self, self.run_dir, given)

    def train(self, batches: Iterable[Any]) -> Iterator[tuple[int, float]]:
        """Train on the batches; yields (update, loss) on every rank.

        A loss comes when this rank has made the update (on a GPU some updates later). Leaving the loop early drains
        the pipeline: leave at the same update on every rank.

        Args:
            batches: The minibatches, the same on every rank. An object that has `state_dict` and `load_state_dict`,
                such as a `vpipe.Loader`, is resumable: `save` keeps its position, and after `load` or `resume` it is
                set to it here.
        """
        self._loader = batches
        self._restore_position(batches)
        return super().train(batches) if self._record is None else self._recorded(batches, self._record)

    def _recorded(self, batches: Iterable[Any], record: RunRecord) -> Iterator[tuple[int, float]]:
        end = record.begin_pass(batches)
        try:
            yield from super().train(batches)
        finally:
            end()

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
        if self._record is not None:
            self._record.recorder.pause()
        found = super().evaluate(batches, metrics)
        if self._record is not None:
            loss, *others = found.values() if isinstance(found, dict) else [found]
            names = [] if isinstance(found, float) else list(found)[1:]
            self._record.recorder.evaluation(loss, dict(zip(names, others, strict=True)))
        return found

    def save(
        self, path: str | os.PathLike[str] | None = None, extra: Mapping[str, Any] | None = None
    ) -> Path:
        """Save weights, optimizer state and the position in the data; call it on every rank at the same update.

        All ranks must see the same folder.

        Args:
            path: The folder of the checkpoints; by default `run_dir/checkpoints`.
            extra: Values of your own that JSON can hold; `load` returns them.

        Returns:
            The checkpoint: `path/step-<updates>`.
        """
        directory = self._checkpoints("save") if path is None else Path(path)
        if self._record is not None:
            self._record.recorder.pause()
        self.flush()  # before the position is read
        values: dict[str, Any] = {OWN: dict(extra or {})}
        if hasattr(self._loader, "state_dict"):
            values[DATA] = self._loader.state_dict()
        return checkpoint.save(self, directory, values)

    def load(self, path: str | os.PathLike[str], loader: Any = None, *, data: bool = True) -> dict[str, Any]:
        """Go on from a checkpoint, to the bit; call it on every rank, before `train`.

        Stages, schedule and replicas may be others than those that it was saved with.

        Args:
            path: A checkpoint, a folder of them or a run's folder, of which the newest good one counts; also those of
                `vpipe train`.
            loader: Is set to its position in the data at once; without it, the batches of the next `train` are.
            data: Whether the position in the data is restored too.

        Returns:
            The `extra` values that `save` was given.
        """
        wanted = agree(
            self.world, "checkpoint", lambda: str(newest_whole(Path(path))) if self.rank == 0 else None
        )
        return self._load(self.world.all_gather("checkpoint found", wanted)[0], loader, data)

    def resume(self, loader: Any = None) -> dict[str, Any] | None:
        """Go on from the newest good checkpoint of `run_dir`, as `load` does.

        Args:
            loader: Is set to its position in the data at once; without it, the batches of the next `train` are.

        Returns:
            The `extra` values that `save` was given; None if there is no checkpoint yet.
        """
        directory = self._checkpoints("resume")
        found = checkpoint.newest(directory) if self.rank == 0 else None
        chosen = self.world.all_gather("checkpoint found", None if found is None else str(found))[0]
        return None if chosen is None else self._load(chosen, loader, data=True)

    def verify(
        self, *, updates: int | None = None, dtype: str | None = None, device: str | None = None
    ) -> Verification:
        """Verify that this pipeline trains its model as the plain model is trained (`vpipe.verify`), on every rank.

        Rank 0 does it, with a thread for each rank, on copies of the model and with the example batch; the pipeline
        itself is not touched. The model must still be there.

        Args:
            updates: Updates to train; by default 5, more where weights are stale.
            dtype: "float64" or "float32"; by default float64, and float32 for a model that does not run in it.
            device: "cpu" or "cuda"; by default the GPU if there is one.
        """
        model, given = self._model(), self._given
        training = given.training
        options = {**vars(given.layout), "precision": "fp32", "partition": self.layout.partition}
        del options["compiled"]  # the proof compiles nothing

        def run() -> Any:
            if self.rank:
                return None
            result = verify(
                model,
                given.example_batch,
                ranks=self.world.size,
                loss_fn=given.loss_fn,
                loss_weight=given.loss_weight,
                optimizer=training.optimizer,
                clip_norm=training.clip_norm,
                staleness=training.staleness,
                seed=training.seed,
                updates=updates,
                dtype=dtype,
                device=device,
                **options,
            )
            return asdict(result)

        found = self.world.all_gather("verification", agree(self.world, "verification", run))[0]
        differences = {name: Difference(**found[name]) for name in ("loss", "gradients", "weights")}
        return Verification(**{**found, **differences, "partition": tuple(found["partition"])})

    def plan(
        self,
        memory: int | str | None = None,
        *,
        schedule: str | Schedule | None = None,
        minibatches: int | None = None,
        batch_size: int | str | None = None,
        chunks: int | None = None,
    ) -> PlanResult | None:
        """The best plan for this model on so many ranks: rank 0 measures and plans, the other ranks wait and get None.

        Its `to_plan()` has partition, policies, replicas and schedule, which are arguments of another Pipeline. The
        model must still be there.

        Args:
            memory: Memory of a rank in bytes, or as text such as "11GiB"; by default the device's.
            schedule: A name, a `Schedule`, or "auto" for the one that reaches a loss first, with this optimizer; by
                default this pipeline's.
            minibatches: Minibatches of an update of a synchronous schedule.
            batch_size: Samples of a minibatch, or "auto"; by default those of the example batch.
            chunks: Stages on each rank, for "interleaved".
        """
        model, given = self._model(), self._given
        training = given.training

        def run() -> PlanResult | None:
            if self.rank:
                return None
            measured = profile(
                model,
                given.example_batch,
                optimizer=training.optimizer,
                loss_fn=given.loss_fn,
                precision=given.layout.precision,
                chunked_loss=given.layout.chunked_loss,
                compile=training.compile,
                cuda_graphs=training.cuda_graphs,
                predict=training.staleness.predict,
                device=self.device,
            )
            wanted = schedule or given.layout.schedule
            stale = StaleTraining(self.optimizer_name, training.staleness.predict)
            return plan(
                measured,
                self.world.size,
                memory,
                wanted,
                minibatches,
                batch_size,
                chunks,
                stale,
                all_ranks=True,
            )

        return agree(self.world, "plan", run)

    def _model(self) -> nn.Module:
        model = self._model_reference()
        if model is None:
            raise VPipeError("the model that this pipeline was made from is gone: keep a reference to it")
        return model

    def close(self) -> None:
        """Free channels and connections; with `run_dir`, write report, trace and summary. Cannot be used afterwards."""
        self._close(sys.exc_info()[1])

    def __exit__(self, *raised: object) -> None:
        error = raised[1]
        self._close(error if isinstance(error, BaseException) else None)

    def _close(self, error: BaseException | None) -> None:
        record, self._record = self._record, None
        try:
            if record is not None:
                record.close(error)
        finally:
            super().close()

    def _load(self, path: str, loader: Any, data: bool) -> dict[str, Any]:
        values = checkpoint.load(self, Path(path))
        self._position = values.get(DATA) if data else None
        if loader is not None:
            self._restore_position(loader)
        return dict(values.get(OWN, {}))

    def _restore_position(self, batches: Any) -> None:
        if self._position is not None:
            position, self._position = self._position, None
            agree(self.world, "position in the data", lambda: _set_position(batches, position))

    def _checkpoints(self, what: str) -> Path:
        if self.run_dir is None:
            fix = "pipe.save(path)" if what == "save" else "pipe.load(path)"
            raise VPipeError(f"{what}() needs a folder: give Pipeline a run_dir, or call {fix}")
        return self.run_dir / "checkpoints"


def _set_position(batches: Any, position: Any) -> None:
    if not hasattr(batches, "load_state_dict"):
        raise VPipeError(
            f"the checkpoint has a position in the data, but a {type(batches).__name__} was given, which has no "
            "load_state_dict: give a vpipe.Loader or a loader like the one that was saved, or load with data=False"
        )
    batches.load_state_dict(position)
