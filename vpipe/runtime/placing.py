"""Batches on a rank's device."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vpipe.runtime.feed import Fields
from vpipe.stage.stage import Stage


def placed_on(device: torch.device, stages: Iterable[Stage]) -> Callable[[Fields], Fields]:
    """What puts onto the device the fields of a batch that these stages read."""
    read = {name for stage in stages for name in stage.graph.fields}

    def place(fields: Fields) -> Fields:
        if device.type == "cpu":
            return fields
        return {name: _on_device(tensor, device) for name, tensor in fields.items() if name in read}

    return place


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Behind what was issued, without waiting for it: the copy needs memory that stays in place."""
    return tensor.to(device) if tensor.is_cuda else tensor.pin_memory().to(device, non_blocking=True)
