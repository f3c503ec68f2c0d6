"""The head and the attention of language models: as a model computes them, and as a stage does; forward and backward.

    python benchmarks/head.py [--parts head,attention] [--rounds 5]

Head: time and peak memory of the product with the vocabulary's weight and the cross-entropy in bf16, for 8,192 tokens
of 1,024 numbers; in pieces (`vpipe/stage/head_loss.py`) with and without its Triton kernel. Attention: a mask and
repeated heads, as models are exported, and what `vpipe/graph/attention.py` makes of it. Without a GPU the sizes are
small, and the figures say nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from vpipe.stage import head_kernel, head_loss

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOKENS, SIZE = (8192, 1024) if GPU else (64, 16)
VOCABULARIES = (151936, 50257, 30522) if GPU else (301,)
SHAPES = ((16, 512), (4, 2048)) if GPU else ((2, 16),)
HEADS, GROUPS, WIDTH = 16, 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="head,attention")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name() if GPU else "no GPU", flush=True)
    if "head" in arguments.parts:
        kernel = head_kernel.compiled_kernel() if GPU else None
        print("Triton kernel:", "yes" if kernel else "no", flush=True)
        for classes in VOCABULARIES:
            measure_head(classes, arguments.rounds)
    if "attention" in arguments.parts:
        for samples, length in SHAPES:
            measure_attention(samples, length, arguments.rounds)


def measure_head(classes: int, rounds: int) -> None:
    hidden = torch.randn(TOKENS, SIZE, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(classes, SIZE, device=DEVICE) * 0.02).to(torch.bfloat16).requires_grad_()
    target = torch.randint(classes, (TOKENS,), device=DEVICE)

    def plain() -> Tensor:
        return functional.cross_entropy(functional.linear(hidden, weight).float(), target)

    def in_pieces() -> Tensor:
        settings = (1.0, None, 0.0, -100, True, torch.float32, True, True)
        return head_loss.head_loss_and_gradients(hidden, weight, None, target, *settings)[0]

    def report(name: str, loss: Callable[[], Tensor]) -> None:
        milliseconds, peak = measure(loss, [hidden, weight], rounds)
        print(f"head of {classes}, {name}: {milliseconds:.2f} ms, peak {peak:.0f} MiB", flush=True)

    report("plain", plain)
    for power in (26, 27, 28):
        with mock.patch.object(head_loss, "PIECE", 2**power):
            report(f"pieces of 2**{power}", in_pieces)
    with mock.patch.object(head_loss, "compiled_kernel", return_value=None):
        report("pieces without the kernel", in_pieces)
    with mock.patch.object(head_loss, "ALIGNMENT", 1):
        report("pieces without filling up", in_pieces)
    theirs = torch.autograd.grad(plain(), [hidden, weight])
    ours = torch.autograd.grad(in_pieces(), [hidden, weight])
    differences = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
    print(f"head of {classes}: gradients differ by {differences}", flush=True)


def measure_attention(samples: int, length: int, rounds: int) -> None:
    def heads(number: int) -> Tensor:
        shape = samples, number, length, WIDTH
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    query, key, value = heads(HEADS), heads(GROUPS), heads(GROUPS)
    mask = (
        torch.ones(length, length, device=DEVICE, dtype=torch.bool).tril().expand(samples, 1, length, length)
    )
    attention = functional.scaled_dot_product_attention

    def repeated(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(HEADS // GROUPS, 1)

    ways: dict[str, Callable[[], Tensor]] = {
        "mask, repeated heads": lambda: attention(query, repeated(key), repeated(value), mask).sum(),
        "causal, grouped heads": lambda: attention(query, key, value, is_causal=True, enable_gqa=True).sum(),
    }
    for name, compute in ways.items():
        milliseconds, peak = measure(compute, [query, key, value], rounds)
        where = f"attention of {samples} x {length}, {name}"
        print(f"{where}: {milliseconds:.3f} ms, peak {peak:.0f} MiB", flush=True)


def measure(loss: Callable[[], Tensor], leaves: list[Tensor], rounds: int) -> tuple[float, float]:
    """Milliseconds of a forward and a backward, and the MiB that they need at their peak."""

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss().backward()

    for _ in range(2):
        step()
    peak = 0.0
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated() - sum(leaf.nbytes for leaf in leaves)
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    for _ in range(rounds):
        step()
    if GPU:
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return (time.perf_counter() - begun) / rounds * 1e3, peak


if __name__ == "__main__":
    main()
