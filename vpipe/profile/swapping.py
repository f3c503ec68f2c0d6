"""What it takes a rank to swap a block beyond the copies, which run beside its computing: its host asks for them.

On a GPU the host issues what the device computes, and is ahead of it as a rule. For a swapped block it packs and
unpacks every saved tensor and asks for every copy. Where that makes it slower than the device, the rank is.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import torch

from vpipe.profile.bench import Bench
from vpipe.profile.clocks import Lap
from vpipe.stage import StageModule
from vpipe.stage.host_store import HostStore, make_store
from vpipe.stage.swap import Swap

ISSUED, ISSUED_SWAPPED = "the host's part of F and B", "the same of a module that swaps"
ROUNDS = 7


def measure_swapping(benches: Iterable[Bench]) -> None:
    """Adds these laps, by the host's clock, to benches on a GPU."""
    for bench in benches:
        store = make_store(bench.device)
        swapping = StageModule(bench.stage, bench.whole, swap=bench.stage.blocks, compile=bench.compile)
        for _ in range(ROUNDS):
            bench.laps[ISSUED].append(_issued(bench, bench.whole, store))
            bench.laps[ISSUED_SWAPPED].append(_issued(bench, swapping, store))


def _issued(bench: Bench, module: StageModule, store: HostStore) -> Lap:
    torch.cuda.synchronize(bench.device)  # the host never has to wait for room in the queue
    swap = Swap(store)
    start = perf_counter()
    store.settle()
    bench.forward(module, swap)
    swap.leave()
    swap.fetch()
    bench.backward()
    end = perf_counter()
    bench.weights.skip()
    return start, end
