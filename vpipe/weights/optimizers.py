"""Base optimizers by name."""

from collections.abc import Callable
from difflib import get_close_matches

import torch
from torch import nn
from torch.optim import Optimizer

from vpipe.errors import VPipeError

NAMES = ("sgd", "adam", "adamw", "lamb")


def optimizer_factory(
    name: str, learning_rate: float, weight_decay: float = 0.0, momentum: float = 0.9
) -> Callable[[list[nn.Parameter]], Optimizer]:
    """A function from parameters to the optimizer of this name; fused where torch has a fused one."""
    if name == "sgd":
        return lambda params: torch.optim.SGD(
            params, learning_rate, momentum=momentum, weight_decay=weight_decay, fused=True
        )
    if name == "adam":
        return lambda params: torch.optim.Adam(params, learning_rate, weight_decay=weight_decay, fused=True)
    if name == "adamw":
        return lambda params: torch.optim.AdamW(params, learning_rate, weight_decay=weight_decay, fused=True)
    if name == "lamb":
        return lambda params: _lamb(params, learning_rate, weight_decay)
    hint = get_close_matches(name, NAMES, 1)
    raise VPipeError(
        f"unknown optimizer {name!r}" + (f", did you mean {hint[0]!r}?" if hint else f": choose from {NAMES}")
    )


def _lamb(params: list[nn.Parameter], learning_rate: float, weight_decay: float) -> Optimizer:
    try:
        from pytorch_optimizer import Lamb
    except ImportError as error:
        raise VPipeError(
            "optimizer 'lamb' needs the package pytorch-optimizer: pip install 'vpipe[lamb]'"
        ) from error
    return Lamb(params, lr=learning_rate, weight_decay=weight_decay)
