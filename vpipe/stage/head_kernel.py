"""Losses and gradient of a piece's logits as one kernel for GPUs, where Triton can compile it.

It reads the logits twice and writes their gradient in their place once; torch's own operations move five times as many
bytes, in float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

Kernel: TypeAlias = Callable[[Tensor, Tensor, bool], Tensor]
"""From logits [tokens, classes], labels [tokens, 1] and whether the logits become their gradient, to losses."""
BLOCK = 4096
WARPS = 8


@cache
def compiled_kernel() -> Kernel | None:
    """The kernel, once it has run; None where it cannot: no Triton, or no C compiler for it."""
    try:
        program = importlib.import_module("vpipe.stage.head_program").loss_and_gradient
        kernel = _launcher(program)
        logits = torch.zeros(2, 3, dtype=torch.bfloat16, device="cuda")
        kernel(logits, torch.zeros(2, 1, dtype=torch.int64, device="cuda"), True)
        torch.cuda.synchronize()
    except Exception:  # whatever a compiler raises
        return None
    return kernel


def _launcher(program: Any) -> Kernel:
    def launch(logits: Tensor, labels: Tensor, gradient: bool) -> Tensor:
        losses = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        settings = {"CLASSES": logits.shape[1], "GRADIENT": gradient, "BLOCK": BLOCK, "num_warps": WARPS}
        program[(len(logits),)](logits, labels, losses, logits.stride(0), **settings)
        return losses

    return launch
