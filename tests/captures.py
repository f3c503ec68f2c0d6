"""Captures that are not repeated: a captured graph is never changed and holds no weights."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from vpipe.config import RunConfig
from vpipe.config.file import read_config
from vpipe.graph import ModelGraph, capture
from vpipe.train.datasets import named_batch
from vpipe.train.models import build_model

_made: dict[Any, tuple[ModelGraph, Any]] = {}
_CAPTURING = threading.Lock()
"""Ranks that are threads want the same model at once."""


def capture_once(
    model: nn.Module,
    example_batch: Any,
    loss_fn: Callable[..., Tensor] | None = None,
    **options: bool,
) -> ModelGraph:
    """The graph of this object, or of a model of the same configuration, captured when it is first asked for."""
    key = (*_key(model, example_batch, loss_fn), options.get("chunked_loss", True))
    with _CAPTURING:
        if key not in _made:
            _made[key] = (
                capture(model, example_batch, loss_fn, **options),
                model,
            )  # an object that is kept keeps its id
    return _made[key][0]


def capture_unknown(
    model: nn.Module,
    example_batch: Any,
    loss_fn: Callable[..., Tensor] | None = None,
    **options: bool,
) -> ModelGraph:
    """The same, but what is captured now is not kept."""
    known = _made.get((*_key(model, example_batch, loss_fn), options.get("chunked_loss", True)))
    return capture(model, example_batch, loss_fn, **options) if known is None else known[0]


def capture_config(file: Path, keys: Mapping[str, Any] | None = None) -> None:
    """The model of a run. For the process that its ranks are forked from: not each of them captures it then."""
    capture_run(read_config(file, keys))


def capture_run(config: RunConfig) -> None:
    """The model of this configuration, with the fields that its batches have."""
    model = build_model(config, "meta").model
    capture_once(model, named_batch(config, model, config.batch_size))


def _key(model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None) -> Any:
    return _structure(model), _sizes(batch), loss_fn


def _structure(model: nn.Module) -> Any:
    """What the graph of a model of transformers follows from; of any other model only the object is known."""
    if not isinstance(model, PreTrainedModel):
        return id(model)
    config: Any = model.config
    kernels = (config._attn_implementation, getattr(config, "_experts_implementation", None))
    tensors = tuple((t.dtype, t.device, t.requires_grad) for t in model.parameters())
    modes = tuple(module.training for module in model.modules())
    return type(model), config.to_json_string(), kernels, tensors, modes


def _sizes(batch: Any) -> Any:
    leaves, tree = pytree.tree_flatten(batch)
    return str(tree), tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
