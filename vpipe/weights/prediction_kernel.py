"""Predicted weights of many parameters as one kernel for GPUs, where Triton can compile it.

It reads weights and moments once and writes the version, in its own dtype: for AdamW in bf16 14 bytes a parameter,
where a version that is not predicted takes 6. torch's own operations need four kernels for each parameter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

ADAM, MOMENTUM, LAST = range(3)
"""Kinds of operands: two moments; a momentum; the weights before the last update."""
Row: TypeAlias = tuple[Tensor, ...]
"""A parameter's weights, one or two operands, and its target."""
Kernel: TypeAlias = Callable[[Sequence[Row], int, "Tensor | None", float], bool]
"""From rows, their kind, Adam's corrections and a factor: False if these tensors do not fit it."""
BLOCK = 4096
WARPS = 8
ALIGNED = 16
"""Bytes."""
TABLES = 64
"""Kept ones: storage of versions is recycled, so the same few are used again and again."""


@cache
def compiled_kernel() -> Kernel | None:
    """The kernel, once it has run; None where it cannot: no Triton, or no C compiler for it."""
    try:
        kernel = launcher(importlib.import_module("vpipe.weights.prediction_program").write_expected)
        weight, target = torch.zeros(3, device="cuda"), torch.zeros(3, dtype=torch.bfloat16, device="cuda")
        kernel([(weight, weight, weight, target)], ADAM, weight, 0.0)
        torch.cuda.synchronize()
    except Exception:  # whatever a compiler raises
        return None
    return kernel


def fits(rows: Sequence[Row]) -> bool:
    """Whether the kernel can read and write these tensors: float32, in a row, aligned; targets of one dtype."""
    return len({row[-1].dtype for row in rows}) == 1 and all(
        tensor.is_contiguous()
        and tensor.data_ptr() % ALIGNED == 0
        and (last or tensor.dtype == torch.float32)
        for row in rows
        for tensor, last in zip(row, (*(False,) * (len(row) - 1), True), strict=True)
    )


def launcher(program: Any) -> Kernel:
    tables: dict[Any, tuple[Tensor, Tensor] | None] = {}

    def launch(rows: Sequence[Row], kind: int, corrections: Tensor | None, rate: float) -> bool:
        weights, first, *_, target = rows[0]
        addresses = tuple((*_addresses(row), row[0].numel()) for row in rows)
        key = addresses, weights.dtype, target.dtype
        if key not in tables:
            if len(tables) == TABLES:
                tables.clear()
            tables[key] = _table(addresses, weights.device) if fits(rows) else None
        table = tables[key]
        if table is None:
            return False
        scales = first if corrections is None else corrections
        program[(len(table[1]),)](*table, scales, rate, target, KIND=kind, BLOCK=BLOCK, num_warps=WARPS)
        return True

    return launch


def _addresses(row: Row) -> tuple[int, int, int, int]:
    weights, first, *second, target = (tensor.data_ptr() for tensor in row)
    return weights, first, *(second or [first]), target  # type: ignore[return-value]


def _table(addresses: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The addresses as a tensor, and for each program of the kernel its row and the number of its piece."""
    counts = torch.tensor([-(-count // BLOCK) for *_, count in addresses])
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    numbers = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    return torch.tensor(addresses).to(device), torch.stack([rows, numbers], 1).to(device)
