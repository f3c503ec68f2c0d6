"""The plan that was found, with what it needs and what is expected of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vpipe.cost import KEEP, Plan, Profile, StaleTraining, taking_turns
from vpipe.plan.chunks import PositionHolding
from vpipe.plan.model import Slice, StageMemory, Time, stage_time
from vpipe.plan.task import Task
from vpipe.schedule import ScheduleKind
from vpipe.schedule.program import Placement, in_order
from vpipe.simulate import simulate
from vpipe.simulate.arrange import arrange
from vpipe.simulate.traffic import HostTraffic


class StagePlan(NamedTuple):
    number: int
    slice: Slice
    policies: tuple[str, ...]


@dataclass(frozen=True)
class RankPlan:
    """One position of the pipeline: what each of its ranks holds, needs and takes."""

    ranks: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    memory: StageMemory
    time: Time
    limit: str
    """What its time is made of: compute; memory, where recompute or swap makes it longer; or link."""

    @property
    def seconds(self) -> float:
        """Replicas take turns."""
        return self.time.seconds / len(self.ranks)


@dataclass(frozen=True)
class PlanResult:
    kind: ScheduleKind
    cap: int
    partition: tuple[int, ...]
    policies: tuple[str, ...]
    """Of every block: keep, recompute or swap."""
    replicas: tuple[int, ...]
    minibatches: int | None
    chunks: int | None
    update_interval: int | None
    batch_size: int
    fingerprint: str
    positions: tuple[RankPlan, ...]
    seconds: float
    """Expected, a minibatch: what `vpipe simulate` says of the plan (until it is simulated, of the slowest rank)."""
    depth: tuple[int, ...] = ()
    """Of each stage; empty: the schedule's own."""
    placement: Placement = ()
    """The ranks of each position; empty: numbered position by position."""
    hosts: tuple[HostTraffic, ...] = ()
    """What goes between hosts; empty: there is only one."""
    gap: float | None = None
    """How much faster than this another plan may be at most, as a share; None: none is."""
    sample_factor: float = 1.0
    """Samples to equal loss, as a multiple of those of a synchronous schedule, where plans are chosen by it."""
    idle: int = 0
    """The last ranks, which have no stage: every plan that was found for more of them is slower, or does not fit."""
    turns: str | None = None
    """A line about ranks that take turns, for which a host has too few cores."""
    faster: PlanResult | None = None
    """The plan with the most samples a second, if it would be later at equal loss than this one."""

    @property
    def seconds_to_loss(self) -> float:
        """Of a minibatch, and of what a delay makes necessary in addition."""
        return self.seconds * self.sample_factor

    @property
    def samples_per_second(self) -> float:
        return self.batch_size / self.seconds if self.seconds else float("inf")

    @property
    def ranks(self) -> int:
        return sum(self.replicas)

    @property
    def schedule(self) -> str:
        return self.kind.name

    @property
    def synchronous(self) -> bool:
        return self.kind.synchronous

    def _repr_html_(self) -> str:
        """Its picture and its table, for notebooks."""
        from vpipe.plan.picture import draw_plan
        from vpipe.plan.report import plan_table
        from vpipe.schedule.picture import image
        from vpipe.system.html import html_table

        table = plan_table(self)
        table.title = None  # the picture has it
        return image(draw_plan(self), f"plan for {self.ranks} ranks") + html_table(table)

    def to_plan(self) -> Plan:
        """What is written to a file; the prediction's lists are by pipeline position."""
        return Plan(
            self.partition,
            self.policies,
            self.schedule,
            self.replicas,
            self.minibatches,
            self.chunks,
            self.update_interval,
            self.depth,
            self.batch_size,
            self.fingerprint,
            {
                "samples_per_s": self.samples_per_second,
                "seconds_per_minibatch": self.seconds,
                "position_seconds": [position.seconds for position in self.positions],
                "peak_memory": [position.memory.total for position in self.positions],
                **({} if self.gap is None else {"gap": self.gap}),
                **({} if self.sample_factor == 1.0 else {"sample_factor": self.sample_factor}),
            },
            placement=self.placement,
            idle=self.idle,
        )


def assemble(
    task: Task,
    chunks: int | None,
    update_interval: int | None,
    positions: Sequence[PositionHolding],
    placement: Placement | None = None,
) -> PlanResult:
    """The result for the slices and policies of each position; synchronous ones have still to be timed.

    `placement`: the ranks of each position, if they are not those of the slices.
    """
    profile = task.profile
    if placement is not None and task.kind.table is None:
        positions = [on_ranks(position, placement) for position in positions]
    starts = sorted(piece.start for position in positions for piece in position.slices)
    order = {start: number for number, start in enumerate(starts)}
    times = shared_times(
        profile,
        [position.slices[0].ranks for position in positions],
        [stage_time(profile, position.slices, position.policies) for position in positions],
    )
    planned = tuple(
        position_plan(profile, position, time, [order[piece.start] for piece in position.slices])
        for position, time in zip(positions, times, strict=True)
    )
    stages = sorted(stage for position in planned for stage in position.stages)
    return PlanResult(
        kind=task.kind,
        cap=task.memory,
        partition=tuple(stage.slice.stop - stage.slice.start for stage in stages),
        policies=tuple(policy for stage in stages for policy in stage.policies),
        replicas=tuple(len(position.ranks) for position in planned),
        minibatches=task.update if task.kind.synchronous else task.minibatches,
        chunks=chunks,
        update_interval=update_interval,
        batch_size=profile.batch_size,
        fingerprint=profile.fingerprint,
        positions=planned,
        seconds=max(position.seconds for position in planned),
        placement=() if placement is None or task.kind.table or in_order(placement) else placement,
        turns=taking_turns(profile, sum(len(position.ranks) for position in planned)),
    )


def on_ranks(position: PositionHolding, placement: Placement) -> PositionHolding:
    """The same on other ranks: it has those that are numbered position by position."""
    moved = dict(enumerate(rank for own in placement for rank in own))
    slices = tuple(
        piece._replace(
            ranks=tuple(moved[rank] for rank in piece.ranks),
            before=None if piece.before is None else moved[piece.before],
            after=None if piece.after is None else moved[piece.after],
        )
        for piece in position.slices
    )
    return position._replace(slices=slices)


def shared_times(profile: Profile, ranks: Sequence[tuple[int, ...]], times: Sequence[Time]) -> list[Time]:
    """The times of all positions, where ranks share the link to the host.

    For each minibatch of the pipeline a link is busy for the sum of what its ranks copy, replicas taking turns; no
    rank that copies can be quicker than that.
    """
    together = profile.device.shared_by
    carried: dict[int, float] = {}
    for own, time in zip(ranks, times, strict=True):
        for rank in own:
            link = rank // together
            carried[link] = carried.get(link, 0.0) + time.host / len(own)
    return [
        time._replace(host=len(own) * max(carried[rank // together] for rank in own)) if time.host else time
        for own, time in zip(ranks, times, strict=True)
    ]


def simulated_seconds(task: Task, result: PlanResult, minibatches: int | None = None) -> float:
    """What `vpipe simulate` says of the plan, a minibatch; of a synchronous update with so many instead."""
    plan, table = result.to_plan(), result.kind.table
    if minibatches is not None and result.synchronous and table is None:
        plan = replace(plan, minibatches=minibatches)
    found = simulate(task.given or task.profile, plan, table)
    return found.step_time / found.update_interval


def stale_factor(result: PlanResult, training: StaleTraining) -> float:
    """Samples to equal loss under this plan, as a multiple of those of a synchronous schedule."""
    return 1.0 if result.synchronous else training.factor(arrange(result.to_plan(), result.kind.table, None))


def position_plan(
    profile: Profile, position: PositionHolding, time: Time, numbers: Sequence[int]
) -> RankPlan:
    slices, policies = position.slices, position.policies
    bare = stage_time(profile, slices, [[KEEP] * len(chosen) for chosen in policies])
    limit = "link" if time.link > time.compute else "compute"
    if time.seconds > bare.seconds:
        limit = "memory"
    stages = tuple(
        StagePlan(number, piece, tuple(chosen))
        for number, piece, chosen in zip(numbers, slices, policies, strict=True)
    )
    return RankPlan(slices[0].ranks, stages, position.memory, time, limit)
