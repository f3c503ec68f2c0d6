"""The best plan under one schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from math import inf

from vpipe.cost import SWAP, Profile
from vpipe.plan.by_simulation import SimulatedSearch
from vpipe.plan.choice import from_the_end
from vpipe.plan.chunks import PositionHolding
from vpipe.plan.chunks_by_simulation import ChunkedSearch
from vpipe.plan.loads import Loads, planned_interval
from vpipe.plan.model import Slice, StageMemory, stage_memory, stage_time
from vpipe.plan.paths import Paths
from vpipe.plan.result import PlanResult, assemble, simulated_seconds
from vpipe.plan.shape import PlanShape
from vpipe.plan.slices import TimeCosts
from vpipe.plan.stages import placed, search
from vpipe.plan.task import Task, equal_loads_of, loads_of
from vpipe.simulate import RankMemory, simulate

ROUNDING = 1 + 1e-9
SOME = 1 + 1e-6
"""Times faster that a plan with idle ranks must be."""
MISSES = 2
"""Numbers of ranks that are tried in vain, of problems that are not enumerated."""
TRIES = 12
NEVER = 1e6
"""Seconds that swapping would take: a stage that swaps cannot be captured in CUDA graphs."""

Find = Callable[[Profile, float], PlanResult | None]
"""The plan whose slowest stage is quickest, by the costs of a profile; None also if it is above a limit for certain."""


def plan_schedule(task: Task, limit: float = inf) -> PlanResult | None:
    """The fastest plan that fits; None if there is none, or if it takes longer than `limit` seconds a minibatch.

    Where it is faster, some ranks stay idle: another replica costs a reduction, another stage messages and memory.
    """
    best, misses = _with_all_ranks(task, limit), 0
    for fewer in islice(task.with_idle_ranks(), 1, None):
        bar = limit if best is None else min(limit, best.seconds / SOME)
        if least_seconds(fewer) >= bar or (misses == MISSES and not fewer.few):
            break
        found = _with_all_ranks(fewer, bar)
        misses += found is None
        if found is not None and found.seconds < bar:
            best = replace(found, idle=task.ranks - fewer.ranks)
    return best


def _with_all_ranks(task: Task, limit: float) -> PlanResult | None:
    if task.profile.device.graphs:
        return _plan_cuda_graphs(task, limit)
    found = _fastest_plan(task, limit)
    if found is None:
        return None
    if task.kind.synchronous and task.simulated < task.update:
        found = replace(found, seconds=simulated_seconds(task, found))
    return found if found.seconds <= limit * ROUNDING + 1e-12 else None


def _fastest_plan(task: Task, limit: float) -> PlanResult | None:
    if not task.in_line:
        return ChunkedSearch(task).run(limit)
    search = SimulatedSearch(task)
    # Of large problems, what another schedule has beaten by sums is not even simulated. Between hosts sums are no
    # bound: some of a reduction is sent beside a backward.
    bar = inf if task.small or task.profile.hosts is not None else limit
    found = search.run(() if search.complete else plans_by_sums(task, lambda: min(bar, search.value)), limit)
    if found is None or (found.update_interval or 1) <= task.update_interval or task.interval is not None:
        return found
    # A depth that makes updates rarer: with as many minibatches an update others may be faster still.
    rarer = SimulatedSearch(task.with_interval(found.update_interval))
    again = rarer.run((found,), limit)
    return found if again is None or again.seconds >= found.seconds else again


def least_seconds(task: Task) -> float:
    """What no plan can be faster than, by its work alone."""
    paths = Paths(task.profile)
    if not task.in_line:
        return paths.alone * float(paths.forward[-1] + paths.backward[-1]) / task.ranks
    facts = PlanShape(task, (1,) * min(task.ranks, len(task.profile.blocks))).any_depth
    return paths.of_any_partition(facts, task.ranks)


def plans_by_sums(task: Task, limit: Callable[[], float] = lambda: inf) -> Iterator[PlanResult]:
    """The plan of each layout whose slowest stage is quickest, and others where ranks would wait for the link to the
    host that they share. `limit`: the time of the best plan so far.

    Less depth holds fewer activations and versions. Of large problems it is tried where nothing else fits.
    """
    fits = False
    for result in _with_depth(task, None, limit):
        fits = True
        yield result
    busy = task.ranks if task.kind.any_depth else 1
    while busy > 1 and (task.small or not fits):
        busy = busy - 1 if task.small else busy // 2
        for result in _with_depth(task, busy, limit):
            fits = True
            yield result


def _with_depth(task: Task, busy: int | None, limit: Callable[[], float]) -> Iterator[PlanResult]:
    """Those whose depth keeps so many ranks busy; None: all."""
    for find in _layouts(task, busy):
        alone = find(task.profile, limit() * ROUNDING)
        if alone is None:
            continue
        yield alone
        if waits_for_others(task.profile, alone):
            parts = (find(profile, inf) for profile in _with_parts_of_the_link(task.profile))
            yield from (result for result in parts if result is not None)


def waits_for_others(profile: Profile, result: PlanResult) -> bool:
    """Whether ranks that share a link to the host slow each other down."""
    alone = 0.0
    for position in result.positions:
        slices, policies = zip(*((stage.slice, stage.policies) for stage in position.stages), strict=True)
        alone = max(alone, stage_time(profile, slices, policies).seconds / len(position.ranks))
    return max(position.seconds for position in result.positions) > alone


def _with_parts_of_the_link(profile: Profile) -> Iterator[Profile]:
    """The profile with a 2nd, 4th, 8th, ... part of the link to the host for each rank.

    What ranks copy over one link couples stages that the search takes one by one. Within its part a rank never waits
    for another; the fastest of these plans, by the sums, may not be the fastest that there is.
    """
    device, part = profile.device, 1
    while part < device.shared_by:
        part = min(2 * part, device.shared_by)
        to_host, from_host = device.to_host / part, device.from_host / part
        yield replace(profile, device=replace(device, to_host=to_host, from_host=from_host, shared_by=1))


def _layouts(task: Task, busy: int | None) -> Iterator[Find]:
    """The ways to lay stages out on ranks that the schedule allows: each is searched by itself."""
    offered = loads_of(task, busy) if busy else (*loads_of(task), *equal_loads_of(task))
    yield from (partial(_of_stages, task, loads) for loads in offered)


def _of_stages(task: Task, loads: Loads, searched: Profile, limit: float) -> PlanResult | None:
    costs, blocks = TimeCosts(searched, loads, task.memory), len(task.profile.blocks)
    if limit < inf:
        limit *= task.profile.device.crowding
        # The model's time of a link is not a floor of a simulation's, in which replicas have links of their own.
        limit = inf if task.profile.links or costs.cuts.max() > limit else limit
    stages = search(costs, blocks, limit=limit)
    if stages is None:
        return None
    slices = with_fresh_gradients(task, placed(stages, loads))
    positions = []
    for piece, stage in zip(slices, stages, strict=True):
        policies = costs.best(stage.start, stage.stop, stage.load)[1]
        chosen = [from_the_end(searched, piece, policies, task.memory)]
        memory = stage_memory(task.profile, [piece], chosen)
        positions.append(PositionHolding((piece,), chosen, memory, stage.cost))
    made = assemble(task, None, loads.update_interval, positions)
    return replace(made, depth=loads.depth(task.kind, made.replicas))


def with_fresh_gradients(task: Task, slices: list[Slice]) -> list[Slice]:
    """The slices as they are if their replicas turn out to be equal, which a search among any cannot count on."""
    kind, replicas = task.kind, {piece.load.replicas for piece in slices}
    if kind.synchronous or kind.holding is None or len(replicas) > 1:
        return slices
    if planned_interval(kind, task.ranks, *replicas) not in replicas:
        return slices
    return [piece._replace(load=piece.load._replace(fresh=True)) for piece in slices]


def _plan_cuda_graphs(task: Task, limit: float) -> PlanResult | None:
    """The fastest plan that fits with stages replayed from CUDA graphs; None if none was found.

    The search counts what is there at each moment; graphs give nothing back, which only the simulation counts. Where a
    plan needs too much then, shrink the budget by the shortfall and search again.
    """
    blocks = tuple(replace(block, swapping=NEVER) for block in task.profile.blocks)
    device = replace(task.profile.device, graphs=False)
    eager = replace(task.profile, blocks=blocks, device=device)
    searched = task._replace(profile=eager, given=eager)
    for _ in range(TRIES):
        found = _fastest_plan(searched, limit)
        if found is None or SWAP in found.policies:
            return None
        simulated = _with_memory(task, found)
        over = [position.memory.total - task.memory for position in simulated.positions]
        if max(over) <= 0:
            return simulated
        worst = found.positions[over.index(max(over))]
        smaller = min(searched.memory, worst.memory.total) - max(over)
        if smaller < 1:
            return None
        searched = searched._replace(memory=smaller)
    return None


def _with_memory(task: Task, result: PlanResult) -> PlanResult:
    found = simulate(task.given or task.profile, result.to_plan(), result.kind.table)
    positions = tuple(
        replace(position, memory=_as_planned(found.ranks[position.ranks[0]].memory))
        for position in result.positions
    )
    return replace(result, positions=positions, seconds=found.step_time / found.update_interval)


def _as_planned(held: RankMemory) -> StageMemory:
    weights = held.weights + held.versions + held.gradients + held.optimizer
    return StageMemory(weights, held.activations, 0, held.buffers)
