"""Every plan of a small problem, simulated: partitions, replicas, depths and policies, in the plainest way.

It shares nothing with the planner but the simulator. Memory is the simulator's own: each stage's policies are tried one
by one with everything kept elsewhere, since what a rank holds depends on its own stage only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, permutations, product
from math import inf
from random import Random
from typing import NamedTuple

from vpipe.cost import BlockCost, DeviceCost, Hosts, LinkCost, Plan, Profile
from vpipe.schedule import kind_of
from vpipe.simulate import Simulation, simulate

POLICIES = ("keep", "recompute", "swap")


class Problem(NamedTuple):
    profile: Profile
    ranks: int
    cap: int
    schedule: str
    minibatches: int | None

    @property
    def blocks(self) -> int:
        return len(self.profile.blocks)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


def layouts(problem: Problem) -> Iterator[Plan]:
    """Every partition with every number of replicas on all ranks, everything kept, with the schedule's own depth."""
    kind, ranks = kind_of(problem.schedule), problem.ranks
    for positions in range(1, ranks + 1):
        stages = positions * kind.chunks
        if stages > problem.blocks:
            continue
        for replicas in compositions(ranks, positions):
            if kind.replicas == "equal" and len(set(replicas)) > 1:
                continue
            if kind.synchronous and max(replicas) > (problem.minibatches or 1):
                continue
            # 2BW is planned for one interval, that of a stage on each rank.
            interval = ranks if problem.schedule == "2bw" else None
            for partition, placement in product(
                compositions(problem.blocks, stages), placements(problem, replicas)
            ):
                yield Plan(
                    partition,
                    ("keep",) * problem.blocks,
                    problem.schedule,
                    replicas,
                    problem.minibatches,
                    kind.chunks if kind.chunks > 1 else None,
                    interval,
                    placement=placement,
                )


def all_layouts(problem: Problem, interval: int | None, deepest: int) -> Iterator[Plan]:
    """The same with every depth up to `deepest`, and with idle ranks; of 2BW those with this update interval."""
    for ranks in range(1, problem.ranks + 1):
        for plan in layouts(problem._replace(ranks=ranks)):
            for depth in [(), *depths(plan, deepest)] if plan.schedule in STAIRCASE else [()]:
                if plan.schedule != "2bw":
                    yield replace(plan, depth=depth)
                elif interval is not None and most_ahead(plan.replicas, depth) <= interval:
                    yield replace(plan, depth=depth, update_interval=interval)


def most_ahead(replicas: tuple[int, ...], depth: tuple[int, ...]) -> int:
    """Minibatches of an update that 2BW needs: those that any stage runs ahead, and one for each replica."""
    usual = [(sum(replicas[stage:]) - 1) // count for stage, count in enumerate(replicas)]
    ahead = [count * own for count, own in zip(replicas, depth or usual, strict=True)]
    return max(*replicas, *ahead)


def depths(plan: Plan, deepest: int) -> Iterator[tuple[int, ...]]:
    """Every depth with which no stage waits for ever, of pipelines with more than one stage."""
    synchronous = kind_of(plan.schedule).synchronous
    own = [deepest] * len(plan.replicas)
    if synchronous:
        own = [min(deepest, -(-(plan.minibatches or 1) // count) - 1) for count in plan.replicas]
    for depth in product(*(range(most + 1) for most in own)) if len(own) > 1 else ():
        needs = [ahead * count for ahead, count in zip(depth, plan.replicas, strict=True)]
        lets_in = [
            need + (count - 1 if synchronous else 0) for need, count in zip(needs, plan.replicas, strict=True)
        ]
        if all(lets_in[stage] >= max(needs[stage:]) for stage in range(len(needs))):
            yield depth


def placements(problem: Problem, replicas: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
    """Ranks in every order, once for each way to put replicas on hosts."""
    hosts = problem.profile.hosts
    if hosts is None:
        return [()]
    found = {}
    for ranks in permutations(range(problem.ranks)):
        ends = list(accumulate(replicas))
        placed = tuple(ranks[end - count : end] for end, count in zip(ends, replicas, strict=True))
        found[tuple(hosts.host_of(rank) for rank in ranks)] = placed
    return list(found.values())


def seconds_of(simulation: Simulation) -> float:
    return simulation.step_time / simulation.update_interval


def own_work(problem: Problem, plan: Plan) -> float:
    """Seconds a minibatch of the rank that computes longest: no plan is faster."""
    kind, most, start = kind_of(plan.schedule), 0.0, 0
    if kind.chunks > 1:
        return 0.0
    for blocks, count in zip(plan.partition, plan.replicas, strict=True):
        own = problem.profile.blocks[start : start + blocks]
        total = plan.minibatches or 1
        turns = -(-total // count) / total if kind.synchronous else 1 / count
        most = max(most, turns * sum(block.forward + block.backward for block in own))
        start += blocks
    return most


def best_seconds(problem: Problem, interval: int | None = None, deepest: int = 0) -> float:
    """Seconds a minibatch of the fastest plan that fits; endless if none does.

    With `deepest` of all depths, of 2BW with this update interval, and of plans with idle ranks.
    """
    best, held = inf, Held(problem)
    every = all_layouts(problem, interval, deepest) if deepest else layouts(problem)
    for least, plan in sorted(((own_work(problem, one), one) for one in every), key=lambda pair: pair[0]):
        if least >= best:
            break
        found = simulate(problem.profile, plan)
        if seconds_of(found) >= best:
            continue  # no policy makes a plan faster than keeping everything does
        if all(rank.memory.total <= problem.cap for rank in found.ranks):
            best = seconds_of(found)
        elif kind_of(problem.schedule).chunks == 1:
            stages = [held.fitting(plan, stage) for stage in range(len(plan.partition))]
            for chosen in product(*stages):
                policies = tuple(name for own in chosen for name in own)
                best = min(best, seconds_of(simulate(problem.profile, replace(plan, policies=policies))))
    return best


class Held:
    """The policies of single stages that fit."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[tuple[object, ...], list[tuple[str, ...]]] = {}

    def fitting(self, plan: Plan, stage: int) -> list[tuple[str, ...]]:
        """Without those that others are better than, or as good, in seconds and in bytes that are copied."""
        start = sum(plan.partition[:stage])
        key = (plan.replicas, plan.placement, plan.depth, stage, start, plan.partition[stage])
        if key not in self.known:
            self.known[key] = list(self.search(plan, stage, start))
        return self.known[key]

    def search(self, plan: Plan, stage: int, start: int) -> Iterator[tuple[str, ...]]:
        profile = self.problem.profile
        own, rank = profile.blocks[start : start + plan.partition[stage]], sum(plan.replicas[:stage])
        rank = plan.placement[stage][0] if plan.placement else rank

        def price(policies: tuple[str, ...]) -> tuple[float, int]:
            """Seconds that are added, and bytes that are copied."""
            longer, copied = 0.0, 0
            for block, name in zip(own, policies, strict=True):
                longer += {"keep": 0.0, "recompute": block.forward, "swap": block.swapping}[name]
                copied += block.kept_bytes * (name == "swap")
            return longer, copied

        taken: list[tuple[float, int]] = []
        for policies in sorted(product(POLICIES, repeat=len(own)), key=price):
            longer, copied = price(policies)
            if any(more <= longer and bytes_ <= copied for more, bytes_ in taken):
                continue
            everywhere = (*plan.policies[:start], *policies, *plan.policies[start + len(own) :])
            held = simulate(profile, replace(plan, policies=everywhere)).ranks[rank].memory.total
            if held <= self.problem.cap:
                taken.append((longer, copied))
                yield policies


LINKS = (1e12, 300.0, 60.0, 12.0)
"""Bytes a second, of messages of up to 60 bytes where a block takes about 3 s: free to slower than compute."""
STAIRCASE = ("1f1b", "zb-h1", "pipedream", "2bw")
"""Those with depths to choose."""
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "pipedream", "2bw")


SLOWER = (1.0, 3.0, 10.0, 100.0)
"""Times slower is a link between hosts than one inside."""


def on_hosts(random: Random, problem: Problem, sizes: tuple[int, ...]) -> Problem:
    """The same with ranks on hosts, so many on each, in any order."""
    ranks = list(range(sum(sizes)))
    random.shuffle(ranks)
    ends = list(accumulate(sizes))
    own = tuple(tuple(ranks[end - size : end]) for end, size in zip(ends, sizes, strict=True))
    inside = problem.profile.link
    network = LinkCost(inside.bandwidth / random.choice(SLOWER), random.choice([0.0, 0.3]))
    profile = replace(problem.profile, hosts=Hosts(own, network))
    return problem._replace(profile=profile, ranks=len(ranks))


def drawn(
    random: Random,
    schedule: str,
    blocks: Sequence[int],
    ranks: Sequence[int],
    capped: bool,
    odd: bool = False,
) -> Problem:
    """A problem with uneven blocks. `capped`: its memory is not enough to keep everything. `odd`: some blocks are very
    uneven, one is a giant, boundaries or weights are huge or nothing at all."""
    count = random.choice(blocks)
    made = tuple(
        BlockCost(
            "b",
            *(random.uniform(0.3, 1.5) for _ in range(3)),
            random.choice([0.0, 0.2]),
            random.randint(20, 60),
            random.randint(0, 60),
            random.randint(0, 30),
            swapping=random.choice([0.0, 0.1]),
        )
        for _ in range(count)
    )
    link = LinkCost(random.choice(LINKS), random.choice([0.0, 0.2]), random.random() < 0.2)
    if odd:
        made = tuple(one_odd(random, block) for block in made)
        giant, scale = random.randrange(count), random.choice([1, 10])
        made = (
            *made[:giant],
            replace(
                made[giant],
                forward=scale * made[giant].forward,
                input_gradient=scale * made[giant].input_gradient,
                weight_gradient=scale * made[giant].weight_gradient,
            ),
            *made[giant + 1 :],
        )
    device = DeviceCost(1, random.choice([20.0, 200.0]), random.choice([20.0, 200.0]))
    profile = Profile(made, device, link, 1, optimizer_ratio=1.0)
    minibatches = random.randint(1, 32) if kind_of(schedule).synchronous else None
    positions = random.choice(ranks)
    cap = 10**9
    if capped and kind_of(schedule).chunks == 1:
        sizes = [
            max(rank.memory.total for rank in simulate(profile, plan).ranks)
            for plan in layouts(Problem(profile, positions, cap, schedule, minibatches))
            if len(plan.partition) == min(positions, count)
        ]
        cap = round(min(sizes) * random.uniform(0.6, 1.2))
    return Problem(profile, positions, cap, schedule, minibatches)


def one_odd(random: Random, block: BlockCost) -> BlockCost:
    """Some quantities up to 30 times as large, or none of it."""
    longer = random.choice([0.05, 1.0, 1.0, 4.0])
    return replace(
        block,
        forward=longer * block.forward,
        input_gradient=longer * block.input_gradient,
        weight_gradient=random.choice([0.0, longer]) * block.weight_gradient,
        boundary_bytes=random.choice([0, 1, 10]) * block.boundary_bytes,
        parameter_bytes=random.choice([0, 1, 30]) * block.parameter_bytes,
    )
