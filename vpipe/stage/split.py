"""Split backward: products that return the input's gradient at once and defer the weight's.

The two gradients of a product y = x w cost about the same. The previous stage waits only for the input's; the weight's
may fill a bubble later. The functions here append the second to `context.deferred`. That work reads x and the gradient
of y but never the values of w, which may be another version by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from vpipe.stage.random import RandomContext

Deferred = list[partial[None]]


def waiting_tensors(deferred: Deferred) -> Iterator[Tensor]:
    """The inputs and gradients that deferred work holds."""
    for work in deferred:
        yield from work.args[:2]


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


def _accumulate_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T right to the gradient, without a temporary once there is one."""
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = left.t() @ right
        else:
            parameter.grad.addmm_(left.t(), right)


def _product_gradients(
    x: Tensor, gradient: Tensor, weight: Tensor | None, bias: Tensor | None, transposed: bool
) -> None:
    rows, columns = gradient.flatten(0, -2), x.flatten(0, -2)
    if weight is not None:
        _accumulate_product(weight, *((rows, columns) if transposed else (columns, rows)))
    if bias is not None:
        _accumulate(bias, rows.sum(0))


class _Product(torch.autograd.Function):
    """x @ w + b for a parameter w; `transposed` as in `linear`, whose weight is [out, in]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, deferred: Deferred
    ) -> Tensor:
        ctx.save_for_backward(x)
        # The parameters themselves: saved tensors come back as copies when the block is recomputed.
        ctx.weight, ctx.bias, ctx.transposed, ctx.deferred = weight, bias, transposed, deferred
        matrix = weight if transposed else weight.t()
        return torch.nn.functional.linear(x, matrix, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        # Detached: with its history it would hold every earlier product's context, and through it `deferred`.
        x = ctx.saved_tensors[0].detach()
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weight, transposed = ctx.weight, ctx.transposed
        graded = (weight if needs_weight else None, ctx.bias if needs_bias else None)
        ctx.deferred.append(partial(_product_gradients, x, gradient, *graded, transposed))
        input_gradient = gradient @ (weight if transposed else weight.t()) if needs_input else None
        return input_gradient, None, None, None, None


def _convolution_gradients(
    x: Tensor,
    gradient: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    backward: Callable[[list[bool]], tuple[Tensor, ...]],
) -> None:
    _, own, own_bias = backward([False, weight is not None, bias is not None])
    if weight is not None:
        _accumulate(weight, own)
    if bias is not None:
        _accumulate(bias, own_bias)


class _Convolution(torch.autograd.Function):
    """A convolution whose weight and bias are parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: tuple[Any, ...],
        deferred: Deferred,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.geometry, ctx.deferred = weight, bias, geometry, deferred
        return torch.ops.aten.convolution.default(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x = ctx.saved_tensors[0].detach()  # without its history, as above
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        sizes = None if ctx.bias is None else list(ctx.bias.shape)
        backward = partial(
            torch.ops.aten.convolution_backward.default, gradient, x, ctx.weight, sizes, *ctx.geometry
        )
        graded = (ctx.weight if needs_weight else None, ctx.bias if needs_bias else None)
        ctx.deferred.append(partial(_convolution_gradients, x, gradient, *graded, backward))
        input_gradient = backward([True, False, False])[0] if needs_input else None
        return input_gradient, None, None, None, None


def linear(context: RandomContext, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Product.apply(x, weight, bias, True, context.deferred)


def addmm(context: RandomContext, bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    return _Product.apply(x, weight, bias, False, context.deferred)


def matmul(context: RandomContext, x: Tensor, weight: Tensor) -> Tensor:
    return _Product.apply(x, weight, None, False, context.deferred)


def convolution(
    context: RandomContext,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    dimensions = weight.ndim - 2

    def each(value: Any) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * dimensions if len(values) == 1 else values

    geometry = (each(stride), each(padding), each(dilation), False, [0] * dimensions, groups)
    if x.ndim == dimensions + 1:  # one image without a batch dimension
        return _Convolution.apply(x.unsqueeze(0), weight, bias, geometry, context.deferred).squeeze(0)
    return _Convolution.apply(x, weight, bias, geometry, context.deferred)


# operator -> (replacement, position of the weight, position of the bias)
_PRODUCTS: dict[Any, tuple[Callable[..., Tensor], int, int | None]] = {
    torch.ops.aten.linear.default: (linear, 1, 2),
    torch.ops.aten.addmm.default: (addmm, 2, 0),
    torch.ops.aten.mm.default: (matmul, 1, None),
    torch.ops.aten.matmul.default: (matmul, 1, None),
    torch.ops.aten.conv1d.default: (convolution, 1, 2),
    torch.ops.aten.conv2d.default: (convolution, 1, 2),
    torch.ops.aten.conv3d.default: (convolution, 1, 2),
}


def split_product(node: fx.Node, trained: Collection[Any], context: fx.Node) -> None:
    """Replace the operation by its split form if its weight (and bias, if any) is a trained parameter itself."""
    if node.target not in _PRODUCTS or node.kwargs:
        return
    replacement, weight, bias = _PRODUCTS[node.target]
    if len(node.args) <= weight or node.args[weight] not in trained:
        return
    given = node.args[bias] if bias is not None and bias < len(node.args) else None
    if given is not None and given not in trained:
        return
    node.target = replacement
    node.args = (context, *node.args)
