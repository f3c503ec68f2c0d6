"""What the server has ready before it forks: all imports, and one captured model.

Importing takes seconds of every new process, and capturing takes longer than the trainings of most tests: so the
model object that these share is captured once; every other model is captured where it is used.
"""

import gc
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import vpipe.commands
import vpipe.layout
from tests.multiprocess import tasks
from vpipe.graph import ModelGraph, capture

for name in ("vpipe.export", "vpipe.trainer", "torch.utils.tensorboard", "transformers.generation"):
    importlib.import_module(name)

_MODEL, _BATCH, _ = tasks.bert()
_GRAPH = capture(_MODEL, _BATCH)


def _capture(
    model: nn.Module, example_batch: Any, loss_fn: Callable[..., Tensor] | None = None
) -> ModelGraph:
    shared = model is _MODEL and example_batch is _BATCH
    return _GRAPH if shared else capture(model, example_batch, loss_fn)


vpipe.layout.capture = _capture
tasks.adamw(list(_MODEL.parameters())).step()  # without gradients: imports what optimizers import late
gc.freeze()  # a collection in a fork need not touch, and so copy, what is here
