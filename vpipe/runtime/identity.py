"""A rank's place in the pipeline, under the guides' names."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, takewhile

from torch import nn

from vpipe.communication import CommunicationHandler
from vpipe.runtime.routes import Link, Routes
from vpipe.runtime.updates import Updates
from vpipe.schedule import Op
from vpipe.stage.stage import Stage


class StageIdentity:
    """Read-only facts of a rank. Where it holds several stages, `stage` and its neighbours are those of the first."""

    rank: int
    stages: Mapping[int, Stage]
    routes: Routes
    handler: CommunicationHandler
    updates: Updates

    @property
    def local_rank(self) -> int | None:
        """Its number among the ranks of its host; None: its launcher does not say."""
        return self.handler.world.local_rank

    @property
    def num_ranks(self) -> int:
        return self.routes.schedule.num_ranks

    @property
    def num_stages(self) -> int:
        return self.routes.schedule.num_stages

    @property
    def stage(self) -> int:
        return min(self.stages)

    @property
    def rank_in_stage(self) -> int:
        """Its number among the replicas of its stage."""
        return self._ranks_of(self.stage).index(self.rank)

    @property
    def num_ranks_in_stage(self) -> int:
        return len(self._ranks_of(self.stage))

    @property
    def ranks_in_previous_stage(self) -> list[int]:
        return self._ranks_of(self.stage - 1)

    @property
    def ranks_in_next_stage(self) -> list[int]:
        return self._ranks_of(self.stage + 1)

    @property
    def num_warmup_minibatches(self) -> int:
        """Forwards of this rank before its first backward, without the one that belongs to it."""
        ops = (action.op for action in self.routes.schedule.program(self.rank))
        before = list(takewhile(lambda op: op not in (Op.B, Op.I), ops))
        return before.count(Op.F) - 1

    @property
    def send_ranks(self) -> dict[str, list[int]]:
        """The ranks that each value is sent to: `{'out5': [2, 3]}`."""
        return _ranks(chain.from_iterable(route.sent for route in self.routes.all_of(self.stages)))

    @property
    def receive_ranks(self) -> dict[str, list[int]]:
        """The ranks that each value comes from."""
        return _ranks(chain.from_iterable(route.received for route in self.routes.all_of(self.stages)))

    @property
    def tensor_tags(self) -> dict[str, int]:
        return self.handler.tensor_tags

    @property
    def is_criterion(self) -> bool:
        """Whether this rank computes the loss."""
        return any(stage.graph.is_criterion for stage in self.stages.values())

    @property
    def model_parameters(self) -> list[nn.Parameter]:
        return [p for stage in self.stages.values() for p in stage.optimizer.model_parameters]

    @property
    def master_parameters(self) -> list[nn.Parameter]:
        """What the base optimizers step: float32 copies in mixed precision."""
        return [p for stage in self.stages.values() for p in stage.optimizer.master_parameters]

    @property
    def loss_scale(self) -> float:
        """1 unless the model computes in fp16."""
        return self.updates.loss_scale.value

    def _ranks_of(self, stage: int) -> list[int]:
        placement = self.routes.schedule.placement
        return list(placement[stage]) if 0 <= stage < len(placement) else []


def _ranks(links: chain[Link]) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for link in links:
        found.setdefault(link.value, set()).add(link.rank)
    return {value: sorted(ranks) for value, ranks in found.items()}
