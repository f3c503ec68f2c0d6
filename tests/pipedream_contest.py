"""vpipe's plan beside that of PipeDream's optimizer, for one of its profiles: one evaluator, equal memory.

Both are simulated as plans of the schedule `pipedream`. vpipe's plan may use as much memory on each rank as the fullest
rank of PipeDream's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tests.every_plan import seconds_of
from tests.pipedream_graphs import profile_of, read_graph
from tests.pipedream_optimizer import as_vpipe, optimize
from vpipe.cost import LinkCost, Profile
from vpipe.plan import PlanResult, plan
from vpipe.simulate import simulate

FAST, SLOW = 10e9, 1e9
"""Bytes a second between any two ranks."""
NEVER = 1e6
"""Seconds that recomputing or swapping would take."""


class Contest(NamedTuple):
    theirs: float
    """Seconds a minibatch."""
    their_replicas: tuple[int, ...]
    cap: int
    """Bytes of a rank."""
    ours: float
    our_memory: int
    result: PlanResult

    @property
    def is_better(self) -> float:
        """The share of time that vpipe's plan saves."""
        return 1 - self.ours / self.theirs


def contest(
    name: str, ranks: int, bandwidth: float, *, straight: bool = False, keep: bool = False
) -> Contest:
    """`straight`: PipeDream has one rank for each stage. `keep`: vpipe neither recomputes nor swaps, as PipeDream."""
    graph = read_graph(name)
    profile = profile_of(graph, LinkCost(bandwidth))
    stages = optimize(graph, ranks, bandwidth, 1 if straight else None)
    theirs = simulate(*as_vpipe(stages, graph, profile))
    cap = max(rank.memory.total for rank in theirs.ranks)
    profile = keeping(profile) if keep else profile
    result = plan(profile, ranks, cap, "pipedream")
    ours = simulate(profile, result.to_plan())
    replicas = tuple(stage.replicas for stage in stages)
    memory = max(rank.memory.total for rank in ours.ranks)
    return Contest(seconds_of(theirs), replicas, cap, seconds_of(ours), memory, result)


def keeping(profile: Profile) -> Profile:
    """The same where no plan recomputes or swaps, if another one fits."""
    blocks = (replace(block, recomputing=NEVER, swapping=NEVER) for block in profile.blocks)
    return replace(profile, blocks=tuple(blocks))
