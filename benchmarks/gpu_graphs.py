"""The gain of CUDA graphs where nothing else is done: layers on four ranks at once, run eagerly and replayed."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from gpu_bench import DTYPES, Bench
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertLayer

from vpipe.cost import Profile

LAYERS = 6
"""What a quarter of BERT-large has."""
SIZES = (8, 16, 64)
ROUNDS, PASSES = 5, 20


class Layers(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            made = layer(hidden)
            hidden = made if isinstance(made, Tensor) else made[0]
        return hidden


def graphs(bench: Bench, profile: Profile, limits: dict[str, float]) -> None:
    """Forward and backward of the layers, with no messages and no updates: samples a second of all ranks together."""
    if bench.device.type != "cuda":
        bench.tell(case="CUDA graphs", error="there are none on a CPU")
        return
    config: Any = bench.model(bench.layers).config
    dtype = DTYPES[bench.precision] or torch.float32
    with bench.device:
        made = Layers([BertLayer(config) for _ in range(LAYERS)]).to(dtype)
    for size in SIZES:
        hidden = torch.randn(size, bench.settings.length, config.hidden_size, device=bench.device).to(dtype)
        hidden.requires_grad_()
        plain = passing(made, hidden)
        # Of copies: a module whose forward is captured is changed.
        replayed = passing(torch.cuda.make_graphed_callables(deepcopy(made), (hidden,)), hidden)
        rates: dict[str, list[float]] = {"issued one by one": [], "replayed as a CUDA graph": []}
        for _ in range(ROUNDS):
            for name, work in zip(rates, (plain, replayed), strict=True):
                rates[name].append(rate(bench, work, size))
        for name, found in rates.items():
            row = {"case": f"{LAYERS} layers a rank, {name}", "batch": size, "samples_per_s": median(found)}
            bench.tell(**row)


def passing(module: Callable[[Tensor], Tensor], hidden: Tensor) -> Callable[[], None]:
    gradient = torch.ones_like(hidden)

    def work() -> None:
        hidden.grad = None
        module(hidden).backward(gradient)

    return work


def rate(bench: Bench, work: Callable[[], None], size: int) -> float:
    """Samples a second of all ranks, which begin at the same time."""
    work()
    torch.cuda.synchronize()
    bench.world.all_gather("ready", None)
    start = time.perf_counter()
    for _ in range(PASSES):
        work()
    torch.cuda.synchronize()
    own = PASSES * size / (time.perf_counter() - start)
    return sum(bench.world.all_gather("rate", own))
