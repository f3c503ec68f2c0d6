"""`torch.histc` of whole numbers as an operator that every device has.

torch counts them on GPUs only, and in float32 on CPUs. A model that looks at the device of its tensors to choose (the
experts of a Mixtral) is captured on `meta`, and its graph runs anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor


def histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """`torch.histc`."""
    if input.is_floating_point():
        return torch.histc(input, bins, min, max)
    counted: Tensor = torch.ops.vpipe.histc(input, bins, min, max)
    return counted


@torch.library.custom_op("vpipe::histc", mutates_args=())
def _histc(input: Tensor, bins: int, min: float, max: float) -> Tensor:
    if input.is_cuda:
        return torch.histc(input, bins, int(min), int(max))
    return torch.histc(input.double(), bins, min, max).to(input.dtype)


@_histc.register_fake
def _(input: Tensor, bins: int, min: float, max: float) -> Tensor:
    return input.new_empty(bins)
