"""One pipeline of a layout of docs/scaling.md, simulated with its part of the hosts' network cards."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from scaling_models import MEASURED, Model, whole_profile

from vpipe.cost import POLICIES, SWAP, Hosts, LinkCost, Plan, Profile
from vpipe.graph.partition import balanced_partition
from vpipe.schedule import Op, kind_of
from vpipe.simulate import Simulation, simulate

HOST = 8
"""GPUs of a host."""
INSIDE = LinkCost(360e9, 1e-5)
"""Between two GPUs of a host: 0.8 of what NVLink 4 has in each direction."""
LATENCY = 2e-5
"""Between hosts."""
FREE = 1e18
"""Bytes a second of a link that takes no time."""
ALONE = "no pipeline"
"""One stage on each GPU."""
EACH = ("vpipe", "pipedream")
"""Schedules with an update after each minibatch (of all pipelines)."""


class Pipeline(NamedTuple):
    model: Model
    schedule: str
    policy: str
    samples: int
    stages: int
    folder: Path = MEASURED

    @property
    def each(self) -> bool:
        """Whether each minibatch is an update."""
        return self.schedule in EACH


class Card(NamedTuple):
    """The network card of a host."""

    bandwidth: float
    together: int
    """Pipelines that share it."""


UNUSED = Card(FREE, 1)
"""Of a host that holds whole pipelines."""


class Span(NamedTuple):
    """A stage of a synchronous update, in seconds."""

    begin: float
    """Of its rank."""
    ready: float
    """When its last backward has ended."""
    update: float
    """How long the update of its rank takes."""


class Run(NamedTuple):
    """An update of the pipeline, without the reduction of its gradients."""

    seconds: float
    busiest: float
    """Seconds that the busiest rank computes."""
    backward: float
    """Seconds of what makes the gradients of a stage, on average: a backward, or the second part of a split one."""
    memory: float
    """Bytes of the rank that needs most."""
    swapped: float
    """Bytes in host memory of the rank that has most there."""
    spans: tuple[Span, ...]
    """Of each stage; none if the schedule is asynchronous."""

    def extended(self, shorter: Run, more: float) -> Run:
        """What a longer run would be, so many times as much longer as this one is longer than `shorter`."""

        def further(own: float, less: float) -> float:
            return own + more * (own - less)

        spans = (Span(*map(further, own, less)) for own, less in zip(self.spans, shorter.spans, strict=True))
        return Run(*map(further, self[:-1], shorter[:-1]), tuple(spans))


@cache
def measured_profile(model: Model, samples: int, folder: Path) -> Profile:
    return replace(whole_profile(model, samples, folder), link=INSIDE)


def profile_of(pipeline: Pipeline) -> Profile:
    return measured_profile(pipeline.model, pipeline.samples, pipeline.folder)


@cache
def plan_of(pipeline: Pipeline) -> Plan:
    """The slowest stage is as fast as it can be; all blocks have the same memory policy."""
    policy, blocks = POLICIES[pipeline.policy], profile_of(pipeline).blocks
    weights = [round(1e9 * (block.forward + block.backward + policy.seconds(block))) for block in blocks]
    schedule = "1f1b" if pipeline.schedule == ALONE else pipeline.schedule
    chunks = kind_of(schedule).chunks
    partition = balanced_partition(weights, pipeline.stages * chunks)
    return Plan(partition, (pipeline.policy,) * len(blocks), schedule, chunks=chunks if chunks > 1 else None)


def run(pipeline: Pipeline, minibatches: int, card: Card | None, swap: bool = True) -> Run:
    """`card` None: all links are free. Without `swap` copies to the host are.

    Of many minibatches those beyond three for each stage come at the pace of the third ones.
    """
    swap = swap or pipeline.policy != SWAP
    if card is not None and pipeline.stages <= HOST // card.together:
        card = UNUSED
    if pipeline.each:
        once = simulated(pipeline, 1, card, swap)
        return once._replace(seconds=once.seconds * minibatches, busiest=once.busiest * minibatches)
    stages = max(2, pipeline.stages)
    if minibatches <= 3 * stages:
        return simulated(pipeline, minibatches, card, swap)
    shorter, longer = (simulated(pipeline, count * stages, card, swap) for count in (2, 3))
    return longer.extended(shorter, (minibatches - 3 * stages) / stages)


@cache
def simulated(pipeline: Pipeline, minibatches: int, card: Card | None, swap: bool) -> Run:
    """A message has the whole card, and then the card carries those of the other pipelines.

    The last of these is so much later at the end of an update. In the steady state of updates after each minibatch it
    does not matter.
    """
    plan, profile, later = plan_of(pipeline), profile_of(pipeline), 0.0
    if card is None:
        profile = replace(profile, link=LinkCost(FREE))
    elif card != UNUSED:
        host_stages = HOST // card.together
        starts = range(0, pipeline.stages, host_stages)
        hosts = tuple(tuple(range(start, start + host_stages)) for start in starts)
        later = (card.together - 1) * profile.blocks[0].boundary_bytes / card.bandwidth
        share = LinkCost(card.bandwidth / card.together, LATENCY - later)
        profile = replace(profile, hosts=Hosts(hosts, share))
    if not swap:
        profile = replace(profile, device=replace(profile.device, to_host=FREE, from_host=FREE))
    synchronous = kind_of(plan.schedule).synchronous
    if synchronous:
        found = simulate(profile, replace(plan, minibatches=minibatches), timeline=True)
    else:
        several = replace(plan, update_interval=minibatches)
        found = simulate(profile, several, minibatches=3 * pipeline.stages + 2 * minibatches)
    policy, split = POLICIES[pipeline.policy], kind_of(plan.schedule).splits_backward
    backward = sum(
        block.weight_gradient if split else block.backward + policy.seconds(block) for block in profile.blocks
    )
    if pipeline.each:
        later = 0.0
    return Run(
        found.step_time + later,
        found.step_time * max(rank.compute for rank in found.ranks),
        backward / len(plan.partition),
        max(rank.memory.total for rank in found.ranks),
        swapped_bytes(profile, plan, found),
        spans(found, later) if synchronous else (),
    )


def spans(found: Simulation, later: float) -> tuple[Span, ...]:
    """`later`: how much later the last pipeline is than the one that was simulated."""
    assert found.timeline is not None
    begin: dict[int, float] = {}
    computed: dict[int, float] = {}
    end: dict[int, float] = {}
    ready: dict[int, float] = {}
    rank_of = {stage: rank.rank for rank in found.ranks for stage in rank.stages}
    for rank, action, start, stop in found.timeline.events:
        begin.setdefault(rank, start)
        end[rank] = stop
        if action.op is not Op.STEP:
            computed[rank] = ready[action.stage] = stop
    return tuple(
        Span(begin[rank], ready[stage] + later, end[rank] - computed[rank])
        for stage, rank in sorted(rank_of.items())
    )


def least_seconds(pipeline: Pipeline, minibatches: int) -> float:
    """No update takes less: an equal part of the computing, or of the copies to the host and back."""
    profile, policy = profile_of(pipeline), POLICIES[pipeline.policy]
    device = profile.device
    computing = sum(block.forward + block.backward + policy.seconds(block) for block in profile.blocks)
    copied = sum(policy.copied(block) for block in profile.blocks)
    copying = copied / device.to_host + copied / device.from_host
    # Splitting and recomputing can be a little quicker than measured apart.
    return 0.9 * max(computing, copying) * minibatches / pipeline.stages


def swapped_bytes(profile: Profile, plan: Plan, found: Simulation) -> float:
    """Of the rank that has most of its activations in host memory."""
    copied, start = [], 0
    for stage, policies in enumerate(plan.stage_policies()):
        blocks = zip(profile.blocks[start : start + len(policies)], policies, strict=True)
        copied.append(
            found.in_flight[stage] * sum(POLICIES[policy].copied(block) for block, policy in blocks)
        )
        start += len(policies)
    return max(sum(copied[stage] for stage in rank.stages) for rank in found.ranks)
