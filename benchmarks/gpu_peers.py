"""torch.distributed.pipelining on the same four ranks, over the same channel (`channel_group.py`): a fair peer.

The same BERT, batch and precision. Its stages are cut between whole layers, where they are most even by our profile;
the head's weight is not tied to the embedding's, as this library knows no tied weights, so what vpipe exchanges for
that is spared here. Masks are all ones and left out.
"""

from __future__ import annotations

import copy
import time
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from channel_group import join_group
from gpu_bench import DTYPES, Bench, shares
from gpu_settings import RANKS
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional

from vpipe.communication import ProcessWorld
from vpipe.cost import Profile
from vpipe.errors import VPipeError
from vpipe.graph.partition import partition_for_ranks
from vpipe.weights.casting import hand_over_gradients

ROUND = tuple((rank,) for rank in range(RANKS))
V = (*ROUND, *reversed(ROUND))
SCHEDULES: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "GPipe": (pipelining.ScheduleGPipe, ROUND),
    "1F1B": (pipelining.Schedule1F1B, ROUND),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, ROUND * 2),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, ROUND * 2),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, V),
}
"""The schedule, and the rank of each stage."""


def peers(bench: Bench, profile: Profile, limits: dict[str, float]) -> None:
    for count in bench.settings.minibatches:
        for name in SCHEDULES:
            if bench.in_time():
                run_peer(bench, profile, limits, name, count)


def run_peer(bench: Bench, profile: Profile, limits: dict[str, float], name: str, count: int) -> None:
    bench.begin(None)
    row: dict[str, Any] = {"case": f"torch {name}", "batch": bench.batch, "minibatches": count}
    rate, peak = None, 0
    world = ProcessWorld(timeout=60)
    try:
        join_group(world, bench.device)
        trainer = PeerTrainer(bench, profile, name, count)
        row["partition"] = trainer.partition
        rate = trainer.pace()
        peak = bench.peak()
    except (RuntimeError, VPipeError) as error:  # torch tells of any failure within a stage as a RuntimeError
        row["error"] = reason(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        world.close()
    row["peak_bytes"] = bench.world.all_gather("peak", peak)
    if all(bench.world.all_gather("fits", rate is not None)) and rate is not None:
        row["samples_per_s"] = rate
        row |= shares(rate, limits, "step")
    bench.tell(**row)


def reason(error: BaseException) -> str:
    """What torch's wrapping around it leaves unsaid: the first line of the first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:100]


class PeerTrainer:
    """One rank's stages under one of the schedules, with its optimizer. The default group is made."""

    def __init__(self, bench: Bench, profile: Profile, name: str, count: int) -> None:
        self.bench, self.count = bench, count
        rank = dist.get_rank()
        kind, placement = SCHEDULES[name]
        self.partition = whole_layers(profile, placement)
        modules = stage_modules(bench, self.partition, [ranks[0] == rank for ranks in placement])
        stages = [
            pipelining.PipelineStage(module, index, len(placement), bench.device)
            for index, module in modules.items()
        ]
        single = len(placement) == RANKS
        self.schedule = kind(stages[0] if single else stages, n_microbatches=count, loss_fn=loss)
        self.optimizer = MasterOptimizer(
            bench, [p for module in modules.values() for p in module.parameters()]
        )
        batches = list(bench.data(bench.batch, count))
        first, last = 0 in modules, len(placement) - 1 in modules
        self.ids = (_joined(batches, "input_ids", bench.device),) if first else ()
        self.labels = _joined(batches, "labels", bench.device) if last else None

    def step(self) -> Tensor | None:
        """One update; the mean loss on the rank that has it. Who reads it lets the host wait."""
        losses: list[Tensor] = []
        self.schedule.step(*self.ids, target=self.labels, losses=losses, return_outputs=False)
        self.optimizer.step()
        return torch.stack(losses).mean() if losses else None

    def pace(self) -> float:
        """Samples a second over all ranks."""
        warm, steps = self.bench.updates(self.count)
        for _ in range(warm):
            self.step()
        self._finish()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._finish()
        return steps * self.count * self.bench.batch / (time.perf_counter() - start)

    def _finish(self) -> None:
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


class MasterOptimizer:
    """AdamW on float32 weights, whose copies the model computes with: what vpipe's `precision` does."""

    def __init__(self, bench: Bench, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.mixed = DTYPES[bench.precision] is not None
        self.masters = [nn.Parameter(p.detach().float()) for p in parameters] if self.mixed else parameters
        self.optimizer = bench.optimizer(list(self.masters))

    def step(self) -> None:
        if self.mixed:
            hand_over_gradients(zip(self.parameters, self.masters, strict=True))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.mixed:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)


class Embedding(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embeddings = model.bert.embeddings

    def forward(self, ids: Tensor) -> Tensor:
        return self.embeddings(input_ids=ids)


class Layer(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        made = self.layer(hidden)
        return made[0] if isinstance(made, tuple) else made


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


def whole_layers(profile: Profile, placement: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Pieces of each stage: the embedding with the first layer, each layer, the head; the busiest rank least busy."""
    blocks = [block.forward + block.backward for block in profile.blocks]
    layers = [sum(blocks[start : start + 2]) for start in range(0, len(blocks) - 1, 2)]
    return partition_for_ranks([round(1e9 * seconds) for seconds in (*layers, blocks[-1])], placement)


def stage_modules(bench: Bench, partition: tuple[int, ...], mine: list[bool]) -> dict[int, nn.Module]:
    """This rank's stages on its device, with weights as the model draws them."""
    model: Any = bench.model(bench.layers)
    layers = [Layer(layer) for layer in model.bert.encoder.layer]
    pieces: list[list[nn.Module]] = [[Embedding(model), layers[0]], *([layer] for layer in layers[1:])]
    pieces.append([model.cls])
    made: dict[int, nn.Module] = {}
    for index, (start, end) in enumerate(pairwise((0, *accumulate(partition)))):
        if mine[index]:
            module = nn.Sequential(*(copy.deepcopy(one) for piece in pieces[start:end] for one in piece))
            made[index] = _with_weights(module, bench)
    return made


def _with_weights(module: nn.Module, bench: Bench) -> nn.Module:
    """From `meta` to the device; norms are ones, the rest is drawn as BERT's is."""
    module = module.to_empty(device=bench.device)
    torch.manual_seed(0)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.LayerNorm):
                part.reset_parameters()
            elif isinstance(part, nn.Linear | nn.Embedding):
                part.weight.normal_(0.0, 0.02)
        for name, buffer in module.named_buffers():
            if name.endswith("position_ids"):
                buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))
            else:
                buffer.zero_()
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    dtype = DTYPES[bench.precision]
    return module if dtype is None else module.to(dtype)


def _joined(batches: list[dict[str, Tensor]], name: str, device: torch.device) -> Tensor:
    return torch.cat([batch[name] for batch in batches]).to(device)
