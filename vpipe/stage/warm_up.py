"""The compiling of a stage before its first minibatch, so that the ranks compile side by side.

In the pipeline the first minibatch comes to a rank when the rank before it has compiled. So each rank runs a minibatch
of zeros through its stages, forwards and backwards, of which nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from vpipe.stage.random import RandomContext
from vpipe.stage.stage import Stage


def compile_ahead(
    stage: Stage, fields: Mapping[str, Tensor], shape: Callable[[str], torch.Size], seed: int = 0
) -> None:
    """Compile the stage for a batch of this form; `shape` gives that of each value that the stage receives.

    What fails here fails again in the first minibatch, which reports it.
    """
    graph, module, device = stage.graph, stage.module, stage.module.device
    buffers = {name: buffer.clone() for name, buffer in module.buffers_by_name.items()}
    context = RandomContext(seed)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), suppress(RuntimeError):
        values = {
            name: torch.zeros(shape(name), dtype=graph.value_dtype(name), device=device).requires_grad_(
                graph.needs_gradient(name)
            )
            for name in graph.reads
        }
        own = {name: fields[name].to(device) for name in graph.fields}
        made = [tensor for tensor in module(values, own, context).values() if tensor.requires_grad]
        if made:
            torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])
    context.deferred.clear()
    for parameter in module.parameters_by_name.values():
        parameter.grad = None
    for name, buffer in module.buffers_by_name.items():
        buffer.copy_(buffers[name])
