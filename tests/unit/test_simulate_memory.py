"""Simulated memory against what the schedule says of itself, and by hand."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.schedules import NAMES
from tests.unit.test_simulate_time import block, profile
from vpipe.cost import BlockCost, LinkCost, Plan, Profile, Tie, for_batch_size
from vpipe.schedule import Action, build, holdings
from vpipe.schedule.facts import fresh_gradients
from vpipe.simulate import RankMemory, RankPrediction, Simulation, simulate
from vpipe.simulate.arrange import arrange


def chain(stages: int, **more: int) -> Profile:
    return profile(*[block(**more)] * stages)


def plan(*policies: str) -> Plan:
    return Plan((1,) * len(policies), policies)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 2), (3, 5)])
def test_1f1b_holds_what_is_in_flight(p: int, m: int) -> None:
    result = simulate(chain(p), plan(*["keep"] * p), "1f1b", m)
    assert [rank.memory.activations for rank in result.ranks] == [min(m, p - s) * 10 for s in range(p)]
    assert [rank.memory.versions for rank in result.ranks] == [0] * p


def test_what_makes_up_the_peak() -> None:
    result = simulate(chain(3), plan("keep", "keep", "keep"), "pipedream", 12)
    assert [rank.memory for rank in result.ranks] == [
        RankMemory(weights=100, versions=200, gradients=100, optimizer=200, activations=20, buffers=8),
        RankMemory(weights=100, versions=100, gradients=100, optimizer=200, activations=10, buffers=16),
        RankMemory(weights=100, versions=0, gradients=90, optimizer=200, activations=10, buffers=8),
    ]
    assert result.ranks[0].memory.total == 628
    assert [rank.most_activations for rank in result.ranks] == [30, 20, 10]
    assert (result.in_flight, result.versions) == ((3, 2, 1), (3, 2, 1))
    # Within a backward what comes beyond the most that it needs without them is reported as gradients: 90, not 100.
    # Gradients to which several minibatches add are always there.
    adding = simulate(chain(3), plan("keep", "keep", "keep"), "2bw", 12)
    assert adding.ranks[0].memory == RankMemory(100, 100, 100, 200, 30, 8)


def test_gradients_come_with_a_backward_and_go_with_its_update() -> None:
    """Two blocks on the second of two ranks; a backward begins with the last one:

    held        block 1    block 2     gradients                      30 + 20 bytes are kept, 6 and 25 are
    F           30         20                    50                   parameters; a backward works with 7
    B           30         20 + 7                57    the most
                30 + 7                 25        62    the most, where the second has less to give back
                .          .           6 + 25    31
    STEP        .          .           6 + 25    31 + update_bytes
    """
    first, second = block(kept_bytes=30, parameter_bytes=6), block(kept_bytes=20, parameter_bytes=25)
    first, second = (replace(one, working_bytes=7) for one in (first, second))

    def peak(*blocks: BlockCost, schedule: str = "pipedream") -> RankMemory:
        used = Plan((1, 2), ("keep",) * 3)
        return simulate(profile(block(), *blocks), used, schedule, 12).ranks[1].memory

    assert peak(first, second) == RankMemory(31, 0, 5, 62, 57, 8)
    assert peak(first, replace(second, parameter_bytes=15)) == RankMemory(21, 0, 0, 42, 57, 8)
    updating = [replace(one, update_bytes=20) for one in (first, second)]
    assert peak(*updating) == RankMemory(31, 0, 31 + 40, 62, 0, 8)
    # Nothing else is in flight there when an update is made, nor anywhere in a synchronous schedule.
    assert peak(*updating, schedule="gpipe") == RankMemory(31, 0, 31, 62, 12 * 50 + 7, 8)
    large = [replace(one, update_bytes=400) for one in (first, second)]
    assert peak(*large, schedule="gpipe") == RankMemory(31, 0, 31 + 800, 62, 0, 8)


def test_an_update_lies_beside_the_other_minibatches_and_their_weights() -> None:
    """The first of three ranks: three minibatches of 10 bytes and three versions of 100 when a backward begins; then
    gradients of 100 in place of one minibatch, and what the update makes of them."""
    costs = chain(3, update_bytes=50, update=1.0)
    result = simulate(costs, plan("keep", "keep", "keep"), "pipedream", 12, timeline=True)
    assert result.ranks[0].memory == RankMemory(100, 200, 100 + 50, 200, 20, 8)
    assert result.timeline is not None
    first = dict(event[1:3] for event in result.timeline.events if event.rank == 0)
    start = first[Action.parse("0STEP6")]
    samples = [held for time, held in result.timeline.memory[0] if start - 3 <= time <= start + 1]
    # While the backward runs, after it, while the update runs, after it, and with the next minibatch:
    assert samples[-5:] == [20 + 200 + 100, 20 + 100 + 100, 20 + 200 + 100 + 50, 20 + 200, 30 + 200]


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_what_libraries_hold_is_held_once_by_a_rank(name: str) -> None:
    bare, used = chain(4), plan(*["keep"] * 4)
    more = replace(bare, device=replace(bare.device, workspace=70))
    for a, b in zip(simulate(bare, used, name, 4).ranks, simulate(more, used, name, 4).ranks, strict=True):
        assert b.memory == a.memory._replace(buffers=a.memory.buffers + 70)


def test_an_update_without_a_backward_leaves_no_debt() -> None:
    """Of 5 minibatches one replica runs 3, the other 2; both make 3 updates."""
    costs, used = profile(*[block()] * 2), Plan((1, 1), ("keep",) * 2, "pipedream", (2, 2))
    result = simulate(costs, used, None, 5, timeline=True)
    assert result.timeline is not None
    assert [samples[-1][1] for samples in result.timeline.memory] == [0] * 4
    assert [rank.memory.activations for rank in result.ranks] == [10, 10, 10, 10]
    assert [rank.memory.gradients for rank in result.ranks] == [100, 100, 90, 90]


def _with_times(
    one: Simulation, other: Simulation
) -> Iterator[tuple[RankPrediction, RankPrediction, float, float]]:
    for a, b in zip(one.ranks, other.ranks, strict=True):
        yield a, b, one.step_time, other.step_time


def test_a_shared_parameter_is_held_once_and_its_gradients_wait() -> None:
    """Blocks 0 and 2 share 60 of their 100 bytes: one copy on one rank, an exchange between two."""
    costs = replace(chain(3), tied=(Tie(60, (0, 2)),), link=LinkCost(60.0, 0.5, sender_busy=True))
    (alone,) = simulate(costs, Plan((3,), ("keep",) * 3), "1f1b", 4).ranks
    assert alone.memory == RankMemory(240, 0, 240, 480, 30, 0)
    bare = simulate(replace(costs, tied=()), plan("keep", "keep", "keep"), "pipedream", 12)
    tied = simulate(costs, plan("keep", "keep", "keep"), "pipedream", 12)
    lag = build("pipedream", 3, 12).lag
    more = [a.memory.total - b.memory.total for a, b in zip(tied.ranks, bare.ranks, strict=True)]
    assert more == [4 * 60, 0, (2 * lag + 1) * 60]
    assert (lag, build("1f1b", 3, 12).lag) == (3, 0)
    # Each update of the outer stages sends 60 bytes, and adds as many; the inner one is no busier than before.
    work = [a.compute * a_time - b.compute * b_time for a, b, a_time, b_time in _with_times(tied, bare)]
    assert work == pytest.approx([2 * 1.5, 0.0, 2 * 1.5])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_in_flight_and_versions_are_the_schedules_own(name: str, replicas: int) -> None:
    stages = 8 if name in ("interleaved", "zb-v") else 4
    used = Plan((1,) * stages, ("keep",) * stages, replicas=(replicas,) * 4)
    result = simulate(chain(stages), used, name, 23)
    held = holdings(build(name, 4, 23, replicas=(replicas,) * 4))
    assert list(result.in_flight) == [stage.in_flight for stage in held]
    assert list(result.versions) == [stage.versions for stage in held]


def test_recomputing_keeps_inputs_and_one_block_at_a_time() -> None:
    """Two blocks of 10 and 30 bytes behind boundaries of 4: inputs while in flight, and in place of one of them
    30 while backward runs."""
    blocks = [block(), block(), block(kept_bytes=30)]
    costs = profile(*blocks)
    kept = simulate(costs, Plan((1, 2), ("keep",) * 3), "gpipe", 5)
    again = simulate(costs, Plan((1, 2), ("keep", "recompute", "recompute")), "gpipe", 5)
    assert kept.ranks[1].memory.activations == 5 * 40
    assert again.ranks[1].memory.activations == 5 * (4 + 4) + 30 - 4
    # The model's first block reads the batch, which is not counted.
    assert (
        simulate(costs, Plan((1, 2), ("recompute", "keep", "keep")), "gpipe", 5).ranks[0].memory.activations
        == 10
    )


def test_what_is_given_back_makes_room_for_what_is_recomputed() -> None:
    """Block 1 of 30 bytes runs again when block 2, of 20, is done: 30 less its input of 4, less those 20."""
    costs = profile(block(), block(kept_bytes=30), block(kept_bytes=20))
    result = simulate(costs, Plan((1, 2), ("keep", "recompute", "keep")), "gpipe", 5)
    assert result.ranks[1].memory.activations == 5 * (4 + 20) + 30 - 4 - 20


def test_what_a_block_works_with_lies_beside_what_is_held_until_its_turn() -> None:
    """The last of two blocks of 10 bytes works with 7; when the first one does, with 12, those 10 are given back."""
    costs = profile(block(), block(working_bytes=12), block(working_bytes=7))
    result = simulate(costs, Plan((1, 2), ("keep",) * 3), "gpipe", 5)
    assert result.ranks[1].memory.activations == 5 * 20 + 7
    again = simulate(costs, Plan((1, 2), ("keep", "recompute", "keep")), "gpipe", 5)
    assert again.ranks[1].memory.activations == 5 * (4 + 10) + 12 + (10 - 4) - 10
    assert for_batch_size(costs, 2 * costs.batch_size).blocks[1].working_bytes == 24


def test_a_split_backward_holds_what_w_reads() -> None:
    """ZB-H1's last of four stages is three W behind: three minibatches wait while one is in flight."""
    for deferred in (None, 7):
        costs = chain(4) if deferred is None else chain(4, deferred_bytes=deferred)
        waiting = 3 * (deferred or 10)
        kept = simulate(costs, plan(*["keep"] * 4), "zb-h1", 12)
        again = simulate(costs, plan(*["recompute"] * 4), "zb-h1", 12)
        assert kept.ranks[3].memory.activations == 10 + waiting
        assert again.ranks[3].memory.activations == 10 + waiting
        # Its first stage waits for no W: of the inputs in flight there are none, and one block runs at a time.
        assert again.ranks[0].memory.activations == 10


def test_gradients_that_wait_may_need_more_than_was_kept() -> None:
    result = simulate(chain(4, deferred_bytes=12), plan(*["keep"] * 4), "zb-h1", 12)
    assert result.ranks[0].memory.activations == 3 * 10 + 12


def test_swapping_leaves_one_in_use_and_one_on_its_way() -> None:
    costs = profile(*[block(parameter_bytes=0)] * 4, host=20 / 3)
    kept = simulate(costs, plan(*["keep"] * 4), "pipedream", 30)
    swapped = simulate(costs, plan("swap", "swap", "keep", "keep"), "pipedream", 30)
    assert [rank.memory.activations for rank in kept.ranks] == [40, 30, 20, 10]
    assert [rank.memory.activations for rank in swapped.ranks] == [20, 20, 20, 10]


def beside_computing(costs: Profile) -> Profile:
    return replace(costs, device=replace(costs.device, swapped_in=3))


def test_where_copies_run_beside_computing_one_that_leaves_lies_there_as_well() -> None:
    """One in use, one that comes back, and one that has left and stays until the next forward."""
    costs = profile(*[block(parameter_bytes=0)] * 6, host=20 / 3)
    used = plan("swap", "swap", "swap", "keep", "keep", "keep")
    at_once, beside = (simulate(each, used, "pipedream", 40) for each in (costs, beside_computing(costs)))
    assert [rank.memory.activations for rank in at_once.ranks] == [20, 20, 20, 30, 20, 10]
    assert [rank.memory.activations for rank in beside.ranks] == [30, 30, 30, 30, 20, 10]
    assert (beside.step_time, beside.makespan) == (at_once.step_time, at_once.makespan)


def test_what_has_left_goes_with_the_next_forward() -> None:
    """A second each way:

    rank    F0              B0      F1              B1
    host       =out= =in=              =out= =in=
    time    0  1     2    3       5    6     7    8       10
    bytes   10       20           10         20           0        F0's ten stay until F1 starts, F1's to the end
    """
    costs = profile(block(parameter_bytes=0), host=10.0)
    at_once, beside = (
        simulate(each, plan("swap"), "pipedream", 2, timeline=True).timeline
        for each in (costs, beside_computing(costs))
    )
    assert at_once is not None
    assert beside is not None
    assert dict(at_once.memory[0]) == {0.0: 10, 2.0: 10, 5.0: 10, 7.0: 10, 10.0: 0}
    assert dict(beside.memory[0]) == {0.0: 10, 2.0: 20, 5.0: 10, 7.0: 20, 10.0: 0}
    assert at_once.events == beside.events


def test_memory_over_time() -> None:
    result = simulate(chain(2), plan("keep", "keep"), "1f1b", 2, timeline=True)
    assert result.timeline is not None
    assert result.timeline.memory == (
        ((0.0, 10), (1.0, 20), (6.0, 10), (9.0, 0)),
        ((1.0, 10), (4.0, 0), (4.0, 10), (7.0, 0)),
    )


blocks = st.lists(
    st.builds(
        block,
        kept_bytes=st.integers(0, 50),
        boundary_bytes=st.integers(0, 9),
        update_bytes=st.integers(0, 200),
    ),
    min_size=4,
    max_size=4,
)
policies = st.lists(st.sampled_from(["keep", "recompute", "swap"]), min_size=4, max_size=4).map(tuple)


@draws(40)
@given(blocks, policies, st.floats(0.5, 100), st.sampled_from(NAMES), st.integers(1, 20), st.booleans())
def test_nothing_is_left_and_nothing_is_owed(
    found: list[BlockCost], chosen: tuple[str, ...], host: float, name: str, m: int, beside: bool
) -> None:
    costs = profile(*found, host=host, link=LinkCost(9.0, 0.1))
    costs = beside_computing(costs) if beside else costs
    result = simulate(costs, plan(*chosen), name, m, timeline=True)
    assert result.timeline is not None
    fresh = fresh_gradients(arrange(plan(*chosen), name, m))
    for rank, samples in zip(result.ranks, result.timeline.memory, strict=True):
        times = [time for time, _ in samples]
        assert times == sorted(times)
        assert min(held for _, held in samples) >= 0
        assert samples[-1][1] == 0
        always = 0 if fresh else rank.memory.weights
        moving = rank.memory.activations + rank.memory.gradients - always + rank.memory.versions
        assert max(held for _, held in samples) == moving
        assert rank.most_activations >= rank.memory.activations
