"""The CTC loss as an operator whose result has a known shape.

torch's own operator keeps a table beside the losses whose size depends on the longest target, so it cannot be exported.
This one keeps nothing: its backward makes the table again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`."""
    one = log_probs.ndim == 2
    if one:
        log_probs = log_probs.unsqueeze(1)
        targets = targets.unsqueeze(0)
    lengths = [
        torch.as_tensor(length, device=log_probs.device).long().reshape(-1)
        for length in (input_lengths, target_lengths)
    ]
    losses: Tensor = torch.ops.vpipe.ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        losses = losses.masked_fill(losses.isinf(), 0.0)
    if reduction == "mean":
        return (losses / lengths[1].clamp_min(1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses.squeeze(0) if one else losses


@torch.library.custom_op("vpipe::ctc_losses", mutates_args=())
def _losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Of each sample."""
    losses, _ = _aten._ctc_loss.Tensor(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    return losses


@_losses.register_fake
def _shape_of_losses(log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op("vpipe::ctc_gradient", mutates_args=())
def _gradient(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    settings = targets, input_lengths, target_lengths
    losses, table = _aten._ctc_loss.Tensor(log_probs, *settings, blank, zero_infinity)
    return _aten._ctc_loss_backward.Tensor(
        gradient.contiguous(), log_probs, *settings, losses, table, blank, zero_infinity
    )


@_gradient.register_fake
def _shape_of_gradient(gradient: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.vpipe.ctc_gradient(gradient, *ctx.saved_tensors, *ctx.settings)
    return found, None, None, None, None, None


_losses.register_autograd(_backward, setup_context=_keep)
