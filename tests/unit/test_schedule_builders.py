"""The schedules by name, as pictures and as properties over all small pipelines."""

import pickle
from itertools import islice, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from tests.schedules import ASYNCHRONOUS, NAMES, programs
from vpipe.errors import ScheduleError
from vpipe.schedule import Action, Op, Schedule, bubble, build, check, draw, holdings, lower, walk

SMALL = list(product(range(1, 9), (1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 23, 32)))
ALL_SMALL = list(product(range(1, 9), range(1, 33)))
UNEQUAL = [name for name in NAMES if name not in ("interleaved", "zb-v")]

BUFFER = {"interleaved": None}
"""A channel with room for one message is enough for all but this one, whose long rounds let some wait."""


def picture(schedule: Schedule) -> list[str]:
    return [
        line.split("  ", 1)[1] for line in draw(schedule, width=1000).splitlines() if line.startswith("rank")
    ]


def test_gpipe_is_two_staircases() -> None:
    assert picture(build("gpipe", 3, 3)) == [
        "F0 F1 F2 ·  ·  ·  ·  ·  ·  B0─── B1─── B2───*",
        "·  F0 F1 F2 ·  ·  ·  B0─── B1─── B2───*·  ·",
        "·  ·  F0 F1 F2 B0─── B1─── B2───*·  ·  ·  ·",
    ]


def test_1f1b_takes_turns() -> None:
    assert picture(build("1f1b", 3, 4)) == [
        "F0 F1 F2 ·  ·  ·  ·  B0─── F3 B1─── ·  B2─── ·  B3───*",
        "·  F0 F1 ·  ·  B0─── F2 B1─── F3 B2─── ·  B3───*·  ·",
        "·  ·  F0 B0─── F1 B1─── F2 B2─── F3 B3───*·  ·  ·  ·",
    ]


def test_pipedream_updates_after_every_backward() -> None:
    assert picture(build("pipedream", 2, 3)) == [
        "F0 F1 ·  ·  B0───*F2 B1───*·  B2───*",
        "·  F0 B0───*F1 B1───*F2 B2───*·  ·",
    ]


def test_zb_h1_puts_off_weight_gradients_until_there_is_a_bubble() -> None:
    assert picture(build("zb-h1", 3, 3)) == [
        "F0 F1 F2 ·  ·  I0 W0 I1 W1 I2 W2*",
        "·  F0 F1 ·  I0 F2 I1 W0 I2 W1 W2*",
        "·  ·  F0 I0 F1 I1 F2 I2 W0 W1 W2*",
    ]


def test_zb_v_goes_down_and_up_again() -> None:
    assert picture(build("zb-v", 2, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2*·",
        "·   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2*",
    ]


def test_interleaved_runs_chunk_after_chunk() -> None:
    assert programs(build("interleaved", 2, 4, chunks=2))[1] == (
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 3STEP3 1STEP3"
    )


def test_interleaved_has_longer_rounds_rather_than_a_short_one() -> None:
    assert programs(build("interleaved", 2, 3, chunks=2))[1] == (
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2 3STEP2 1STEP2"
    )


def test_replicas_take_turns() -> None:
    assert programs(build("1f1b", 2, 5, replicas=(2, 1))) == [
        "0F0 0F2 0B0 0F4 0B2 0B4 0STEP4",
        "0F1 0F3 0B1 0B3 0STEP4",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1STEP4",
    ]


def test_a_replica_without_a_minibatch_of_the_last_group_updates_all_the_same() -> None:
    assert programs(build("pipedream", 2, 5, replicas=(2, 1)))[:2] == [
        "0F0 0F2 0B0 0STEP1 0F4 0B2 0STEP3 0B4 0STEP4",
        "0F1 0F3 0B1 0STEP1 0B3 0STEP3 0STEP4",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_small_pipelines_can_run(name: str) -> None:
    for stages, minibatches in SMALL:
        if minibatches <= 8:
            check(build(name, stages, minibatches), buffer=BUFFER.get(name, 1))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_all_small_pipelines_can_run(name: str) -> None:
    for stages, minibatches in ALL_SMALL:
        check(build(name, stages, minibatches), buffer=BUFFER.get(name, 1))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_idle_by_the_formula(name: str) -> None:
    for stages, minibatches in SMALL:
        expected = (stages - 1) / (minibatches + stages - 1)
        assert bubble(build(name, stages, minibatches)) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "2bw"])
def test_1f1b_orders_hold_what_lies_below_them(name: str) -> None:
    for stages, minibatches in SMALL:
        held = [stage.in_flight for stage in holdings(build(name, stages, minibatches))]
        assert held == [min(minibatches, stages - stage) for stage in range(stages)]


def test_gpipe_holds_everything() -> None:
    assert [stage.in_flight for stage in holdings(build("gpipe", 3, 7))] == [7, 7, 7]


def test_zero_bubble_schedules_idle_less() -> None:
    for stages, minibatches in SMALL:
        plain, split, v = (bubble(build(name, stages, minibatches)) for name in ("1f1b", "zb-h1", "zb-v"))
        assert split < plain or stages == 1
        assert v <= split + 1e-12
        if minibatches >= stages:
            assert split == pytest.approx((stages - 1) / (3 * minibatches + stages - 1))


def test_zb_h1_peaks_where_1f1b_does() -> None:
    for stages, minibatches in SMALL:
        peak = max(stage.in_flight for stage in holdings(build("zb-h1", stages, minibatches)))
        assert peak == max(stage.in_flight for stage in holdings(build("1f1b", stages, minibatches)))


def test_zb_v_has_no_bubble_and_the_memory_of_1f1b() -> None:
    for stages, minibatches in SMALL:
        schedule = build("zb-v", stages, minibatches)
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        held, peak = [0] * stages, [0] * stages
        for rank, action, start, end in walk(schedule):
            first.setdefault(rank, start)
            last[rank] = end
            held[rank] += {Op.F: 1, Op.W: -1}.get(action.op, 0)
            peak[rank] = max(peak[rank], held[rank])
        assert max(peak) <= 2 * min(stages, minibatches)
        if minibatches >= 2 * stages:
            assert {last[rank] - first[rank] for rank in range(stages)} == {6 * minibatches}


def test_zb_v_does_everything_once() -> None:
    schedule = build("zb-v", 8, 32)
    assert [len(list(schedule.program(rank))) for rank in range(8)] == [6 * 32 + 2] * 8


def test_interleaved_idles_less_with_more_chunks() -> None:
    shares = [bubble(build("interleaved", 4, 8, chunks=chunks)) for chunks in (1, 2, 4)]
    assert shares == pytest.approx([3 / (chunks * 8 + 3) for chunks in (1, 2, 4)])


@draws(60)
@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4), st.integers(1, 3))
def test_interleaved_runs_with_any_number_of_minibatches(p: int, m: int, chunks: int, replicas: int) -> None:
    check(build("interleaved", p, m, chunks=chunks, replicas=(replicas,) * p))


@draws(60)
@given(
    st.sampled_from(UNEQUAL),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(1, 24),
    st.data(),
)
def test_any_replicas_can_run(name: str, replicas: list[int], minibatches: int, data: st.DataObject) -> None:
    interval = data.draw(st.none() | st.integers(30, 40)) if name in ASYNCHRONOUS else None
    check(build(name, len(replicas), minibatches, replicas=replicas, update_interval=interval), buffer=1)


def test_all_small_replicated_pipelines_can_run() -> None:
    for name, replicas in product(("1f1b", "pipedream"), product((1, 2, 3), repeat=3)):
        for minibatches in (1, 2, 3, 7, 11):
            check(build(name, 3, minibatches, replicas=replicas), buffer=1)


@draws(40)
@given(st.integers(1, 5), st.integers(1, 20), st.integers(1, 3))
def test_zb_v_takes_equal_replicas(stages: int, minibatches: int, replicas: int) -> None:
    check(build("zb-v", stages, minibatches, replicas=(replicas,) * stages), buffer=1)


@draws(60)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 16))
def test_every_stage_gathers_gradients_in_the_order_of_the_minibatches(name: str, p: int, m: int) -> None:
    """Sums of floats depend on their order: with the same one, all schedules give the same bits."""
    schedule = build(name, p, m)
    for rank in range(schedule.num_ranks):
        for stage in schedule.stages_of(rank):
            gathered = [
                a.minibatch for a in schedule.program(rank) if a.stage == stage and a.op in (Op.B, Op.W)
            ]
            assert gathered == list(range(m))


def test_pipedream_has_as_many_versions_as_stages_below() -> None:
    for stages in range(1, 9):
        for minibatches in range(2 * stages - 1, 33):
            held = holdings(build("pipedream", stages, minibatches))
            assert [stage.versions for stage in held] == [stages - stage for stage in range(stages)]
            assert [stage.staleness for stage in held] == [stages - 1 - stage for stage in range(stages)]


def test_2bw_has_at_most_two_versions() -> None:
    for stages, minibatches in SMALL:
        held = holdings(build("2bw", stages, minibatches))
        assert max(stage.versions for stage in held) <= 2
    assert [stage.versions for stage in holdings(build("2bw", 4, 32))] == [2, 2, 2, 1]


@draws(60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_2bw_knows_the_smallest_interval_for_two_versions(replicas: list[int]) -> None:
    """Compared with what pipedream holds, which takes any interval from the number of replicas on."""
    stages = len(replicas)

    def versions(interval: int) -> int:
        schedule = build("pipedream", stages, 64, replicas=replicas, update_interval=interval)
        return max(stage.versions for stage in holdings(schedule))

    smallest = next(interval for interval in range(max(replicas), 64) if versions(interval) <= 2)
    assert max(s.versions for s in holdings(build("2bw", stages, 64, replicas=replicas))) <= 2
    assert build("2bw", stages, 64, replicas=replicas, update_interval=smallest).update_interval == smallest
    if smallest > 1:
        with pytest.raises(ScheduleError, match=f"needs at least {smallest}"):
            build("2bw", stages, 64, replicas=replicas, update_interval=smallest - 1)


@draws(40)
@given(
    st.sampled_from(ASYNCHRONOUS),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(0, 30),
    st.integers(12, 14) | st.none(),
)
def test_a_known_end_changes_nothing(name: str, replicas: list[int], end: int, interval: int | None) -> None:
    endless = build(name, len(replicas), None, replicas=replicas, update_interval=interval)
    ended = build(name, len(replicas), max(end, 1), replicas=replicas, update_interval=interval)
    for rank in range(endless.num_ranks):
        run = list(endless.program(rank, lambda minibatch: minibatch < end))
        assert run == (list(ended.program(rank)) if end else [])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream", "2bw"])
def test_minibatches_without_number_are_generated_lazily(name: str) -> None:
    """So many that no list would hold them, and no loop over them would end."""
    program = build(name, 4, 10**15).program(1)
    assert list(islice(program, 3)) == [Action(1, Op.F, minibatch) for minibatch in range(3)]


def test_an_endless_program_reads_ahead_no_further_than_it_must() -> None:
    asked: list[int] = []

    def exists(minibatch: int) -> bool:
        asked.append(minibatch)
        return True

    program = build("pipedream", 4, None).program(0, exists)
    assert [str(action) for action in islice(program, 5)] == ["0F0", "0F1", "0F2", "0F3", "0B0"]
    assert max(asked) == 3


def test_a_schedule_can_be_sent_to_another_process() -> None:
    for name in NAMES:
        schedule = lower(build(name, 3, 5))
        assert programs(pickle.loads(pickle.dumps(schedule))) == programs(schedule)


def test_placement() -> None:
    schedule = build("1f1b", 3, 4, replicas=(2, 2, 1))
    assert schedule.placement == ((0, 1), (2, 3), (4,))
    assert (schedule.num_stages, schedule.num_ranks) == (3, 5)
    assert schedule.rank_of(1, 3) == 3
    assert build("interleaved", 2, 4, chunks=3).stages_of(1) == (1, 3, 5)
    assert build("zb-v", 3, 4).stages_of(0) == (0, 5)
    assert build("interleaved", 2, 4, replicas=(2, 2)).placement == ((0, 1), (2, 3), (0, 1), (2, 3))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("pipdream", 2, 4), {}, "unknown schedule 'pipdream': did you mean 'pipedream'"),
        (("gpipe", 0, 4), {}, "stages is 0: it must be a whole number, 1 or more"),
        (("gpipe", 2, 0), {}, "minibatches is 0"),
        (("gpipe", 2, -1), {}, "minibatches is -1"),
        (("gpipe", 2, None), {}, "schedule 'gpipe' needs the number of minibatches"),
        (("gpipe", 2, 4), {"chunks": 2}, "chunks is 2, but schedule 'gpipe' has 1"),
        (("zb-v", 2, 4), {"chunks": 3}, "chunks is 3, but schedule 'zb-v' has 2"),
        (("interleaved", 2, 4), {"chunks": 0}, "chunks is 0"),
        (("gpipe", 2, 4), {"replicas": (1,)}, "replicas 1 name 1 positions, but there are 2"),
        (("gpipe", 2, 4), {"replicas": (1, 0)}, "replicas of stage 1 is 0"),
        (("zb-v", 2, 4), {"replicas": (2, 1)}, "needs equally many replicas on all positions, not 2, 1"),
        (("1f1b", 2, 4), {"update_interval": 2}, "updates once, after all 4 minibatches"),
        (("pipedream", 2, 4), {"update_interval": 0}, "update_interval is 0"),
    ],
)
def test_mistakes_are_named(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(*arguments, **options)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(ScheduleError, match="rank 2 is not in schedule 'gpipe': it has ranks 0 to 1"):
        build("gpipe", 2, 4).program(2)
