"""The drawings."""

from xml.etree import ElementTree

import pytest

from tests.schedules import NAMES
from vpipe.schedule import Op, bubble, build, draw, draw_svg, lower
from vpipe.schedule.draw import Rows
from vpipe.schedule.walk import walk


def test_long_schedules_are_drawn_in_strips() -> None:
    assert draw(build("1f1b", 2, 3), width=33).splitlines() == [
        "time    0              5",
        "rank 0  F0 F1 ·  ·  B0─── F2",
        "rank 1  ·  F0 B0─── F1 B1───",
        "",
        "time             10",
        "rank 0  B1─── ·  B2───*",
        "rank 1  F2 B2───*·  ·",
        "",
        "F forward  B backward  I input gradient  W weight gradient  * update  · idle",
    ]


def test_replicas_wait_for_each_other_at_their_updates() -> None:
    """Rank 1 has its part of the first update at time 6 and waits for that of rank 0, which has two minibatches."""
    schedule = build("vpipe", 2, 6, replicas=(2, 3))
    assert draw(schedule).splitlines()[:6] == [
        "time    0              5              10",
        "rank 0  F0 F2 F4 ·  B0─── B2───*B4─── ·  · *",
        "rank 1  F1 F3 F5 ·  B1─── ·  · *B3─── B5───*",
        "rank 2  ·  F0 B0─── · *F3 B3───*·  ·  ·  ·",
        "rank 3  ·  F1 B1─── · *F4 B4───*·  ·  ·  ·",
        "rank 4  ·  ·  F2 B2───*F5 B5───*·  ·  ·  ·",
    ]
    for name, replicas in (("vpipe", (2, 3)), ("2bw", (3, 2)), ("1f1b", (1, 3, 2))):
        schedule = build(name, len(replicas), 12, replicas=replicas)
        assert bubble(schedule) == bubble(lower(schedule))
        assert f"{bubble(schedule):.1%}" in draw_svg(schedule)


def test_a_strip_ends_between_actions_or_at_a_round_time() -> None:
    lines = draw(build("gpipe", 4, 12), width=80).splitlines()
    assert not any(line.startswith("rank") and line[8] == "─" for line in lines)
    schedule = build("1f1b", 4, 32)
    rows = Rows(schedule, walk(schedule))
    assert [cut for cut in rows.cuts(18)[:-1] if cut % 5] == [
        cut for cut in rows.cuts(18)[:-1] if all(units.get(cut) != "" for units in rows.units) and cut % 5
    ]


def test_strips_keep_to_the_width() -> None:
    for name in NAMES:
        lines = draw(build(name, 8, 16), width=100).splitlines()
        assert max(map(len, lines)) <= 100
        assert sum(line.startswith("rank 7") for line in lines) == sum(
            line.startswith("time") for line in lines
        )


def test_an_endless_schedule_is_drawn_to_a_limit() -> None:
    assert len(draw(build("pipedream", 2, None), width=10**6, columns=20).splitlines()[1]) < 100


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_has_a_box_for_every_action(name: str) -> None:
    schedule = build(name, 3, 4)
    picture = ElementTree.fromstring(draw_svg(schedule))
    titles = [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    computed = [
        str(action)
        for rank in range(3)
        for action in schedule.program(rank)
        if action.op in (Op.F, Op.B, Op.I, Op.W)
    ]
    assert sorted(title.split(",")[0] for title in titles) == sorted(computed)
    assert "prefers-color-scheme: dark" in draw_svg(schedule)
