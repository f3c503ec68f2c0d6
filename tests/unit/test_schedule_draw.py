"""The drawings."""

from xml.etree import ElementTree

import pytest

from tests.schedules import NAMES
from vpipe.schedule import Op, build, draw, draw_svg
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
