"""The head of a large vocabulary and its loss as one operation, which computes the logits in pieces.

The logits of a minibatch are as many as its tokens times the vocabulary, often more than everything else that a stage
holds. Here they are computed for some tokens at a time (a piece).

    one pass (half precision)    forward: of each piece logits, loss and both gradients, for a loss whose gradient is 1
                                 backward: these times the gradient of the loss
    two passes (float32, 64)     forward: of each piece logits and loss
                                 backward: of each piece logits again and both gradients

One pass computes fewer products. Two round as the plain model does, which multiplies by the gradient of the loss before
the products: a run can be compared with the plain model to the last digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vpipe.stage.head_kernel import Kernel, compiled_kernel

HALF = (torch.float16, torch.bfloat16)
PIECE = 2**27
"""Logits that are computed at once, at most, beyond the least number of tokens."""
LEAST_TOKENS = 256
"""A piece has at least so many: each adds to the whole gradient of the weight."""
ALIGNMENT = 64
"""On a GPU, products in half precision are several times slower if the number of classes is odd, or no multiple of 8:
classes whose weight is zero fill it up."""


class _CrossEntropy(NamedTuple):
    """The cross-entropy of `scale` times the logits, or with a `cap` c of c tanh(scale logits), computed in `dtype`."""

    scale: float
    cap: float | None
    smoothing: float
    ignored: int
    mean: bool
    dtype: torch.dtype

    def log_softmax(self, raw: Tensor) -> tuple[Tensor, Tensor | float | None]:
        """Of the raw logits, and the derivative of the logits by the raw ones (None: 1)."""
        logits = raw if self.scale == 1 else raw * self.scale
        slope: Tensor | float | None = None if self.scale == 1 else self.scale
        if self.cap is not None:
            bounded = logits.tanh()
            logits, slope = bounded * self.cap, (1 - bounded.square()).mul_(self.cap * self.scale)
        return torch.log_softmax(logits, 1, dtype=self.dtype), slope

    def of_rows(self, logs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token [tokens, 1]; any number for one whose label does not count."""
        losses = -logs.gather(1, labels)
        if self.smoothing:
            losses = (1 - self.smoothing) * losses - self.smoothing * logs.mean(1, keepdim=True)
        return losses

    def replace_by_gradient(self, raw: Tensor, labels: Tensor, gradient: bool) -> Tensor:
        """The loss of each token; its raw logits become their own gradient."""
        logs, slope = self.log_softmax(raw)
        losses, of_label = self.of_rows(logs, labels), logs.gather(1, labels)
        torch.exp(logs, out=raw)
        del logs  # of the size of the piece
        if self.smoothing:
            raw -= self.smoothing / raw.shape[1]
        # Exact where the softmax is close to 1.
        exact = of_label.expm1() + self.smoothing * (1 - 1 / raw.shape[1])
        raw.scatter_(1, labels, exact.to(raw.dtype))
        if slope is not None:
            raw *= slope
        return losses

    def kernel(self, hidden: Tensor) -> Kernel | None:
        """One that does the same in two passes over the logits, for the usual loss on a GPU; None: there is none."""
        usual = self.scale == 1 and self.cap is None and not self.smoothing
        return compiled_kernel() if usual and hidden.is_cuda and hidden.dtype in HALF else None

    def total(self, losses: Tensor, target: Tensor) -> Tensor:
        """Their sum or mean, in the order in which torch adds them."""
        first = torch.zeros_like(target).masked_fill_(target == self.ignored, self.ignored)
        return functional.nll_loss(
            -losses, first, ignore_index=self.ignored, reduction="mean" if self.mean else "sum"
        )


class _TokenPiece(NamedTuple):
    """Some tokens; `rows` are 1 for those whose label counts, else 0."""

    place: slice
    states: Tensor
    labels: Tensor
    rows: Tensor
    raw: Tensor
    filled: Tensor
    """The raw logits, with zeros for the classes that fill up the others."""


def _pieces(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignored: int, classes: int
) -> Iterator[_TokenPiece]:
    """Weight and bias may be filled up beyond the number of classes."""
    tokens = hidden.shape[0]
    counted = target != ignored
    labels = target.where(counted, 0).unsqueeze(1)
    rows = counted.unsqueeze(1).to(hidden.dtype)
    step = _tokens_at_once(tokens, classes)
    for start in range(0, tokens, step):
        place = slice(start, start + step)
        filled = _logits(hidden[place], weight, bias)
        yield _TokenPiece(place, hidden[place], labels[place], rows[place], filled[:, :classes], filled)


def _tokens_at_once(tokens: int, classes: int) -> int:
    """About equal pieces."""
    number = max(1, -(-tokens * classes // PIECE))
    return max(LEAST_TOKENS, -(-tokens // number))


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(states, weight, bias)


def _filled_up(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """With zeros for further classes, where that makes products faster."""
    missing = -weight.shape[0] % ALIGNMENT if weight.is_cuda and weight.dtype in HALF else 0
    if not missing:
        return weight, bias
    more = None if bias is None else functional.pad(bias, (0, missing))
    return functional.pad(weight, (0, 0, 0, missing)), more


class _HeadGradients(NamedTuple):
    """Of the hidden states, the weight and the bias; empty where they are not wanted."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    def add(self, piece: _TokenPiece, change: Tensor, weight: Tensor) -> None:
        """What a piece adds, whose logits have the gradient `change`."""
        if self.hidden.numel():
            self.hidden[piece.place] = (change @ weight).mul_(piece.rows)
        if self.weight.numel():
            _add_product(self.weight, change.t(), piece.states * piece.rows)
        if self.bias.numel():
            self.bias.add_((piece.rows.t() @ change).squeeze(0))


def _new_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, train_hidden: bool, train_weight: bool
) -> _HeadGradients:
    wide = torch.float32 if hidden.dtype.itemsize == 2 else hidden.dtype
    # A sum over all tokens may be beyond the range of float16.
    summed = wide if hidden.dtype is torch.float16 else hidden.dtype
    return _HeadGradients(
        hidden.new_empty(hidden.shape if train_hidden else (0,)),
        hidden.new_zeros(weight.shape if train_weight else (0,), dtype=summed),
        hidden.new_zeros(bias.shape if bias is not None and train_weight else (0,), dtype=wide),
    )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype is left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


@torch.library.custom_op("vpipe::head_loss", mutates_args=())
def head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: float,
    cap: float | None,
    smoothing: float,
    ignored: int,
    mean: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The loss of hidden states [tokens, size], for a weight [classes, size]."""
    loss = _CrossEntropy(scale, cap, smoothing, ignored, mean, dtype)
    losses = hidden.new_empty((hidden.shape[0], 1), dtype=dtype)
    kernel = loss.kernel(hidden)
    for piece in _pieces(hidden, *_filled_up(weight, bias), target, ignored, weight.shape[0]):
        if kernel:
            losses[piece.place] = kernel(piece.raw, piece.labels, False)
        else:
            losses[piece.place] = loss.of_rows(loss.log_softmax(piece.raw)[0], piece.labels)
    return loss.total(losses, target)


@torch.library.custom_op("vpipe::head_gradients", mutates_args=())
def head_gradients(
    gradient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: float,
    cap: float | None,
    smoothing: float,
    ignored: int,
    mean: bool,
    dtype: torch.dtype,
    train_hidden: bool,
    train_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, given that of the loss."""
    loss = _CrossEntropy(scale, cap, smoothing, ignored, mean, dtype)
    gradients = _new_gradients(hidden, weight, bias, train_hidden, train_weight)
    by = gradient / (target != ignored).sum() if mean else gradient
    for piece in _pieces(hidden, weight, bias, target, ignored, weight.shape[0]):
        logs, slope = loss.log_softmax(piece.raw)
        of_label = (-by * (1 - smoothing)).expand(piece.labels.shape)
        of_logs = torch.zeros_like(logs).scatter_(1, piece.labels, of_label)
        if smoothing:
            of_logs -= by * smoothing / logs.shape[1]
        change = torch._log_softmax_backward_data(of_logs, logs, 1, logs.dtype).to(hidden.dtype)
        gradients.add(piece, change if slope is None else change * slope, weight)
    return gradients


@torch.library.custom_op("vpipe::head_loss_and_gradients", mutates_args=())
def head_loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: float,
    cap: float | None,
    smoothing: float,
    ignored: int,
    mean: bool,
    dtype: torch.dtype,
    train_hidden: bool,
    train_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, the gradients of the summed losses, and the factor between these and the gradients of the loss."""
    loss = _CrossEntropy(scale, cap, smoothing, ignored, mean, dtype)
    classes = weight.shape[0]
    weight, bias = _filled_up(weight, bias)
    found = _new_gradients(hidden, weight, bias, train_hidden, train_weight)
    losses = hidden.new_empty((hidden.shape[0], 1), dtype=dtype)
    in_place = loss.kernel(hidden) or loss.replace_by_gradient
    for piece in _pieces(hidden, weight, bias, target, ignored, classes):
        losses[piece.place] = in_place(piece.raw, piece.labels, True)
        found.add(piece, piece.filled, weight)
    gradients = found.hidden, found.weight[:classes], found.bias[:classes]
    factor = torch.ones((), dtype=dtype, device=hidden.device)
    if mean:
        factor = factor / (target != ignored).sum().clamp_min(1)
    return loss.total(losses, target), *gradients, factor


@head_loss.register_fake
def _(hidden: Tensor, *rest: Any) -> Tensor:
    return hidden.new_empty((), dtype=rest[-1])


@head_gradients.register_fake
def _(gradient: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> _HeadGradients:
    return _new_gradients(hidden, weight, bias, *rest[-2:])


@head_loss_and_gradients.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    number = hidden.new_empty((), dtype=rest[-3])
    return number, *_new_gradients(hidden, weight, bias, *rest[-2:]), torch.empty_like(number)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _compute_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias = ctx.needs_input_grad[:3]
    found = torch.ops.vpipe.head_gradients(
        gradient, *ctx.saved_tensors, *ctx.settings, hidden, weight or bias
    )
    return *_wanted(found, ctx), *(None,) * 7


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *found = output
    ctx.mark_non_differentiable(*found)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*found)
    ctx.dtype = inputs[0].dtype


def _scale_gradients(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 12
    *found, factor = ctx.saved_tensors
    return *_wanted([(each * (gradient * factor)).to(ctx.dtype) for each in found], ctx), *(None,) * 9


def _wanted(found: Iterable[Tensor], ctx: Any) -> list[Tensor | None]:
    return [each if needed else None for each, needed in zip(found, ctx.needs_input_grad, strict=False)]


head_loss.register_autograd(_compute_gradients, setup_context=_keep_inputs)
head_loss_and_gradients.register_autograd(_scale_gradients, setup_context=_keep_gradients)
