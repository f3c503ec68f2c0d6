"""Gradients that several ranks must agree on: replicas of a stage, and stages that share a parameter.

Both begin when a rank's backwards of the update are done (REDUCE) and end when it makes the update (STEP). The sums are
equal to the bit on all ranks. Replicas add up flat buckets of their gradients (`communication/all_reduce.py`), each as
soon as the last backward has made its gradients (`buckets.py`); holders of a shared parameter send their parts to each
other, and each adds all parts in the same order.

A parameter held by stages a < b < ... is one parameter, so all of them apply the same updates. In a synchronous
schedule they do so at once. In an asynchronous one stage b is ahead of stage a: it has run backward for minibatches
that a has not. Waiting for a would empty the pipeline, so b applies a tied update `lag` updates later, when a's part
has certainly been sent:

    stage 0   ... STEP4 applies update 4          stage 3   ... STEP8 applies update 4   (lag 4)

When the pipeline is drained the late ones catch up (`overdue`), and the copies are equal again.

So the last stage, whose own weights are never stale, has a tied parameter that is `lag` updates old. With `split_tied`
(`staleness:`) an update of it is the last holder's part of that update and the parts of the others of the update `lag`
before, which are there by then. Every holder applies it with its own STEP:

    stage 0   ... STEP8 applies 8 of stage 3, 4 of stage 0          stage 3   ... STEP8 applies the same

When the pipeline is drained, parts that are not applied yet are added up and kept with the optimizer's state
(`postpone`): they are part of the next update, also of a run that is resumed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from vpipe.communication import AllReduce, CommunicationHandler
from vpipe.communication.error_feedback import ErrorFeedback
from vpipe.runtime.buckets import MOST_BUCKETS, StageBuckets
from vpipe.stage.precision import LossScale
from vpipe.stage.stage import Stage

Placement = tuple[tuple[int, ...], ...]


class GradientExchange:
    def __init__(
        self,
        handler: CommunicationHandler,
        placement: Placement,
        stages: Mapping[int, Stage],
        tied: Mapping[str, tuple[int, ...]],
        lag: int,
        loss_scale: LossScale,
        split_from: int | None = None,
    ) -> None:
        """`split_from`: the first update of which tied parameters are split; None: none is."""
        self.handler = handler
        self.rank = handler.rank
        self.placement = placement
        self.stages = stages
        self.tied = tied
        self.lag = lag
        self.loss_scale = loss_scale
        self.split_from = split_from
        self._drained = 0  # updates when the pipeline was empty last
        self._kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}  # of the parts of tied parameters
        self._parts: dict[tuple[str, int], Tensor] = {}  # (name on the wire, update) ▶ own part
        self._totals: dict[tuple[str, int], Tensor] = {}  # (name, update) ▶ sum of a tied parameter
        self._applied: dict[tuple[str, int], int] = defaultdict(int)  # (name, stage) ▶ updates applied
        for stage, ranks in enumerate(placement):
            for bucket in range(MOST_BUCKETS if len(ranks) > 1 else 0):
                handler.register_tensor(_bucket_name(stage, bucket))
        for name, holders in sorted(tied.items()):
            for stage in holders:
                handler.register_tensor(_tied_name(name, stage))
        self._feedback: dict[tuple[int, int], ErrorFeedback | None] = {}  # (stage, bucket)
        self._buckets = {
            stage: StageBuckets(self.own_parameters(stage), partial(self._begin_sum, stage))
            for stage in stages
            if len(placement[stage]) > 1
        }
        for stage in self._buckets:
            stages[stage].watch_gradients()

    def tied_of(self, stage: int) -> list[str]:
        return [name for name, holders in self.tied.items() if stage in holders]

    def await_gradients(self, stage: int, update: int) -> None:
        """The stage's next backward on this rank is the last one of the update."""
        buckets, own = self._buckets.get(stage), self.stages[stage]
        # Modules that run as they are may add to a gradient several times in one backward, and a pool of CUDA graphs
        # looks at all gradients behind it.
        if buckets is not None and own.graph.trace.boundaries is None and own.graph_pool is None:
            buckets.await_gradients(update)
            own.gradients_ready = buckets.ready

    def send_parts(self, stage: int, update: int) -> None:
        """Send this rank's part of the stage's gradients to all ranks that need it."""
        optimizer = self.stages[stage].optimizer
        if buckets := self._buckets.get(stage):
            buckets.begin_all(update)
        for name in self.tied_of(stage):
            parameter = optimizer.model_parameters[optimizer.names.index(name)]
            part = self.stages[stage].take_gradient(parameter)
            if part.dtype == torch.float16:
                # Unscaled before it leaves: it may be applied when the scale is another.
                part = part.float().div_(self.loss_scale.value)
            self._kinds[name] = part.shape, part.dtype
            ranks = {rank for holder in self.tied[name] for rank in self.placement[holder]}
            self._send(_tied_name(name, stage), part, update, ranks)

    def sum_replicas(self, stage: int, update: int) -> None:
        """Replace the gradients of the stage's own parameters by their sums over the replicas."""
        if buckets := self._buckets.get(stage):
            buckets.finish(update)

    def tied_gradients(self, stage: int, update: int) -> dict[str, Tensor]:
        """The tied parameters' gradients that this stage applies with its own update."""
        found = {}
        for name in self.tied_of(stage):
            at_once = stage == self.tied[name][0] or self._is_split(update)
            due = update if at_once else update - self.lag
            if due >= self._applied[name, stage]:
                found[name] = self._total(name, stage, due)
                late = self.stages[stage].optimizer.take_late(name)
                if late is not None:
                    found[name] = found[name] + late
        return found

    def overdue(self, stage: int, updates: int) -> Iterable[dict[str, Tensor]]:
        """Tied gradients still to be applied when `updates` updates were begun and the pipeline is drained."""
        for name in self.tied_of(stage):
            while self._applied[name, stage] < updates:
                yield {name: self._total(name, stage, self._applied[name, stage])}

    def postpone(self, updates: int) -> None:
        """The pipeline is drained: keep the parts that no update has had, as one sum, for the next update."""
        first = max(self._split_since, updates - self.lag) if self._is_split(updates - 1) else updates
        self._drained = updates
        for name in (
            {name for stage in self.stages for name in self.tied_of(stage)} if first < updates else ()
        ):
            late = [
                part
                for update in range(first, updates)
                for stage in self.tied[name][:-1]
                for part in self._parts_of(name, stage, update)
            ]
            total = self._sum(name, late)
            for stage in self.tied[name]:
                if stage in self.stages:
                    self.stages[stage].optimizer.keep_late(name, total)

    def start_at(self, updates: int) -> None:
        """Continue as if every holder of a tied parameter had applied this many updates."""
        self.forget_lost()
        self._drained = updates
        self._applied.update({(name, s): updates for s in self.stages for name in self.tied_of(s)})

    def forget_lost(self) -> None:
        """What compression has lost is in no checkpoint: a run that saves goes on like one that was resumed."""
        for feedback in filter(None, self._feedback.values()):
            feedback.clear()

    def applied(self, stage: int) -> dict[str, int]:
        """The updates of each tied parameter that this stage has applied."""
        return {name: self._applied[name, stage] for name in self.tied_of(stage)}

    def leftovers(self) -> list[str]:
        sums = [(stage, update) for stage, of in self._buckets.items() for update in of.unfinished()]
        unused = (*sums, *self._parts, *self._totals)
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

    def _begin_sum(self, stage: int, update: int, bucket: int, flat: Tensor) -> AllReduce:
        ranks, key = self.placement[stage], (stage, bucket)
        if key not in self._feedback:
            self._feedback[key] = self.handler.error_feedback(ranks)
        scale = self.loss_scale.value
        return self.handler.all_reduce(
            _bucket_name(stage, bucket), update, flat, ranks, self._feedback[key], scale
        )

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
            late = update - self.lag if self._is_split(update) else update
            due = {s: update if s == self.tied[name][-1] else late for s in self.tied[name]}
            first = self._split_since if self._is_split(update) else 0
            parts = [p for s, u in due.items() if u >= first for p in self._parts_of(name, s, u)]
            self._totals[key] = self._sum(name, parts)
        total = self._totals[key]
        self._applied[name, stage] = update + 1
        if all(self._applied[name, s] > update for s in self.tied[name] if s in self.stages):
            del self._totals[key]
        return total

    @property
    def _split_since(self) -> int:
        """The first update whose parts come at different times: those before it were complete, or are kept as a sum."""
        return max(self._drained, self.split_from or 0)

    def _is_split(self, update: int) -> bool:
        return self.split_from is not None and update >= self.split_from

    def _parts_of(self, name: str, stage: int, update: int) -> list[tuple[str, int, int]]:
        """Name on the wire, update and rank of each part that this holder's replicas have."""
        return [(_tied_name(name, stage), update, rank) for rank in self.placement[stage]]

    def _sum(self, name: str, parts: list[tuple[str, int, int]]) -> Tensor:
        """Add these parts of a tied parameter in their order, own and received."""
        shape, kind = self._kinds[name]
        dtype = torch.float32 if kind == torch.bfloat16 else kind  # it goes to a float32 master
        owner = parts[0]
        total = None
        for wire, update, rank in parts:
            if rank == self.rank:
                part = self._parts.pop((wire, update))
            else:
                part = self.handler.recv(wire, update, rank, shape, kind, owner=owner)
            total = part.to(dtype, copy=True) if total is None else total.add_(part)
        self.handler.release(owner)
        assert total is not None
        return total


def _bucket_name(stage: int, bucket: int) -> str:
    return f"gradients of stage {stage}, bucket {bucket}"


def _tied_name(name: str, stage: int) -> str:
    return f"gradient of {name} in stage {stage}"
