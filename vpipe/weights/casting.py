"""Gradients on their way to the optimizer: cast to the dtype of the master tensors, many by one copy.

One cast a parameter would be one launch a parameter, and a GPU is done with most of them before the next is issued. So
parameters are taken in order, in buckets: one flat tensor, a view of it for each master, one copy into all of them.
A bucket's own gradients go before the next bucket is made, so that what lies there twice is never more than a bucket.
On a GPU that is nearly full there may be room for all of it but in no one place: then half a bucket is cast at a time.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from vpipe.weights.versions import flat_tensors

BUCKET = 16 * 2**20
"""Elements that are cast by one copy, at most; a larger parameter is a bucket of its own."""

Pair = tuple[nn.Parameter, nn.Parameter]
"""A parameter and its master."""


def hand_over_gradients(pairs: Iterable[Pair]) -> None:
    """Let each parameter's gradient be its master's, in the master's dtype: itself, where that is its own."""
    bucket: list[Pair] = []
    count = 0
    for parameter, master in pairs:
        if parameter.grad is None:
            continue
        if parameter.grad.dtype == master.dtype:
            master.grad, parameter.grad = parameter.grad, None
            continue
        if bucket and count + parameter.numel() > BUCKET:
            _cast(bucket)
            bucket, count = [], 0
        bucket.append((parameter, master))
        count += parameter.numel()
    if bucket:
        _cast(bucket)


@torch.no_grad()
def _cast(bucket: Sequence[Pair]) -> None:
    try:
        _, targets = flat_tensors([master for _, master in bucket])
    except torch.OutOfMemoryError:
        if len(bucket) == 1:
            raise
        half = len(bucket) // 2
        _cast(bucket[:half])
        _cast(bucket[half:])
        return
    torch._foreach_copy_(targets, [p.grad for p, _ in bucket if p.grad is not None])
    for (parameter, master), target in zip(bucket, targets, strict=True):
        master.grad, parameter.grad = target, None
