"""Split backward: products that return the input's gradient at once and defer the weight's.

The two gradients of a product y = x w cost about the same. The previous stage waits only for the input's; the weight's
may fill a bubble later. The functions here append the second to `context.deferred`. That work reads x and the gradient
of y but never the values of w, which may be another version by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from vpipe.stage.random import RandomContext

Deferred = list[partial[None]]
_convolution_backward = torch.ops.aten.convolution_backward.default


def waiting_tensors(deferred: Deferred) -> Iterator[Tensor]:
    """The inputs and gradients that deferred work holds."""
    for work in deferred:
        yield from work.args[:2]


class _Matrix(NamedTuple):
    """The computations of x @ w + b; `transposed` as in `linear`, whose weight is [out, in]."""

    transposed: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weight if self.transposed else weight.t(), bias)

    def input_gradient(self, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        return gradient @ (weight if self.transposed else weight.t())

    @torch.no_grad()
    def weight_gradients(self, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        rows, columns = gradient.flatten(0, -2), x.flatten(0, -2)
        left, right = (rows.t(), columns) if self.transposed else (columns.t(), rows)
        if weight.grad is None:
            weight.grad = left @ right
        else:
            weight.grad.addmm_(left, right)  # without a temporary
        if bias is not None:
            _accumulate(bias, rows.sum(0))


class _Convolution(NamedTuple):
    """The computations of a convolution."""

    geometry: tuple[Any, ...]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.aten.convolution.default(x, weight, bias, *self.geometry)

    def input_gradient(self, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
        return _convolution_backward(gradient, x, weight, None, *self.geometry, [True, False, False])[0]

    @torch.no_grad()
    def weight_gradients(self, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        sizes = None if bias is None else list(bias.shape)
        wanted = [False, True, bias is not None]
        _, own, own_bias = _convolution_backward(gradient, x, weight, sizes, *self.geometry, wanted)
        _accumulate(weight, own)
        if bias is not None:
            _accumulate(bias, own_bias)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class _SplitProduct(torch.autograd.Function):
    """A product whose weight, and bias if any, are trained parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: _Matrix | _Convolution,
        deferred: Deferred,
    ) -> Tensor:
        ctx.save_for_backward(x)
        # The parameters themselves: saved tensors come back as copies when the block is recomputed.
        ctx.weight, ctx.bias, ctx.product, ctx.deferred = weight, bias, product, deferred
        return product.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        # Detached: with its history it would hold every earlier product's context, and through it `deferred`.
        x = ctx.saved_tensors[0].detach()
        ctx.deferred.append(partial(ctx.product.weight_gradients, x, gradient, ctx.weight, ctx.bias))
        needed = ctx.needs_input_grad[0]
        return ctx.product.input_gradient(x, gradient, ctx.weight) if needed else None, None, None, None, None


def linear(context: RandomContext, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _SplitProduct.apply(x, weight, bias, _Matrix(transposed=True), context.deferred)


def addmm(context: RandomContext, bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    return _SplitProduct.apply(x, weight, bias, _Matrix(transposed=False), context.deferred)


def matmul(context: RandomContext, x: Tensor, weight: Tensor) -> Tensor:
    return _SplitProduct.apply(x, weight, None, _Matrix(transposed=False), context.deferred)


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
    single = x.ndim == dimensions + 1  # one image without a batch dimension
    images = x.unsqueeze(0) if single else x
    made = _SplitProduct.apply(images, weight, bias, _Convolution(geometry), context.deferred)
    return made.squeeze(0) if single else made


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
