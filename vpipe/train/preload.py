"""What the launcher does once for all ranks of its host before it forks them: the imports, and the capture."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from vpipe.errors import VPipeError
from vpipe.launch.forked import can_fork
from vpipe.launch.mps import count_gpus
from vpipe.system.console import announce
from vpipe.system.start import Phases, collector_off

if TYPE_CHECKING:
    from torch import nn

    from vpipe.config import RunConfig

MODEL = (
    "model_type", "hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size", "dropout",
    "batch_size", "sequence_length", "documents", "precision", "chunked_loss",
)  # fmt: skip
"""The keys that a named model and its batches depend on, besides `model`."""


class _Prepared(NamedTuple):
    of: tuple[Any, ...]
    model: nn.Module


_prepared: _Prepared | None = None


def preparation(config: RunConfig) -> Callable[[Phases], None] | None:
    """What the launcher does before it forks the ranks; None: each is a new interpreter.

    On a host with GPUs libraries ask about them while they are imported, and a process that has opened a GPU cannot be
    forked.
    """
    return None if config.code or config.container or count_gpus() else partial(preload, config)


def preload(config: RunConfig, phases: Phases) -> None:
    """Import what a rank imports, and capture the model. What fails here fails again in the ranks, which report it."""
    global _prepared
    phases.begin("import")
    announce("importing torch")
    with collector_off(keep=True):
        import torch

        torch.set_num_threads(1)  # a process with threads cannot be forked
        from vpipe.pipeline.captured import capture_ahead
        from vpipe.train.rank import train_rank  # noqa: F401
        from vpipe.train.workload import build_workload

        if not can_fork() or (_prepared is not None and _prepared.of == _model_of(config)):
            return
        phases.begin("capture")
        announce("capturing the model")
        with suppress(VPipeError):
            work = build_workload(config, "meta")
            capture_ahead(work.model, work.batch, work.loss_fn, config.precision, config.chunked_loss)
            _prepared = _Prepared(_model_of(config), work.model)


def prepared_model(config: RunConfig) -> nn.Module | None:
    """The model on `meta` that was captured for this configuration before this process was forked, if one was."""
    return _prepared.model if _prepared is not None and _prepared.of == _model_of(config) else None


def _model_of(config: RunConfig) -> tuple[Any, ...]:
    path = None if config.model is None else os.path.abspath(config.path(config.model))
    return path, *(getattr(config, key) for key in MODEL)
