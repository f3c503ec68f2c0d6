"""The prediction of a run: its own schedule, simulated.

The costs are those of the profile that the run was planned with (`profile.json` in its folder, written by
`partition: auto`) or, without one, the median times of its own actions: then the prediction is the time of the schedule
if no action is ever slower than usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import NamedTuple

from vpipe.cost import KEEP, BlockCost, DeviceCost, LinkCost, Plan, Profile, read_plan, read_profile
from vpipe.errors import VPipeError
from vpipe.observe.action_figures import Medians, medians
from vpipe.record.events import RankEvents, StageBytes
from vpipe.record.run_folder import BlockFacts, StageFacts, read_stages
from vpipe.schedule import Op, Schedule
from vpipe.schedule.program import filling
from vpipe.simulate import Simulation, simulate
from vpipe.simulate.arrange import arrange
from vpipe.system.files import is_file

PROFILE, OWN = "the profile that it was planned with", "the medians of its own actions"
"""Where costs come from. Only the first were known before the run: what follows from the others is no prediction."""
UNLIMITED = 1 << 50
"""Bytes of a device without a limit."""
AT_ONCE = 1e15
"""Bytes a second of a link whose time is all latency."""
WARM = 4
"""Times the minibatches that fill it that an asynchronous pipeline is simulated, to reach its steady state."""


class RunCosts(NamedTuple):
    """Costs, plan and schedule with which a run can be simulated."""

    profile: Profile
    plan: Plan
    source: str
    schedule: Schedule
    """As long as one update, or long enough to reach the steady state."""
    linked: bool
    """Whether the schedule has the run's own edges; else it is a chain of stages."""

    @property
    def word(self) -> str:
        """What a figure that is simulated with these costs is called."""
        return "predicted" if self.source == PROFILE else "simulated"

    def simulate(self, plan: Plan | None = None, *, timeline: bool = False) -> Simulation:
        """The run or, with another plan of as many stages, one like it."""
        schedule = self.schedule if self.linked else None
        return simulate(
            self.profile, plan or self.plan, schedule, self.schedule.minibatches, timeline=timeline
        )


def run_costs(folder: Path, ranks: Sequence[RankEvents]) -> RunCosts | None:
    """None where a run cannot be simulated: its schedule is a table, or its files lack something."""
    facts = read_stages(folder)
    plan_file = folder / "plan.json"
    if facts is None or not is_file(plan_file):
        return None
    try:
        plan = read_plan(plan_file)
        if is_file(folder / "profile.json"):
            profile, source = read_profile(folder / "profile.json"), PROFILE
        else:
            found = medians(ranks)
            if any((stage, Op.F) not in found for stage in range(len(facts.placement))):
                return None
            profile, source = own_profile(ranks, facts, found, plan.batch_size or 1), OWN
            # The measured times include recomputation and swapping.
            plan = replace(plan, policies=(KEEP,) * sum(plan.partition))
        schedule = arrange(plan, None, None if facts.synchronous else _enough(facts, plan))
    except VPipeError:
        return None
    linked = bool(facts.edges) and all(len(holders) == 1 for holders in facts.placement)
    if linked:
        schedule = replace(schedule, edges=frozenset(facts.edges))
    return RunCosts(profile, plan, source, schedule, linked)


def steady_period(schedule: Schedule, simulation: Simulation) -> tuple[range, float]:
    """The minibatches of one period of the simulated schedule, in its steady state, and their seconds."""
    if schedule.synchronous:
        return range(simulation.minibatches), simulation.step_time
    period = _period(schedule)
    first = simulation.minibatches // 2 // period * period
    return range(first, first + period), simulation.step_time / schedule.update_interval * period


def own_profile(ranks: Sequence[RankEvents], facts: StageFacts, found: Medians, batch_size: int) -> Profile:
    """A profile with the measured times of each stage, shared among its blocks by floating-point operations."""
    held = {stage: counts for events in ranks for stage, counts in events.held.items()}
    blocks = []
    for stage in range(len(facts.placement)):
        own = facts.of_stage(stage)
        work = sum(block.flops for block in own)
        for block in own:
            share = block.flops / work if work else 1 / len(own)
            blocks.append(_block(block, share, found, held.get(stage, StageBytes(0, 0, 0))))
    weights = sum(counts.weights for counts in held.values())
    return Profile(
        blocks=tuple(blocks),
        device=DeviceCost(facts.cap or UNLIMITED, 1e10, 1e10),
        link=LinkCost(AT_ONCE, 0.0, sender_busy=True),
        batch_size=batch_size,
        optimizer_ratio=sum(counts.optimizer for counts in held.values()) / weights if weights else 0.0,
        links=_links(facts, found),
    )


def _block(block: BlockFacts, share: float, found: Medians, counts: StageBytes) -> BlockCost:
    """`share` is that of the block in its stage."""

    def took(*ops: Op) -> float:
        return share * sum(found.get((block.stage, op), 0.0) for op in ops)

    whole = took(Op.B) / 2  # a backward that is not split: half for each gradient
    return BlockCost(
        name=block.name,
        forward=took(Op.F, Op.RECV_F),
        input_gradient=took(Op.I, Op.RECV_B) + whole,
        weight_gradient=took(Op.W) + whole,
        update=took(Op.STEP, Op.REDUCE),
        kept_bytes=round(share * counts.minibatch),
        boundary_bytes=block.cut_bytes,
        parameter_bytes=round(share * counts.weights),
    )


def _links(facts: StageFacts, found: Medians) -> dict[tuple[int, int], LinkCost]:
    """From each rank to each that it sends to: as long as its sends took, split among the readers."""
    edges = facts.edges or tuple((stage, stage + 1) for stage in range(len(facts.placement) - 1))
    links: dict[tuple[int, int], LinkCost] = {}
    back = tuple((reader, producer) for producer, reader in edges)
    for op, ends in ((Op.SEND_F, edges), (Op.SEND_B, back)):
        for source, target in ends:
            readers = sum(1 for start, _ in ends if start == source)
            seconds = found.get((source, op), 0.0) / readers
            for sender in facts.placement[source]:
                for receiver in facts.placement[target]:
                    if sender != receiver:
                        links.setdefault((sender, receiver), LinkCost(AT_ONCE, seconds, sender_busy=True))
    return links


def _enough(facts: StageFacts, plan: Plan) -> int:
    """Minibatches that reach the steady state, a whole number of periods."""
    period, counts = _period(facts), [len(ranks) for ranks in facts.placement]
    filled = filling(counts, plan.depth, sum(counts))
    return -(-WARM * (filled + facts.update_interval) // period) * 2 * period


def _period(layout: Schedule | StageFacts) -> int:
    return lcm(layout.update_interval, *map(len, layout.placement))
