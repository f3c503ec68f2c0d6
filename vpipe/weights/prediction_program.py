"""The program of `prediction_kernel.py`, for one piece of one parameter: only Triton can import it."""

import triton
import triton.language as tl


@triton.jit
def write_expected(pointers, pieces, scales, rate, like, KIND: tl.constexpr, BLOCK: tl.constexpr):
    piece = pieces + 2 * tl.program_id(0)
    row = pointers + 5 * tl.load(piece)  # weights, first operand, second one, target, elements
    places = tl.load(piece + 1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < tl.load(row + 4)
    weights = tl.multiple_of(tl.load(row), 16).to(tl.pointer_type(tl.float32))
    operand = tl.multiple_of(tl.load(row + 1), 16).to(tl.pointer_type(tl.float32))
    target = tl.multiple_of(tl.load(row + 3), 16).to(like.dtype)
    weight = tl.load(weights + places, mask=inside, other=0.0)
    first = tl.load(operand + places, mask=inside, other=0.0)
    if KIND == 0:  # Adam: its two moments
        squares = tl.multiple_of(tl.load(row + 2), 16).to(tl.pointer_type(tl.float32))
        second = tl.load(squares + places, mask=inside, other=1.0)
        expected = weight + first / ((tl.sqrt(second) + tl.load(scales)) * tl.load(scales + 1))
    elif KIND == 1:  # a momentum
        expected = weight + rate * first
    else:  # the weights before the last update
        expected = weight + rate * (first - weight)
    tl.store(target + places, expected.to(like.dtype.element_ty), mask=inside)
