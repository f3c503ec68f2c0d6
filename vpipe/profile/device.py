"""The device of a rank: its memory, its link to the host, and the runtime's own time for an action."""

from __future__ import annotations

from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import nn

from vpipe.communication import HOST, InProcessWorld
from vpipe.communication.compression import MODES, pack, unpack
from vpipe.cost import DeviceCost
from vpipe.graph import capture
from vpipe.pipeline.threads import run_ranks
from vpipe.profile.measured_stage import MeasuredStage, seconds
from vpipe.profile.outside import measure_outside
from vpipe.profile.rounds import BACKWARD, FORWARD, run_rounds
from vpipe.stage.host_store import make_store
from vpipe.system.host_memory import cores, total_memory

COPIED, COUNT = 2 * 2**20, 16
"""Bytes of a tensor, such as a layer saves, and how many there are."""
REPEATS = 9
ADDED = 2**24
"""Elements of a gradient that stages share, such as an embedding's."""
SLACK = 10 * 2**20
"""Half of a piece in which torch's allocator takes memory from a GPU for tensors of 1 to 10 MB."""
PACKED = 2**18
"""Numbers of a value that is compressed."""
MINIBATCHES, UPDATES, WARM = 8, 12, 2
"""Of an update, and updates, by which the runtime's own time is measured."""


def measure_device(device: torch.device = HOST, *, nccl: bool = True) -> DeviceCost:
    """`nccl`: whether NCCL may connect the ranks, which takes memory of a GPU."""
    to_host, from_host = _host_bandwidth(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        outside = measure_outside(device, nccl=nccl)
        return DeviceCost(
            total,
            to_host,
            from_host,
            workspace=_workspace(device),
            swapped_in=3,
            **measure_packing(device),
            **outside._asdict(),
        )
    return DeviceCost(
        total_memory(),
        to_host,
        from_host,
        measure_overhead(),
        at_once=max(1.0, cores() / torch.get_num_threads()),
        **measure_packing(device),
    )


def measure_packing(device: torch.device) -> dict[str, Any]:
    """Seconds a byte to pack and unpack float32, by the field that holds them."""
    value = torch.ones(PACKED, device=device)
    found: dict[str, Any] = {}
    for mode in MODES[1:]:
        taken = []
        for _ in range(REPEATS):
            start = _now(device)
            unpack(pack(value, mode), mode, value.shape, value.dtype)
            taken.append(_now(device) - start)
        found[f"pack_{mode}"] = median(taken[1:]) / value.nbytes
    return found


def measure_adding(device: torch.device, dtype: torch.dtype | None, copied: bool) -> float:
    """Seconds a byte to add up two parts of a gradient, as `runtime/gradients.py` does; `copied`: one of them first."""
    if device.type != "cuda":
        return 0.0  # copying the messages takes longer
    part, taken = torch.ones(ADDED, dtype=dtype, device=device), []
    for _ in range(REPEATS):
        start = _now(device)
        own = part.clone() if copied else part
        own.to(torch.float32, copy=True).add_(part)
        taken.append(_now(device) - start)
    return median(taken[1:]) / part.nbytes


def _host_bandwidth(device: torch.device) -> tuple[float, float]:
    """Bytes a second out and back, through the store that swapping uses."""
    store = make_store(device)
    tensors = [torch.ones(COPIED, dtype=torch.uint8, device=device) for _ in range(COUNT)]
    out, back = [], []
    for _ in range(REPEATS):
        start = _now(device)
        tickets = store.put(tensors)
        tensors.clear()  # as a forward's end drops them
        store.settle()
        there = _now(device)
        store.fetch(tickets)
        tensors = [store.take(ticket) for ticket in tickets]
        out.append(there - start)
        back.append(_now(device) - there)
    return COUNT * COPIED / median(out[1:]), COUNT * COPIED / median(back[1:])


def _workspace(device: torch.device) -> int:
    """What cuBLAS holds for the two threads of a rank that multiply: its own, and autograd's."""
    torch._C._cuda_clearCublasWorkspaces()  # else those of earlier products are there already
    before = torch.cuda.memory_allocated(device)
    _multiply(device)
    return torch.cuda.memory_allocated(device) - before


def _multiply(device: torch.device) -> None:
    """Forward and backward; nothing of it is left but what the library keeps."""
    one = torch.ones(256, 256, device=device, requires_grad=True)
    (one @ one).sum().backward()


def _now(device: torch.device) -> float:
    """The time when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def measure_overhead() -> float:
    """Seconds of the runtime for a forward or backward: a pipeline that computes nearly nothing, less its bare module.

    Updates and messages are measured elsewhere.
    """
    with torch.random.fork_rng(devices=[]):
        (update,) = run_ranks(1, _train)
        model, batch = _tiny()
        graph = capture(model, batch, nn.functional.mse_loss)
        (stage,) = graph.stages((len(graph.blocks),))
        module = MeasuredStage(stage, model, _optimizer, None, {}, graph.batch_fields(batch), HOST)
        run_rounds([[module]], 50, 50, 0.0)
    bare = sum(median(map(seconds, module.intervals[phase])) for phase in (FORWARD, BACKWARD))
    return max(0.0, (update / MINIBATCHES - bare) / 2)


def _train(world: InProcessWorld) -> float:
    """Seconds of an update."""
    from vpipe.pipeline import Pipeline

    model, batch = _tiny()
    with Pipeline(
        model,
        batch,
        loss_fn=nn.functional.mse_loss,
        device=HOST,
        optimizer=_optimizer,
        schedule="1f1b",
        minibatches=MINIBATCHES,
        world=world,
    ) as pipe:
        before, taken = thread_time(), []
        for _ in pipe.train(batch for _ in range(MINIBATCHES * (WARM + UPDATES))):
            now = thread_time()
            taken.append(now - before)
            before = now
    return median(taken[WARM:])


def _tiny() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.zeros(2, 8), torch.zeros(2, 8))


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.0)
