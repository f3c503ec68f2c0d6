"""Mixed precision: the dtype that a model computes in, and the loss scale that float16 gradients need."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import VPipeError, meant
from vpipe.stage.module import StageModule

LESS = "look at the data, lower the learning rate"
LESS_OR_SKIP = f"{LESS}, or choose on_nonfinite: skip"
"""The fix that errors about non-finite numbers name."""
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: str) -> torch.dtype | None:
    """The dtype of model and activations; None leaves the model as it is."""
    if precision not in DTYPES:
        raise VPipeError(f"unknown precision {precision!r}: {meant(precision, DTYPES)}")
    return DTYPES[precision]


def skeleton(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the model on the meta device, in the compute dtype, for capture. No value is copied."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_like(tensor, dtype=kind, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in the compute dtype, if it holds floating-point numbers."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def cast_module(module: StageModule, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Cast a stage's parameters and buffers to the compute dtype; returns the parameters as they were, by name."""
    originals = {name: p.detach() for name, p in module.parameters_by_name.items()}
    for tensor in (*module.parameters_by_name.values(), *module.buffers_by_name.values()):
        tensor.data = cast(tensor.data, dtype)
    return originals


@dataclass
class LossScale:
    """Dynamic loss scale: halved by an overflow, doubled after `growth_interval` updates without one."""

    value: float = 2.0**16
    growth_interval: int = 2000
    enabled: bool = True
    good_updates: int = 0

    def update(self, overflow: bool) -> None:
        if not self.enabled:
            return
        if overflow:
            self.value = max(self.value / 2, 1.0)
            self.good_updates = 0
            return
        self.good_updates += 1
        if self.good_updates == self.growth_interval:
            self.value *= 2
            self.good_updates = 0

    def state(self) -> dict[str, Any]:
        return {"enabled": self.enabled, "value": self.value, "good_updates": self.good_updates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a saved scale, if both runs have one."""
        if self.enabled and state["enabled"]:
            self.value, self.good_updates = state["value"], state["good_updates"]

    @classmethod
    def for_precision(cls, precision: str, first: float | None = None) -> "LossScale":
        """`first`: what a dynamic one begins with, if not its default."""
        if precision == "fp16":
            return cls() if first is None else cls(value=float(first))
        if first is not None:
            raise VPipeError(
                f"loss_scale is {first}, but precision is {precision!r}, and only fp16 needs one: leave it out"
            )
        return cls(value=1.0, enabled=False)
