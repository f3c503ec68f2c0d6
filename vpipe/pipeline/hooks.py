"""Warnings about what a captured graph does not do: call hooks of modules, take any length."""

from __future__ import annotations

import warnings

from torch import nn

from vpipe.graph import ModelGraph

_KINDS = {
    "forward": ("_forward_pre_hooks", "_forward_hooks"),
    "backward": ("_backward_pre_hooks", "_backward_hooks"),
}
SHOWN = 5


def warn_about_hooks(model: nn.Module, graph: ModelGraph) -> None:
    """Name the modules whose hooks would not run, or would run only once."""
    if graph.trace.boundaries is not None:  # the modules themselves are called
        return
    for kind, attributes in _KINDS.items():
        names = [
            name or type(model).__name__
            for name, module in model.named_modules()
            if any(
                not _is_torchs(hook)
                for attribute in attributes
                for hook in getattr(module, attribute).values()
            )
        ]
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            effect = (
                "they ran once, while the model was captured: what they compute on tensors is part of the graph, "
                "anything else is not done for each minibatch"
                if kind == "forward"
                else "they will not run"
            )
            warnings.warn(
                f"the model has {kind} hooks on {', '.join(map(repr, names[:SHOWN]))}{more}: {effect}; use "
                "pipe.on_action, or return the values from the model",
                stacklevel=3,
            )


def _is_torchs(hook: object) -> bool:
    """Whether torch itself has set it, as for a weight norm, whose computation is part of the graph."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.startswith("torch.")


def warn_about_lengths(graph: ModelGraph) -> None:
    """Name the sizes of the batch that must not vary, though the model itself would let them."""
    for (name, dimension), size in graph.trace.unrolled.items():
        warnings.warn(
            f"every batch must have size {size} in dimension {dimension} of field {name!r}: torch.export unrolls the "
            "model over it; pad or cut batches that differ",
            stacklevel=3,
        )
