"""Casting of gradients to the dtype of the master tensors, many by one copy.

A copy for each parameter would be a kernel launch for each, and a GPU finishes most of these before the host launches
the next. So gradients are cast in buckets: one flat tensor, a view of it for each master, one copy into all views. A
bucket's old gradients are freed before the next bucket is made, so at most one bucket is held twice. If a nearly full
GPU has no contiguous memory for a bucket, its halves are cast one after the other.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from vpipe.weights.versions import flat_tensors

BUCKET = 16 * 2**20
"""Most elements that are cast by one copy; a larger parameter is a bucket of its own."""

Pair = tuple[nn.Parameter, nn.Parameter]
"""A parameter and its master."""


def hand_over_gradients(pairs: Iterable[Pair]) -> None:
    """Move each parameter's gradient to its master, in the master's dtype; one that has it already is not copied."""
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
