"""Makespans of the schedules with several stages on each rank, against those of torch's orders.

`tests/torch_makespans.py` made the table.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.torch_makespans import HEADER, held, makespan
from vpipe.schedule import build

TABLE = Path(__file__).parents[1] / "torch_makespans.csv"


class Row(NamedTuple):
    schedule: str
    ranks: int
    chunks: int
    minibatches: int
    makespan: int
    held: int


def rows() -> Iterator[Row]:
    with TABLE.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            name, *numbers = (line[key] for key in HEADER.split(","))
            yield Row(name, *map(int, numbers))


def stated_memory(row: Row) -> int:
    """Chunks of minibatches on the rank that holds most."""
    if row.schedule == "zb-v":
        return 2 * min(row.ranks, row.minibatches)
    usual = 2 * (row.ranks - 1) + (row.chunks - 1) * row.ranks + 1
    return min(row.chunks * row.minibatches, usual)


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_two_chunks_take_no_longer_than_torch_at_no_more_than_the_stated_memory(name: str) -> None:
    found = [row for row in rows() if row.schedule == name and row.chunks == 2]
    assert len(found) > 150
    for row in found:
        schedule = build(name, row.ranks, row.minibatches)
        assert makespan(schedule) <= row.makespan, row
        assert held(schedule) <= stated_memory(row), row


@pytest.mark.long
def test_more_chunks_take_longer_only_where_torch_holds_more() -> None:
    longer = []
    for row in rows():
        if row.chunks > 2:
            schedule = build("interleaved", row.ranks, row.minibatches, chunks=row.chunks)
            assert held(schedule) <= stated_memory(row), row
            if (own := makespan(schedule)) > row.makespan:
                assert row.held > stated_memory(row), row
                assert row.ranks < row.minibatches < 2 * row.ranks, row
                longer.append(own / row.makespan)
    assert len(longer) == 16  # of 326
    assert max(longer) < 1.08


def test_every_number_of_minibatches_has_the_least_bubble() -> None:
    """Also where torch refuses: with two chunks a rank idles for P - 1 forwards and backwards of a chunk."""
    for ranks in range(1, 9):
        for minibatches in range(ranks, 33):
            schedule = build("interleaved", ranks, minibatches)
            assert makespan(schedule) == 3 * (2 * minibatches + ranks - 1), (ranks, minibatches)


def test_large_pipelines_have_a_short_last_round() -> None:
    """Their order is generated, not listed: nothing is computed for ranks that nobody asks for."""
    schedule = build("interleaved", 64, 100_001)
    assert schedule.lazy
    assert next(schedule.program(0)).minibatch == 0
