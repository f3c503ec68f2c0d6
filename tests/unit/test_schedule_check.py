"""Wrong schedules are refused, with the place shown."""

from textwrap import dedent

import pytest

from vpipe.errors import ScheduleError
from vpipe.schedule import Action, Op, Schedule, build, check, listed, lower, read_table


def refusal(table: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(read_table(dedent(table).strip().replace(" ", ","), "mine.csv"), buffer=1)
    return str(caught.value)


def grid(picture: str) -> str:
    return dedent(picture).strip()


def test_two_receives_that_wait_for_each_other() -> None:
    message = refusal(
        """
        0F0 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0F1 0SEND_F1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
        """
    )
    assert message == grid(
        """
        schedule 'mine.csv' cannot run: deadlock: rank 0 waits in 0RECV_B1 for 1SEND_B1; rank 1 waits in 1RECV_F1 for 0SEND_F1
        time    0              5
        rank 0  F0 ·  ·  ·  B0───[0RECV_B1] << waits for 1SEND_B1
        rank 1  ·  F0 B0───[1RECV_F1] << waits for 0SEND_F1
        """  # noqa: E501
    ).replace("───[", "─── [")


def test_a_backward_before_its_forward() -> None:
    message = refusal(
        """
        0F0 0F1 0B0 0B1
        1F0 1B1 1F1 1B0
        """
    )
    assert message == grid(
        """
        schedule 'mine.csv' cannot run: rank 1: 1B1 stands before 1F1, which it needs
        time    0
        rank 0  F0 F1
        rank 1  ·  F0 [1B1] << stands before 1F1, which it needs
        """
    )


def test_a_missing_minibatch() -> None:
    message = refusal(
        """
        0F0 0F1 0B0 0B1
        1F0 1B0
        """
    )
    assert message == grid(
        """
        schedule 'mine.csv' cannot run: rank 1: 1F1 is missing
        time    0              5
        rank 0  F0 F1 ·  ·  B0───
        rank 1  ·  F0 B0─── [1F1] << is missing
        """
    )


CROSSED = """
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0
    1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F0 1F0 1B0 1SEND_B0
"""


def test_more_messages_under_way_than_the_channel_buffers() -> None:
    message = refusal(CROSSED)
    assert message == grid(
        """
        schedule 'mine.csv' cannot run: deadlock: rank 0 waits in 0SEND_F1 for room in its channel, which holds 1 under way; rank 1 waits in 1RECV_F1 for 0SEND_F1
        time    0
        rank 0  F0 F1 [0SEND_F1] << waits for room in its channel, which holds 1 under way
        rank 1  [1RECV_F1] << waits for 0SEND_F1
        """  # noqa: E501
    )
    check(read_table(dedent(CROSSED).strip().replace(" ", ",")), buffer=2)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0F0 0F0 0B0", "rank 0: 0F0 runs twice"),
        ("0F0 0B0 0I0", "rank 0: 0I0 runs twice"),
        ("0F0 0I0", "rank 0: 0W0 is missing"),
        ("0F0 0W0 0I0", "rank 0: 0W0 stands before 0I0, which it needs"),
        ("0F0 0STEP0 0B0", "rank 0: 0STEP0 stands before 0B0, which it needs"),
        ("0F0 0F2 0B0 0B2", "rank 0: 0F1 is missing"),
        ("0F0 0SEND_F0 0B0", "rank 0: 0SEND_F0 has nobody at the other end"),
        ("0F0 0B0 0STEP0 0F1 0B1 0F2 0STEP1 0B2", "rank 0: 0STEP2 is missing"),
        ("0F0 0B0 0F1 0B1 0STEP1 0F2 0B2 0STEP2 0F3 0B3 0STEP3", "0STEP2 does not end an update of 2"),
        ("0F0 0F1 0B0 0B1 0STEP0 0STEP1", "rank 0: 0B1 stands before 0STEP0, which would get its gradients"),
        ("0F0 0B0 0B1 0B2\n0F1 0F2", "rank 0: 0B1 belongs to rank 1"),
        ("0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1B0 1SEND_B0", "rank 1: 1RECV_F0 is missing"),
        ("0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "rank 0: 0SEND_F0 is missing"),
        ("0F0 0F1 0B1 0B0\n1F0 1B0 1F1 1B1", "deadlock: rank 0 waits in 0RECV_B1 for 1SEND_B1"),
    ],
)
def test_other_mistakes(table: str, message: str) -> None:
    assert message in refusal(table)


def test_a_stage_on_the_wrong_rank() -> None:
    actions = [Action(0, Op.F, 0), Action(0, Op.B, 0), Action(0, Op.STEP, 0), Action(1, Op.STEP, 0)]
    schedule = Schedule("mine", ((0,), (1,)), 1, 1, True, listed([actions, []]), lazy=False)
    with pytest.raises(ScheduleError, match="rank 0: 1STEP0 is of a stage that rank 0 does not hold"):
        check(schedule)
    actions[2] = Action(0, Op.F, 1)
    with pytest.raises(ScheduleError, match="rank 0: 0F1 is of a minibatch that does not exist: there are 1"):
        check(Schedule("mine", ((0,),), 1, 1, True, listed([actions[:3]]), lazy=False))


def test_the_drawing_stays_small() -> None:
    program = [action for action in build("1f1b", 1, 500).program(0) if action != Action(0, Op.B, 400)]
    with pytest.raises(ScheduleError, match="rank 0: 0I400 is missing") as caught:
        check(Schedule("mine", ((0,),), 500, 500, True, listed([program]), lazy=False))
    assert max(map(len, str(caught.value).splitlines())) < 400


def test_lazy_schedules_are_checked_by_their_beginning() -> None:
    check(build("pipedream", 4, 10**6))
    check(build("pipedream", 3, None, replicas=(3, 2, 1)))
    check(lower(build("2bw", 3, None, replicas=(3, 2, 1))))
    check(lower(build("1f1b", 3, 10**6, replicas=(3, 2, 1))))


def test_skip_connections() -> None:
    """What skips stages waits longer to be read: one message under way is not always enough."""
    edges = {(0, 1), (1, 2), (2, 3), (0, 2), (0, 3)}
    for name in ("gpipe", "1f1b", "zb-h1", "pipedream"):
        check(build(name, 4, 9, replicas=(2, 1, 3, 1)), edges, buffer=4)
    for name in ("zb-v", "interleaved"):
        check(build(name, 2, 9), edges, buffer=4)
    with pytest.raises(ScheduleError, match="waits in 0SEND_F6 for room in its channel"):
        check(build("1f1b", 4, 9, replicas=(2, 1, 3, 1)), edges, buffer=1)


def replicated(*programs: str, placement: tuple[tuple[int, ...], ...], reduced: set[int]) -> Schedule:
    """Lowered programs of two updates of two minibatches; an asynchronous table."""
    actions = [[Action.parse(word) for word in program.split()] for program in programs]
    return Schedule(
        "mine",
        placement,
        minibatches=4,
        update_interval=2,
        synchronous=False,
        order=listed(actions),
        lazy=False,
        lowered=True,
        edges=frozenset({(0, 1)}),
        reduced=frozenset(reduced),
    )


def test_replicas_that_reduce_two_stages_in_different_orders() -> None:
    """Each by itself could go on, but a collective matches by its order alone."""
    even = "0F0 1F0 1B0 0B0 {} 0STEP1 1STEP1 0F2 1F2 1B2 0B2 1REDUCE3 0REDUCE3 0STEP3 1STEP3"
    odd = "0F1 1F1 1B1 0B1 {} 0STEP1 1STEP1 0F3 1F3 1B3 0B3 1REDUCE3 0REDUCE3 0STEP3 1STEP3"
    one, other = "1REDUCE1 0REDUCE1", "0REDUCE1 1REDUCE1"
    both = ((0, 1), (0, 1))
    check(replicated(even.format(one), odd.format(one), placement=both, reduced={0, 1}))
    with pytest.raises(ScheduleError, match="rank 1: 0REDUCE1 stands where rank 0 has 1REDUCE1"):
        check(replicated(even.format(one), odd.format(other), placement=both, reduced={0, 1}))


def test_a_replica_that_comes_to_its_update_only_after_the_other_has_made_it() -> None:
    """Rank 1 waits for minibatch 3, which rank 2 runs behind minibatch 2, which rank 0 begins after the update."""
    even = "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE1 0STEP1 0F2 0SEND_F2 0RECV_B2 0B2 0REDUCE3 0STEP3"
    odd = "0F1 0SEND_F1 0RECV_B1 0B1 0REDUCE1 {} 0REDUCE3 0STEP3"
    last = " ".join(f"1RECV_F{m} 1F{m} 1B{m} 1SEND_B{m}" + (f" 1STEP{m}" if m % 2 else "") for m in range(4))
    placement = ((0, 1), (2,))
    first = odd.format("0STEP1 0F3 0SEND_F3 0RECV_B3 0B3")
    check(replicated(even, first, last, placement=placement, reduced={0}))
    late = odd.format("0F3 0SEND_F3 0RECV_B3 0STEP1 0B3")
    with pytest.raises(ScheduleError, match=r"deadlock: .*rank 0 waits in 0STEP1 for 0REDUCE1"):
        check(replicated(even, late, last, placement=placement, reduced={0}))
