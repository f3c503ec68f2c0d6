"""Loading of checkpoints: each rank reads what its own stages hold, from files of any partition."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vpipe.checkpoint.apart import local_copy
from vpipe.checkpoint.files import read_header, read_tensors
from vpipe.checkpoint.manifest import Manifest, check_state, read_manifest, verify
from vpipe.communication import agree, agree_on
from vpipe.errors import VPipeError
from vpipe.graph import TensorInfo
from vpipe.pipeline import Pipeline
from vpipe.pipeline.layout import Layout
from vpipe.stage.stage import MODEL, OPTIMIZER, StageState


def load(pipe: Pipeline, path: Path, report: Callable[[str], None] = warnings.warn) -> dict[str, Any]:
    """Set the pipeline to the saved state, on every rank together; returns what `save` was given as `extra`.

    Stages, partition, replicas, schedule and precision may be others than when it was saved. The optimizer must be of
    the same class; its groups and hyperparameters (learning rate, weight decay, betas) are those of `pipe`, its state
    is the saved one. `report` is called with one line if hyperparameters differ. Training goes on with the minibatch
    after `pipe.updates` updates. The files that a rank reads are verified first; nothing is set on any rank unless
    every rank could read.
    """

    graph = pipe.layout.graph

    def read_own(path: Path) -> tuple[Manifest, dict[str, Tensor]]:
        manifest = read_manifest(path)
        check_state(manifest.state, path)
        _check_names(pipe.layout, manifest, path)
        by_file = _wanted(pipe, manifest)
        verify(path, by_file)
        tensors: dict[str, Tensor] = {}
        for file, names in by_file.items():
            if sorted(read_header(path / file)[0]) != sorted(manifest.files[file].tensors):
                raise VPipeError(f"{path / file} holds other tensors than its manifest says")
            read = read_tensors(path / file, names)
            weights = {n.removeprefix(MODEL): t for n, t in read.items() if n.startswith(MODEL)}
            check_fits(weights, {**graph.parameters, **graph.buffers}, path / file)
            tensors |= read
        return manifest, tensors

    with local_copy(pipe.world, path) as here:
        manifest, tensors = agree(pipe.world, "checkpoint", lambda: read_own(here))
    agree_on(
        pipe.world,
        "checkpoint",
        [manifest.updates, [entry.sha256 for entry in manifest.files.values()]],
        "give every rank the same path",
    )
    state = StageState(tensors, manifest.state["optimizers"])

    def set_state() -> dict[str, list[Any]]:
        try:
            return pipe.load_training_state(state, manifest.state)
        except VPipeError:
            raise
        except Exception as error:  # an optimizer may refuse its state with any error
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise VPipeError(f"{path}: its training state does not fit this run: {reason}") from None

    changes = agree(pipe.world, "state of the checkpoint", set_state)
    everywhere: dict[str, list[Any]] = {}
    for theirs in pipe.world.all_gather("hyperparameters", changes):
        everywhere = theirs | everywhere
    if everywhere:
        listed = (
            f"{key} {now} (saved: {before}; {name!r})" for key, (before, now, name) in everywhere.items()
        )
        report(f"hyperparameters of this run hold in place of those in {path}: {', '.join(listed)}")
    return manifest.extra


def check_fits(tensors: Mapping[str, Tensor], model: Mapping[str, Tensor | TensorInfo], path: Path) -> None:
    """Tensors that were read must be parameters or buffers of the model, with their shapes."""
    for name, tensor in tensors.items():
        if name not in model:
            raise VPipeError(
                f"{path}: tensor {name!r} is not one of the model's: give the model that was saved"
            )
        if tensor.shape != model[name].shape:
            raise VPipeError(
                f"{path}: tensor {name!r} has the shape {list(tensor.shape)} and the model's has "
                f"{list(model[name].shape)}: build the model with the sizes that it was saved with"
            )


def _check_names(layout: Layout, manifest: Manifest, path: Path) -> None:
    """The same on every rank: names of the whole model, not of a rank's stages."""
    places = {n.removeprefix(MODEL): file for n, file in manifest.places().items() if n.startswith(MODEL)}
    expected = {name for name, *_ in layout.state_entries()}
    if missing := sorted(expected - places.keys()):
        raise VPipeError(
            f"{path}: tensor {missing[0]!r} of the model is in no file of the checkpoint"
            f"{_more(missing)}: build the model that was saved"
        )
    if unknown := sorted(places.keys() - expected):
        raise VPipeError(
            f"{path / places[unknown[0]]}: tensor {unknown[0]!r} is not one of the model's"
            f"{_more(unknown)}: build the model that was saved"
        )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _wanted(pipe: Pipeline, manifest: Manifest) -> dict[str, list[str]]:
    """What this rank's stages hold, by file."""
    own = {name for stage in pipe.runtime.stages.values() for name in stage.state()}
    by_file: dict[str, list[str]] = {}
    for name, file in manifest.places().items():
        key = name.removeprefix(OPTIMIZER).rpartition(".")[0]
        if (name.startswith(MODEL) and name.removeprefix(MODEL) in own) or (
            name.startswith(OPTIMIZER) and key in own
        ):
            by_file.setdefault(file, []).append(name)
    return by_file
