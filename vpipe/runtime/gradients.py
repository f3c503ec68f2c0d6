"""Gradients that several ranks must agree on: replicas of a stage, and stages that share a parameter.

Both begin when a rank's backwards of the update are done (REDUCE) and end when it makes the update (STEP). The sums are
equal to the bit on all ranks. Replicas add up flat buckets of their gradients (`communication/all_reduce.py`); holders
of a shared parameter send their parts to each other, and each adds all parts in the same order.

A parameter held by stages a < b < ... is one parameter, so all of them apply the same updates. In a synchronous
schedule they do so at once. In an asynchronous one stage b is ahead of stage a: it has run backward for minibatches
that a has not. Waiting for a would empty the pipeline, so b applies a tied update `lag` updates later, when a's part
has certainly been sent:

    stage 0   ... STEP4 applies update 4          stage 3   ... STEP8 applies update 4   (lag 4)

When the pipeline is drained the late ones catch up (`overdue`), and the copies are equal again.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations

import torch
from torch import Tensor

from vpipe.communication import AllReduce, CommunicationHandler
from vpipe.stage.precision import LossScale
from vpipe.stage.stage import Stage

Placement = tuple[tuple[int, ...], ...]
Parameters = list[torch.nn.Parameter]
MOST_BUCKETS = 4
"""Of a stage. Messages of two updates must fit into a channel's buffer, or a REDUCE would wait."""
BUCKET = 32 * 2**20
"""Bytes from which gradients are worth a second bucket."""


class GradientExchange:
    def __init__(
        self,
        handler: CommunicationHandler,
        placement: Placement,
        stages: Mapping[int, Stage],
        tied: Mapping[str, tuple[int, ...]],
        lag: int,
        loss_scale: LossScale,
    ) -> None:
        self.handler = handler
        self.rank = handler.rank
        self.placement = placement
        self.stages = stages
        self.tied = tied
        self.lag = lag
        self.loss_scale = loss_scale
        self._reductions: dict[tuple[int, int], list[tuple[Parameters, AllReduce]]] = {}  # (stage, update)
        self._parts: dict[tuple[str, int], Tensor] = {}  # (name on the wire, update) ▶ own part
        self._totals: dict[tuple[str, int], Tensor] = {}  # (name, update) ▶ sum of a tied parameter
        self._applied: dict[tuple[str, int], int] = defaultdict(int)  # (name, stage) ▶ updates applied
        for stage in range(len(placement)):
            handler.register_tensor(_replicas_name(stage))
        for name, holders in sorted(tied.items()):
            for stage in holders:
                handler.register_tensor(_tied_name(name, stage))

    def tied_of(self, stage: int) -> list[str]:
        return [name for name, holders in self.tied.items() if stage in holders]

    def send_parts(self, stage: int, update: int) -> None:
        """Send this rank's part of the stage's gradients to all ranks that need it."""
        optimizer = self.stages[stage].optimizer
        if len(self.placement[stage]) > 1:
            self._reductions[stage, update] = list(self._begin_reductions(stage, update))
        for name in self.tied_of(stage):
            parameter = optimizer.model_parameters[optimizer.names.index(name)]
            part = self.stages[stage].take_gradient(parameter)
            if part.dtype == torch.float16:
                # Unscaled before it leaves: it may be applied when the scale is another.
                part = part.float().div_(self.loss_scale.value)
            ranks = {rank for holder in self.tied[name] for rank in self.placement[holder]}
            self._send(_tied_name(name, stage), part, update, ranks)

    def sum_replicas(self, stage: int, update: int) -> None:
        """Replace the gradients of the stage's own parameters by their sums over the replicas."""
        if len(self.placement[stage]) == 1:
            return
        for parameters, reduction in self._reductions.pop((stage, update)):
            total = reduction.finish()
            for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter).to(parameter.dtype)

    def tied_gradients(self, stage: int, update: int) -> dict[str, Tensor]:
        """The tied parameters' gradients that this stage applies with its own update."""
        found = {}
        for name in self.tied_of(stage):
            due = update if stage == self.tied[name][0] else update - self.lag
            if due >= self._applied[name, stage]:
                found[name] = self._total(name, stage, due)
        return found

    def overdue(self, stage: int, updates: int) -> Iterable[dict[str, Tensor]]:
        """Tied gradients still to be applied when `updates` updates were begun and the pipeline is drained."""
        for name in self.tied_of(stage):
            while self._applied[name, stage] < updates:
                yield {name: self._total(name, stage, self._applied[name, stage])}

    def start_at(self, updates: int) -> None:
        """Continue as if every holder of a tied parameter had applied this many updates."""
        self._applied.update({(name, s): updates for s in self.stages for name in self.tied_of(s)})

    def applied(self, stage: int) -> dict[str, int]:
        """The updates of each tied parameter that this stage has applied."""
        return {name: self._applied[name, stage] for name in self.tied_of(stage)}

    def leftovers(self) -> list[str]:
        unused = (*self._reductions, *self._parts, *self._totals)
        return [f"gradient part {key} was not used" for key in unused]

    def groups(self) -> set[tuple[int, ...]]:
        """The lists of ranks that add up gradients, of all ranks."""
        return {ranks for ranks in self.placement if len(ranks) > 1}

    def pairs(self) -> set[tuple[int, int]]:
        """The (sending, receiving) ranks of gradients of shared parameters, of all ranks."""
        found: set[tuple[int, int]] = set()
        for holders in self.tied.values():
            found |= set(permutations({rank for stage in holders for rank in self.placement[stage]}, 2))
        return found

    def own_parameters(self, stage: int) -> list[torch.nn.Parameter]:
        optimizer = self.stages[stage].optimizer
        tied = set(self.tied_of(stage))
        return [p for n, p in zip(optimizer.names, optimizer.model_parameters, strict=True) if n not in tied]

    def _begin_reductions(self, stage: int, update: int) -> Iterator[tuple[Parameters, AllReduce]]:
        """Each bucket frees the gradients that it copies: both are there of one bucket at a time."""
        for number, parameters in enumerate(buckets(self.own_parameters(stage))):
            flat = torch.cat([_gradient_of(parameter).reshape(-1) for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None
            key = update * MOST_BUCKETS + number
            ranks = self.placement[stage]
            yield parameters, self.handler.all_reduce(_replicas_name(stage), key, flat, ranks)

    def _send(self, name: str, part: Tensor, update: int, ranks: Iterable[int]) -> None:
        """Keep this rank's part, and send it to the others of these ranks."""
        self._parts[name, update] = part
        for rank in ranks:
            if rank != self.rank:
                self.handler.send(name, part, update, rank)

    def _total(self, name: str, stage: int, update: int) -> Tensor:
        """The sum over all holders, made once and kept until every stage of this rank has read it."""
        key = (name, update)
        if key not in self._totals:
            holders = [(_tied_name(name, s), rank) for s in self.tied[name] for rank in self.placement[s]]
            self._totals[key] = self._sum(holders, update)
        total = self._totals[key]
        self._applied[name, stage] = update + 1
        if all(self._applied[name, s] > update for s in self.tied[name] if s in self.stages):
            del self._totals[key]
        return total

    def _sum(self, holders: list[tuple[str, int]], update: int) -> Tensor:
        """Add the parts of (name on the wire, rank) pairs in their order, own and received."""
        mine = next(self._parts[name, update] for name, rank in holders if rank == self.rank)
        dtype = torch.float32 if mine.dtype == torch.bfloat16 else mine.dtype  # it goes to a float32 master
        owner = (holders[0], update)
        total = None
        for name, rank in holders:
            if rank == self.rank:
                part = self._parts.pop((name, update))
            else:
                part = self.handler.recv(name, update, rank, mine.shape, mine.dtype, owner=owner)
            total = part.to(dtype, copy=True) if total is None else total.add_(part)
        self.handler.release(owner)
        assert total is not None
        return total


def buckets(parameters: Parameters) -> list[Parameters]:
    """Consecutive parameters, in a few buckets: the same on all replicas."""
    total = sum(parameter.nbytes for parameter in parameters)
    size = max(BUCKET, -(-total // MOST_BUCKETS))
    found: list[Parameters] = []
    filled = 0
    for parameter in parameters:
        bucket = filled // size
        while len(found) <= bucket:
            found.append([])
        found[bucket].append(parameter)
        filled += parameter.nbytes
    return [bucket for bucket in found if bucket]


def _replicas_name(stage: int) -> str:
    return f"gradients of stage {stage}"


def _tied_name(name: str, stage: int) -> str:
    return f"gradient of {name} in stage {stage}"


def _gradient_of(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
