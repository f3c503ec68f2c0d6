"""Saving: a snapshot is taken, and written by a thread while training goes on; one rename shows all files at once.

    main thread of each rank    the pipeline is empty: its state is copied                        training waits
    writer of each rank         .step-00000100.tmp-5f0c/stage-000.safetensors   written, synced      it goes on
    writer of rank 0            .step-00000100.tmp-5f0c/manifest.json           when all have written theirs
    writer of rank 0            step-00000100                                   renamed: now it exists

One save at a time: the next one waits for it. Skipping it instead would make the updates at which an
asynchronous pipeline is drained, and with them the training, depend on how fast the disk is.
"""

import secrets
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vpipe.checkpoint.apart import ranks_apart
from vpipe.checkpoint.directory import prune, step_name
from vpipe.checkpoint.manifest import as_json
from vpipe.checkpoint.writing import WriteJob, write
from vpipe.communication import agree, agree_on
from vpipe.errors import NotWrittenError, VPipeError
from vpipe.pipeline import Pipeline
from vpipe.stage.stage import StageState


def save(pipe: Pipeline, directory: Path, extra: dict[str, Any]) -> Path:
    """Save the pipeline to `directory/step-<updates>` and wait until it is there; call it on every rank.

    As `Saver` does it, but no memory is kept and no other checkpoint is deleted.
    """
    saver = Saver(pipe, directory, report=lambda line: None)  # errors are raised
    saver.start(extra)
    path = saver.finish()
    assert path is not None
    return path


class Saver:
    """Saves a pipeline again and again, while it trains. Every rank has one and calls the same methods.

    Resuming equals never having stopped, to the bit: under the same layout, and compared with a run that
    was drained at the same updates, because saving drains an asynchronous pipeline (`Pipeline.flush`).
    The checkpoints are in the directory of rank 0's host; ranks of hosts that do not see it send their files there. If
    one of them cannot write, no checkpoint is made on any rank and those that were there stay untouched: training may
    go on.
    """

    def __init__(
        self,
        pipe: Pipeline,
        directory: Path,
        *,
        keep: int | None = None,
        report: Callable[[str], None] = warnings.warn,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """After each save all but the `keep` newest and the best are deleted; None: nothing is. `report` gets
        what goes wrong beside the training, `failed` is called if a save fails; both by another thread."""
        self.directory = directory
        self._pipe = pipe
        self._keep = keep
        self._report, self._failed = report, failed
        self._buffers: dict[tuple[int, str], Tensor] = {}  # for snapshots
        self._apart: frozenset[int] | None = None
        self._thread: threading.Thread | None = None
        self._saved: Path | None = None
        self._error: VPipeError | None = None

    def start(self, extra: dict[str, Any]) -> None:
        """Begin a save; call it on every rank at the same update. Of the ranks' `extra` rank 0's is kept.

        Draining makes further updates: call `flush` before you put the data's position into `extra`.
        """
        self.wait()
        pipe, world = self._pipe, self._pipe.world

        def take() -> tuple[dict[str, Any], dict[int, Any], dict[str, Any]]:
            stages, plain = pipe.training_state()
            return as_json(extra), snapshot(stages, self._buffers), plain

        own_extra, stages, plain = agree(world, "training state", take)
        agree_on(world, "number of updates", pipe.updates, "save at the same update on every rank")
        token = world.all_gather("checkpoint", secrets.token_hex(4))[0]
        if self._apart is None:
            self._apart = ranks_apart(world, self.directory)
        final, apart = self.directory / step_name(pipe.updates), self._apart or frozenset()
        job = WriteJob(world, final, token, stages, pipe.updates, _describe(pipe), plain, own_extra, apart)
        self._saved = self._error = None
        self._thread = threading.Thread(target=self._work, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until no save is under way, failed or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def failed(self) -> bool:
        """Whether the save that ended last has failed."""
        return self._error is not None

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> Path | None:
        """The checkpoint that was begun last, once it is whole, or what went wrong; None if none was begun.

        Every rank calls it: rank 0 serves the rendezvous, where the writers report, and must not leave before all know.
        """
        self.wait()
        self._pipe.world.all_gather("checkpoint saved", None)
        if self._error is not None:
            raise self._error
        return self._saved

    def _work(self, job: WriteJob) -> None:
        try:
            self._saved = write(job)
        except BaseException as error:
            crash = f"checkpoint {job.final} was not saved: its writer failed with {type(error).__name__}: {error}"
            self._error = error if isinstance(error, VPipeError) else NotWrittenError(crash)
            self._report(f"WARNING: {self._error}")
            self._failed()
            return
        if self._keep is not None and job.world.rank == 0:
            try:
                prune(self.directory, self._keep)
            except VPipeError as error:
                self._report(f"WARNING: older checkpoints stay: {error}")


def snapshot(
    stages: Mapping[int, StageState], buffers: dict[tuple[int, str], Tensor]
) -> dict[int, StageState]:
    """A copy of the stages' state in host memory; the first one allocates the buffers, the next ones reuse them."""
    taken = {index: StageState({}, stage.optimizers) for index, stage in stages.items()}
    for index, stage in stages.items():
        for name, tensor in stage.tensors.items():
            kept = buffers.get((index, name))
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffers[index, name] = kept
            taken[index].tensors[name] = kept.copy_(tensor, non_blocking=tensor.is_cuda)
    if any(tensor.is_cuda for stage in stages.values() for tensor in stage.tensors.values()):
        torch.cuda.current_stream().synchronize()
    return taken


def _describe(pipe: Pipeline) -> dict[str, Any]:
    """For people: nothing of it is needed to load the checkpoint."""
    return {
        "schedule": pipe.schedule.name,
        "partition": list(pipe.layout.partition),
        "placement": [list(ranks) for ranks in pipe.schedule.placement],
        "precision": pipe.layout.precision,
        "torch": torch.__version__,
    }
