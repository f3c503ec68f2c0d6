"""The planner against brute force: every partition, every replication, every policy of every block.

The brute force shares nothing with the planner but the model's statement (`vpipe/plan/model.py`'s docstring).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, combinations, pairwise, product
from math import ceil, inf
from random import Random
from re import search
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.drawing import draws
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile, Tie, as_scheduled, for_batch_size
from vpipe.errors import VPipeError
from vpipe.plan import PlanResult, plan
from vpipe.plan.choice import choose, least_memory
from vpipe.plan.model import Load, Slice, stage_memory
from vpipe.plan.one_schedule import plans_by_sums
from vpipe.plan.task import Task
from vpipe.schedule import kind_of
from vpipe.simulate import simulate

SCHEDULES = ("pipedream", "2bw", "1f1b", "gpipe")
MINIBATCHES = 5
Numbers = npt.NDArray[np.float64]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as `parts` numbers of at least one, in order."""
    for cuts in combinations(range(1, total), parts - 1):
        ends = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(ends))


def in_flight_and_versions(schedule: str, ranks_from_here: int, replicas: int) -> tuple[int, int]:
    ahead = ceil(ranks_from_here / replicas)
    own = ceil(MINIBATCHES / replicas)
    return {
        "pipedream": (ahead, ahead),
        "2bw": (ahead, min(2, ahead)),
        "1f1b": (min(ahead, own), 1),
        "gpipe": (own, 1),
    }[schedule]


class Every(NamedTuple):
    """What each choice of policies for all blocks of a stage holds, how much longer it takes, and what it swaps."""

    held: Numbers
    longer: Numbers
    swapped: Numbers


def every_choice(
    blocks: Sequence[BlockCost],
    entered: Sequence[int],
    flight: int,
    lying: int,
    gradients: Sequence[int],
    updated: bool,
) -> Every:
    """`entered`: what each block reads. `gradients`: what a whole backward leaves; `updated`: an update follows it.

    `lying`: minibatches of a swapped block that lie on the device.
    """
    chosen = np.indices((3,) * len(blocks), dtype=np.int8).reshape(len(blocks), -1)  # keep, recompute, swap
    held, longer, swapped, room, behind = (np.zeros(chosen.shape[1]) for _ in range(5))
    for one, reads, left, policy in reversed(list(zip(blocks, entered, gradients, chosen, strict=True))):
        kept, recomputed, moved = one.kept_bytes, policy == 1, policy == 2
        held += np.where(
            recomputed, reads * flight, np.where(moved, kept * min(lying, flight), kept * flight)
        )
        room = np.maximum(room, one.working_bytes + recomputed * (kept - reads) - behind)
        longer += recomputed * one.forward + moved * one.swapping
        swapped += moved * kept
        behind += np.where(recomputed, reads, kept) - left
        room = np.maximum(room, -behind)
    if updated:
        room = np.maximum(room, sum(b.update_bytes for b in blocks) - behind)
    return Every(held + room, longer, swapped)


class Brute:
    """The slowest stage of the best plan, and the least memory of any plan, by trying all of them."""

    def __init__(
        self,
        profile: Profile,
        ranks: int,
        cap: int,
        schedule: str,
        stale: bool = False,
        shallow: bool = False,
    ) -> None:
        """`stale`: as if gradients were always there; `shallow`: with one minibatch in flight, if it can be chosen."""
        self.profile, self.ranks, self.cap, self.schedule = profile, ranks, cap, schedule
        self.stale, self.shallow = stale, shallow and schedule != "gpipe"
        self.stage = lru_cache(maxsize=None)(self._stage)

    def best(self, equal: int | None = None) -> float:
        """`equal`: with so many replicas of each stage."""
        plans = (max(seconds for seconds, _ in stages) for stages in self.plans(equal))
        return min(plans, default=inf)

    def least(self) -> float:
        return min(max(memory for _, memory in stages) for stages in self.plans())

    def plans(self, equal: int | None = None) -> Iterator[list[tuple[float, float]]]:
        blocks = len(self.profile.blocks)
        for stages in range(1, min(blocks, self.ranks) + 1):
            for counts in compositions(blocks, stages):
                for replicas in compositions(self.ranks, stages):
                    if equal is not None and set(replicas) != {equal}:
                        continue
                    if self.schedule not in ("1f1b", "gpipe") or max(replicas) <= MINIBATCHES:
                        yield self.stages(counts, replicas)

    def stages(self, counts: tuple[int, ...], replicas: tuple[int, ...]) -> list[tuple[float, float]]:
        ends = list(accumulate(counts))
        behind = [sum(replicas[stage:]) for stage in range(len(replicas))]
        places = zip(counts, ends, behind, replicas, strict=True)
        fresh = not self.stale and self.schedule in ("pipedream", "2bw") and len(set(replicas)) == 1
        fresh = fresh and (self.schedule == "pipedream" or replicas == (self.ranks,))
        return [self.stage(end - count, end, left, copies, fresh) for count, end, left, copies in places]

    def _stage(self, start: int, stop: int, behind: int, copies: int, fresh: bool) -> tuple[float, float]:
        """Its least time under the cap, and its least memory."""
        profile = self.profile
        blocks = profile.blocks[start:stop]
        flight, versions = (1, 1) if self.shallow else in_flight_and_versions(self.schedule, behind, copies)
        per_update = {"pipedream": 1, "2bw": self.ranks / copies}.get(
            self.schedule, ceil(MINIBATCHES / copies)
        )
        entered = [profile.blocks[i - 1].boundary_bytes if i else 0 for i in range(start, stop)]
        parameters = sum(b.parameter_bytes for b in blocks)
        exchanged = parts = 0
        lag = {"pipedream": self.ranks, "2bw": 2}.get(self.schedule, 0)
        lag = min(lag, 1) if self.shallow else lag
        for tie in profile.tied:
            here = sum(start <= number < stop for number in tie.blocks)
            parameters -= tie.bytes * max(0, here - 1)
            if 0 < here < len(tie.blocks):
                exchanged += tie.bytes
                # Parts on their way, and of later holders their own; the sum while nothing else is there.
                first = start <= min(tie.blocks) < stop
                parts += tie.bytes * ((4 if first else 2 * lag + 1) if lag else 2)
        left = blocks[-1].boundary_bytes if stop < len(profile.blocks) else 0
        fixed = parameters * (versions + (not fresh) + profile.optimizer_ratio) + 2 * (entered[0] + left)
        fixed += parts + profile.device.workspace
        gradients = [b.parameter_bytes if fresh else 0 for b in blocks]
        for tie in profile.tied:
            here = [number for number in tie.blocks if start <= number < stop]
            for number in here[:-1] if fresh else ():
                gradients[number - start] -= tie.bytes
        reduce = 2 * (copies - 1) * (profile.link.latency + parameters / copies / profile.link.bandwidth)
        base = sum(b.forward + b.input_gradient + b.weight_gradient for b in blocks)
        if exchanged and profile.link.sender_busy:
            reduce += 2 * (profile.link.latency + exchanged / profile.link.bandwidth)
        reduce += sum(b.version for b in blocks) if versions > 1 else 0
        base += (sum(b.update for b in blocks) + reduce) / per_update
        link = 0.0
        if start > 0:
            link = profile.link.latency + entered[0] / profile.link.bandwidth
        if stop < len(profile.blocks):
            link = max(link, profile.link.latency + left / profile.link.bandwidth)
        if profile.link.sender_busy:
            base += (start > 0) * (profile.link.latency + entered[0] / profile.link.bandwidth)
            base += (stop < len(profile.blocks)) * (profile.link.latency + left / profile.link.bandwidth)
        held, longer, swapped = every_choice(
            blocks, entered, flight, profile.device.swapped_in, gradients, lag > 0
        )
        if not lag:  # nothing is in flight at an update; what was swapped last may lie there
            held = np.maximum(
                held, sum(b.update_bytes for b in blocks) + (profile.device.swapped_in - 2) * swapped
            )
        host = swapped / profile.device.to_host + swapped / profile.device.from_host
        seconds = np.maximum(np.maximum(base + longer, host), link)
        fitting = np.where(fixed + held <= self.cap, seconds, inf)
        return float(fitting.min()) / copies, float(fixed + held.min())


small = st.integers(0, 6)
block = st.builds(
    lambda forward, inputs, weights, update, kept, boundary, parameters, swapping, working, updating: BlockCost(
        "b", forward / 4, inputs / 4, weights / 4, update / 16, kept, boundary, parameters, version=update / 32,
        swapping=swapping / 8, working_bytes=working, update_bytes=updating,
    ),
    small, small, small, st.integers(0, 2), st.integers(0, 9), st.integers(0, 3),
    st.integers(0, 3) | st.integers(0, 12), st.just(0) | st.integers(0, 8), st.just(0) | st.integers(0, 7),
    st.just(0) | st.integers(0, 12),
)  # fmt: skip


@st.composite
def problems(draw: st.DrawFn, least: int = 1, most: int = 6) -> tuple[Profile, int, int]:
    kinds = draw(st.lists(block, min_size=1, max_size=4))  # repeated blocks are the usual case
    blocks = tuple(draw(st.lists(st.sampled_from(kinds), min_size=least, max_size=most)))
    out, back = draw(st.sampled_from([0.5, 3.0, 40.0])), draw(st.sampled_from([1.0, 10.0]))
    device = DeviceCost(
        1, out, back, workspace=draw(st.sampled_from([0, 0, 5])), swapped_in=draw(st.sampled_from([2, 3]))
    )
    link = LinkCost(
        draw(st.sampled_from([0.5, 4.0, 100.0])), draw(st.sampled_from([0.0, 0.1])), draw(st.booleans())
    )
    tied = ()
    if len(blocks) > 1 and draw(st.booleans()):
        # What is shared is a part of each: the first and the last, as embeddings are.
        shared = min(blocks[0].parameter_bytes, blocks[-1].parameter_bytes)
        tied = (Tie(shared, (0, len(blocks) - 1)),) if shared else ()
    ratio = draw(st.sampled_from([0.0, 1.0, 2.0]))
    profile = Profile(blocks, device, link, 1, optimizer_ratio=ratio, tied=tied)
    cap = draw(st.integers(1, 20 + 12 * len(blocks)))
    return profile, draw(st.integers(1, 4)), cap


FREE = BlockCost("b", 0.0, 0.0, 0.0, 0.0, 0, 0, 0)
"""A block that takes no time and no memory."""


def made_of(*blocks: BlockCost, tied: tuple[Tie, ...] = ()) -> Profile:
    """For counterexamples that were found."""
    device, link = DeviceCost(1, 0.5, 1.0), LinkCost(0.5, 0.0, sender_busy=False)
    return Profile(blocks, device, link, 1, optimizer_ratio=0.0, tied=tied)


def planned(profile: Profile, ranks: int, cap: int, schedule: str) -> PlanResult | None:
    try:
        return plan(profile, ranks, cap, schedule, minibatches=MINIBATCHES)
    except VPipeError:
        return None


def by_sums(profile: Profile, ranks: int, cap: int, schedule: str) -> PlanResult | None:
    """The plan that the search starts with where there are many partitions: its slowest stage is the quickest."""
    kind = kind_of(schedule)
    task = Task(profile, ranks, cap, kind, MINIBATCHES, None, profile)
    task = task._replace(profile=as_scheduled(profile, kind.splits_backward, task.update_interval))
    return min((found for found in plans_by_sums(task) if not found.depth), key=slowest, default=None)


def slowest(result: PlanResult) -> float:
    return max(position.seconds for position in result.positions)


def assert_best(result: PlanResult | None, brute: Brute) -> None:
    """By sums; or, since replicas wait for each other, of those with equally many on each stage, or of any replicas.

    The last are searched as if gradients were always there, as they are where replicas differ.
    """
    best = brute.best()
    if result is None:
        assert best == inf
    elif slowest(result) != approx(best):
        assert slowest(result) > best
        assert brute.schedule != "2bw" or result.replicas[0] == 1
        if len(set(result.replicas)) == 1:
            assert slowest(result) == approx(brute.best(equal=result.replicas[0]))
        else:
            stale = Brute(brute.profile, brute.ranks, brute.cap, brute.schedule, stale=True)
            assert brute.schedule == "pipedream"
            assert slowest(result) == approx(stale.best())


def approx(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-6, abs=1e-12)


@draws(50)
@given(problems(), st.sampled_from(SCHEDULES))
def test_equals_brute_force(problem: tuple[Profile, int, int], schedule: str) -> None:
    profile, ranks, cap = problem
    assert_best(by_sums(profile, ranks, cap, schedule), Brute(profile, ranks, cap, schedule))


@draws(20)
@given(problems(), st.sampled_from(SCHEDULES))
def test_a_plan_fits(problem: tuple[Profile, int, int], schedule: str) -> None:
    profile, ranks, cap = problem
    result = planned(profile, ranks, cap, schedule)
    if by_sums(profile, ranks, cap, schedule) is not None:
        assert result is not None
    if result is not None:
        assert all(position.memory.total <= cap for position in result.positions)
        assert sum(result.partition) == len(profile.blocks) == len(result.policies)
        assert sum(result.replicas) + result.idle == ranks


@draws(10)
@given(problems(least=7, most=10), st.sampled_from(SCHEDULES))
def test_equals_brute_force_for_more_blocks(problem: tuple[Profile, int, int], schedule: str) -> None:
    profile, ranks, cap = problem
    assert_best(by_sums(profile, ranks, cap, schedule), Brute(profile, ranks, cap, schedule))


@pytest.mark.parametrize("count", [8, pytest.param(24, marks=pytest.mark.long)])
def test_ten_different_blocks_on_four_ranks(count: int) -> None:
    """Of these problems the best plans keep, recompute and swap, with and without replicas."""
    random = Random(1)
    used: Counter[str] = Counter()
    for number in range(count):
        blocks = tuple(
            BlockCost(
                "b", *(random.randint(1, 9) / 4 for _ in range(3)), random.randint(0, 2) / 16,
                random.randint(1, 30), random.randint(0, 4), random.randint(0, 4),
                swapping=number % 2 * random.randint(0, 4) / 8, update_bytes=random.randint(0, 8),
            )
            for _ in range(10)
        )  # fmt: skip
        device = DeviceCost(1, random.choice([2.0, 9.0]), random.choice([2.0, 9.0]))
        profile = Profile(blocks, device, LinkCost(random.choice([1.0, 20.0]), 0.01), 1, 1.0)
        schedule = SCHEDULES[number % 4]
        brute = Brute(profile, 4, 0, schedule)
        cap = round(brute.least() * random.choice([1.0, 1.1, 1.3, 1.6]))
        brute = Brute(profile, 4, cap, schedule)
        result = by_sums(profile, 4, cap, schedule)
        assert result is not None
        assert_best(result, brute)
        used.update({*result.policies, "replicas" if max(result.replicas) > 1 else "none"})
    assert min(used[what] for what in ("keep", "recompute", "swap", "replicas", "none")) >= count / 8, used


@draws(20)
@given(problems(), st.integers(1, 40), st.sampled_from((*SCHEDULES, "zb-h1")))
def test_more_memory_is_never_slower(problem: tuple[Profile, int, int], more: int, schedule: str) -> None:
    profile, ranks, cap = problem
    result, richer = (planned(profile, ranks, size, schedule) for size in (cap, cap + more))
    if result is not None:
        assert richer is not None
        if schedule in ("pipedream", "2bw") and max(result.replicas) == 1:
            assert richer.seconds <= result.seconds * (1 + 1e-6)
        assert planned(profile, ranks, cap, schedule) == result


@draws(20)
@given(problems(), st.sampled_from(("zb-h1", "zb-v", "interleaved", "auto")))
def test_never_exceeds_the_cap(problem: tuple[Profile, int, int], schedule: str) -> None:
    profile, ranks, cap = problem
    result = planned(profile, ranks, cap, schedule)
    if result is not None:
        assert all(position.memory.total <= cap for position in result.positions)
        assert sum(result.partition) == len(profile.blocks) == len(result.policies)


def refusal(profile: Profile, ranks: int, cap: int, schedule: str) -> str | None:
    try:
        plan(profile, ranks, cap, schedule, minibatches=MINIBATCHES)
    except VPipeError as error:
        return str(error)
    return None


def reported(text: str, pattern: str) -> int | None:
    found = search(pattern, text)
    return None if found is None else int(found[1])


@draws(30)
@given(problems(), st.sampled_from(SCHEDULES), st.sampled_from([1, 6, 8]), st.integers(1, 4))
# A stage that shares a parameter with an earlier one: what it holds of the others' gradients was counted differently.
@example(
    (made_of(*[replace(FREE, parameter_bytes=1, update_bytes=5)] * 2, tied=(Tie(1, (0, 1)),)), 2, 1),
    "pipedream",
    1,
    1,
)
def test_the_refusal_names_the_smallest_changes(
    problem: tuple[Profile, int, int], schedule: str, size: int, part: int
) -> None:
    profile, ranks, cap = problem
    profile, cap = replace(profile, batch_size=size), 1 + cap // part

    def least(ranks: int, size: int = size) -> float:
        """With one minibatch in flight, perhaps on fewer ranks."""
        sized = for_batch_size(profile, size)
        return min(Brute(sized, own, 0, schedule, shallow=True).least() for own in range(1, ranks + 1))

    text = refusal(profile, ranks, cap, schedule)
    assert (text is None) == (least(ranks) <= cap)
    if text is None:
        return
    needed = reported(text, r"what would fit: a memory of (\d+) bytes")
    assert needed == least(ranks)
    assert reported(text, r"at best (\d+) bytes .* are missing on stage") == needed - cap
    assert refusal(profile, ranks, needed, schedule) is None
    assert refusal(profile, ranks, needed - 1, schedule) is not None
    more = reported(text, r"or (\d+) ranks")
    if more is not None:
        assert least(more) <= cap < least(more - 1)
    elif ranks < 4:
        assert least(ranks + 1) > cap
    smaller = reported(text, r"or a batch size of (\d+)")
    if smaller is not None:
        assert least(ranks, smaller) <= cap < least(ranks, smaller + 1)
    else:
        assert size == 1 or least(ranks, 1) > cap


@draws(20)
@given(problems(), st.sampled_from(("zb-h1", "zb-v", "interleaved", "auto")))
# Of stages that share a rank not all hold the most at the same time: it named too little of the first, of the second
# more than is needed.
@example((made_of(*[replace(FREE, kept_bytes=1, parameter_bytes=1)] * 4), 2, 1), "zb-v")
@example((made_of(*[replace(FREE, kept_bytes=1)] * 4), 2, 1), "zb-v")
def test_the_memory_that_a_refusal_names_fits(problem: tuple[Profile, int, int], schedule: str) -> None:
    profile, ranks, cap = problem
    text = refusal(profile, ranks, cap, schedule)
    needed = None if text is None else reported(text, r"what would fit: a memory of (\d+) bytes")
    if needed is not None:
        assert needed > cap
        assert refusal(profile, ranks, needed, schedule) is None
        assert refusal(profile, ranks, needed - 1, schedule) is not None


def split_stage(
    blocks: tuple[BlockCost, ...], load: Load, lying: int, policies: tuple[str, ...]
) -> tuple[int, float, int]:
    """Bytes, seconds more and swapped bytes of a stage whose backward is split, block by block."""
    numbers = range(len(blocks))
    reads = [0, *(b.boundary_bytes for b in blocks)]
    held = [reads[i] if policies[i] == "R" else blocks[i].kept_bytes for i in numbers]
    after = [b.kept_bytes if b.deferred_bytes is None else b.deferred_bytes for b in blocks]
    moments = [sum(held)]  # of the minibatch whose backward runs
    for i in reversed(numbers):
        own = blocks[i].kept_bytes if policies[i] == "R" else held[i]
        moments.append(sum(held[:i]) + own + blocks[i].working_bytes + sum(after[i + 1 :]))
        moments.append(sum(held[:i]) + sum(after[i:]))
    there = [min(load.in_flight, lying) if policy == "S" else load.in_flight for policy in policies]
    total = sum(held[i] * there[i] for i in numbers) + load.waiting * sum(after) + max(moments) - moments[0]
    longer = sum(blocks[i].forward for i in numbers if policies[i] == "R")
    longer += sum(blocks[i].swapping for i in numbers if policies[i] == "S")
    swapped = sum(blocks[i].kept_bytes for i in numbers if policies[i] == "S")
    total = max(total, sum(b.update_bytes for b in blocks) + (lying - 2) * swapped)  # when all is done
    return total, longer, swapped


@draws(70)
@given(problems(most=5), st.lists(st.none() | st.integers(0, 9), min_size=5, max_size=5), st.data())
def test_split_backwards_equal_brute_force(
    problem: tuple[Profile, int, int], deferred: list[int | None], data: st.DataObject
) -> None:
    profile, _, cap = problem
    blocks = tuple(replace(b, deferred_bytes=d) for b, d in zip(profile.blocks, deferred, strict=False))
    profile = replace(profile, blocks=blocks)
    load = Load(1, data.draw(st.integers(1, 4)), 1, data.draw(st.integers(0, 3)), True, 1.0)
    piece = Slice(0, len(blocks), load, (0,), None, None)
    parameters = sum(b.parameter_bytes for b in blocks) - sum(tie.bytes for tie in profile.tied)
    fixed = ceil(parameters * (2 + profile.optimizer_ratio)) + profile.device.workspace
    base = sum(b.forward + b.backward + b.update for b in blocks)
    lying = profile.device.swapped_in
    found = [split_stage(blocks, load, lying, policies) for policies in product("KRS", repeat=len(blocks))]
    assert least_memory(profile, [piece]) == fixed + min(total for total, _, _ in found)
    per_byte = 1 / profile.device.to_host + 1 / profile.device.from_host
    fitting = [max(base + longer, moved * per_byte) for total, longer, moved in found if fixed + total <= cap]
    chosen = choose(profile, [piece], cap)
    assert (inf if chosen is None else chosen[0]) == pytest.approx(min([inf, *fitting]), rel=1e-6, abs=1e-12)
    if chosen is not None:
        assert stage_memory(profile, [piece], chosen[1]).total <= cap


def fastest_of_all(profile: Profile, load: Load, cap: int) -> float:
    """The least time of one stage of all blocks, over every policy of every block at once."""
    blocks, flight = profile.blocks, load.in_flight
    gradients = [b.parameter_bytes if load.fresh else 0 for b in blocks]
    entered = [0, *(b.boundary_bytes for b in blocks[:-1])]
    held, longer, swapped = every_choice(
        blocks, entered, flight, profile.device.swapped_in, gradients, load.asynchronous
    )
    if not load.asynchronous:
        held = np.maximum(
            held, sum(b.update_bytes for b in blocks) + (profile.device.swapped_in - 2) * swapped
        )
    parameters = sum(b.parameter_bytes for b in blocks) - sum(tie.bytes for tie in profile.tied)
    fixed = parameters * (1 + (not load.fresh) + profile.optimizer_ratio) + profile.device.workspace
    fits = fixed + held <= cap
    base = sum(b.forward + b.backward + b.update for b in blocks)
    per_byte = 1 / profile.device.to_host + 1 / profile.device.from_host
    return float(np.where(fits, np.maximum(base + longer, swapped * per_byte), inf).min())


@draws(14)
@given(
    problems(most=12),
    st.integers(1, 4),
    st.floats(0, 1),
    st.sampled_from([(0, False), (1, False), (1, True)]),
)
def test_many_blocks_of_few_kinds_equal_brute_force(
    problem: tuple[Profile, int, int], in_flight: int, room: float, updating: tuple[int, bool]
) -> None:
    profile, _, _ = problem
    repeated = (profile.blocks * 12)[: 11 if len(profile.blocks) % 2 else 12]
    profile = replace(profile, blocks=repeated, tied=())
    load = Load(1, in_flight, 1, 0, False, 1.0, *updating)
    piece = Slice(0, len(repeated), load, (0,), None, None)
    least = least_memory(profile, [piece])
    most = stage_memory(profile, [piece], [["keep"] * len(repeated)]).total
    cap = least + round(room * (most - least))
    expected, chosen = fastest_of_all(profile, load, cap), choose(profile, [piece], cap)
    assert chosen is not None
    assert chosen[0] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert stage_memory(profile, [piece], chosen[1]).total <= cap


@pytest.mark.parametrize(("swapping", "policy", "seconds"), [(0.25, "swap", 3.25), (1.5, "recompute", 3.5)])
def test_a_plan_recomputes_where_swapping_takes_longer(swapping: float, policy: str, seconds: float) -> None:
    """Under this cap two minibatches of a block have room; copies are quick.

    Where it recomputes, two stages of two ranks are quicker than four of one, for one of two blocks is enough then.
    """
    one = BlockCost("b", 1.0, 1.0, 1.0, 0.0, 15, 1, 0, swapping=swapping)
    profile = Profile((one,) * 4, DeviceCost(1, 100.0, 100.0), LinkCost(1e9, 0.0), 1)
    result = plan(profile, 4, 2 * 15 + 2 * (1 + 1), "pipedream")
    assert set(result.policies) == {"keep", policy}
    assert result.seconds == pytest.approx(seconds)
    simulated = simulate(profile, result.to_plan(), minibatches=96)
    assert simulated.samples_per_second == pytest.approx(1 / seconds)


@pytest.mark.parametrize("blocks", [4, 12])
def test_of_blocks_that_are_equal_but_for_swapping_the_cheapest_are_swapped(blocks: int) -> None:
    dear = BlockCost("b", 1.0, 1.0, 1.0, 0.0, 10, 10, 0, swapping=0.5)
    cheap = tuple(replace(dear, swapping=0.125) if number % 3 == 1 else dear for number in range(blocks))
    profile = Profile(cheap, DeviceCost(1, 1e3, 1e3), LinkCost(1e9, 0.0), 1)
    piece = Slice(0, blocks, Load(1, 4, 1, 0, False, 1.0), (0,), None, None)
    swapped = blocks // 3
    chosen = choose(profile, [piece], 4 * 10 * blocks - (4 - 2) * 10 * swapped)
    assert chosen is not None
    seconds, (policies,) = chosen
    assert seconds == pytest.approx(3 * blocks + 0.125 * swapped)
    assert [number for number, policy in enumerate(policies) if policy == "swap"] == list(range(1, blocks, 3))


@pytest.mark.parametrize("blocks", [4, 9, 14])
@pytest.mark.parametrize("schedule", ["vpipe", "2bw"])
def test_an_asynchronous_plan_takes_what_the_simulator_says(schedule: str, blocks: int) -> None:
    """By sums, cuts of few blocks are more even with replicas; but these wait for each other."""
    profile = Profile(
        (BlockCost("b", 1.0, 1.0, 1.0, 0.1, 1, 1, 1),) * blocks,
        DeviceCost(10**6, 1e9, 1e9),
        LinkCost(1e9, 0.0),
        1,
    )
    result = plan(profile, 4, schedule=schedule)
    simulated = simulate(profile, result.to_plan(), None, 96).samples_per_second
    assert result.samples_per_second == pytest.approx(simulated, rel=0.02)
    straight = simulate(profile, Plan(even(blocks, 4), ("keep",) * blocks, schedule), None, 96)
    assert simulated >= straight.samples_per_second * (1 - 1e-6)


def even(blocks: int, parts: int) -> tuple[int, ...]:
    return tuple(blocks // parts + (part < blocks % parts) for part in range(parts))
