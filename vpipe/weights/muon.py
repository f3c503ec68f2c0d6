"""Muon, of matrices and of stacks of them: momentum whose matrices are made orthogonal before they are added.

It computes what `torch.optim.Muon` computes with `match_rms_adamw`, which takes one matrix after the other, some 15
kernels each, and no parameter of three dimensions. Here on a GPU matrices of one shape are orthogonalised together:

    layer 0   query  key  value  out ┐
    layer 1   query  key  value  out ├ one stack: the 15 kernels once        up, up, up ...: another stack
    layer 2   query  key  value  out ┘

and the experts of a layer, which transformers keeps as one parameter (experts, rows, columns), are a stack as they are.
Products of another stack may round differently. Replicas of a stage have the same stacks, and a parameter that several
stages hold has an optimizer of its own in each of them: copies stay equal.
"""

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

STEPS, COEFFICIENTS, LEAST_NORM = 5, (3.4445, -4.7750, 2.0315), 1e-7
"""Of the Newton-Schulz iteration, as torch has them."""
RMS = 0.2
"""Root mean square of an update, of the rate."""
STACKED = {"cuda": 2**24}
"""By kind of device the numbers of a stack at most: what is computed on the way takes 10 bytes for each. On a CPU each
parameter is computed alone, as torch does it."""


class Muon(Optimizer):
    """Args are those of `torch.optim.Muon`; Nesterov's momentum, weight decay apart from the gradient.

    Like torch's fused optimizers, a step leaves weights and momentum as they are if `found_inf` is set, to a number on
    the device that is 1: the host need not know.
    """

    found_inf: Tensor | None = None

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for members in _stacks([p for p in group["params"] if p.grad is not None]):
                self._update(members, float(group["lr"]), group["weight_decay"], group["momentum"])

    def _update(self, members: list[Tensor], rate: float, decay: float, momentum: float) -> None:
        gradients = [parameter.grad for parameter in members if parameter.grad is not None]
        means = [self._mean(parameter) for parameter in members]
        skip = None if self.found_inf is None else self.found_inf > 0
        if skip is not None:
            for gradient, mean in zip(gradients, means, strict=True):
                torch.where(skip, mean, gradient, out=gradient)  # the momentum of its own value is that value
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, means, momentum)
        if len(ahead) == 1:
            added = [orthogonal(ahead[0].bfloat16())]
        else:
            stack = torch.empty(len(ahead), *ahead[0].shape, dtype=torch.bfloat16, device=ahead[0].device)
            torch._foreach_copy_(stack.unbind(), ahead)
            del ahead
            added = list(orthogonal(stack).unbind())
        shrunk: Any = 1 - rate * decay
        if skip is not None:
            shrunk = torch.ones_like(skip, dtype=members[0].dtype).masked_fill_(~skip, shrunk)
            torch._foreach_mul_(added, (~skip).to(added[0].dtype))
        torch._foreach_mul_(members, shrunk)
        size = rate * RMS * sqrt(max(members[0].shape[-2:]))
        for parameter, orthogonalised in zip(members, added, strict=True):
            parameter.add_(orthogonalised, alpha=-size)

    def _mean(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def orthogonal(matrices: Tensor) -> Tensor:
    """About U V^T of each matrix U S V^T: a matrix, or a stack of them, in bfloat16, which is overwritten."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM))
    add_product: Any = torch.addmm if x.dim() == 2 else torch.baddbmm
    first, third, fifth = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.mT if tall else x


def _stacks(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices of one shape together, as many as a stack may have; a parameter that is a stack by itself alone."""
    by_shape: dict[tuple[Any, ...], list[Tensor]] = {}
    for number, parameter in enumerate(parameters):
        alone = number if parameter.dim() > 2 else None
        by_shape.setdefault((parameter.shape, parameter.dtype, parameter.device, alone), []).append(parameter)
    for same in by_shape.values():
        most = max(1, STACKED.get(same[0].device.type, 0) // max(1, same[0].numel()))
        yield from (same[start : start + most] for start in range(0, len(same), most))
