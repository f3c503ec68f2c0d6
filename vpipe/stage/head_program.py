"""The program of `head_kernel.py`, for one token: only Triton can import it."""

import triton
import triton.language as tl


@triton.jit
def loss_and_gradient(
    logits, labels, losses, stride, CLASSES: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    logits += token * stride
    label = tl.load(labels + token)
    largest = float("-inf")
    total = 0.0
    for start in range(0, CLASSES, BLOCK):
        places = start + tl.arange(0, BLOCK)
        values = tl.load(logits + places, mask=places < CLASSES, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(values))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger))
        largest = larger
    log_sum = largest + tl.log(total)
    tl.store(losses + token, log_sum - tl.load(logits + label).to(tl.float32))
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the label's logit before it is overwritten
        for start in range(0, CLASSES, BLOCK):
            places = start + tl.arange(0, BLOCK)
            inside = places < CLASSES
            values = tl.load(logits + places, mask=inside, other=float("-inf")).to(tl.float32)
            change = tl.exp(values - log_sum) - tl.where(places == label, 1.0, 0.0)
            tl.store(logits + places, change.to(logits.dtype.element_ty), mask=inside)
