"""A user's own asynchronous schedule, from a table: what is derived from it is what it holds and takes."""

import json
import sys
from pathlib import Path

import pytest

from tests import models
from tests.own_schedule import OWN
from tests.unit.test_plan_optimal import made_of
from tests.unit.test_verify import check as verified
from vpipe.cli import main
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile, read_plan, write_profile
from vpipe.errors import ScheduleError
from vpipe.plan import plan
from vpipe.schedule import build, check, holdings, read_table, write_table
from vpipe.schedule.facts import fresh_gradients, makes_versions, splits_backward
from vpipe.schedule.steady import steady_bubble
from vpipe.simulate import simulate

BLOCK = BlockCost("b", 1.0, 1.0, 1.0, 0.5, 100, 4, 1000, deferred_bytes=30)
TABLE = read_table(OWN, "own.csv")


def test_its_facts_follow_from_its_programs() -> None:
    check(TABLE)
    assert not TABLE.synchronous
    assert (TABLE.minibatches, TABLE.update_interval, TABLE.lag) == (8, 2, 2)
    assert [(held.in_flight, held.versions, held.staleness) for held in holdings(TABLE)] == [
        (4, 2, 1),
        (2, 1, 0),
    ]
    assert splits_backward(TABLE)
    assert not fresh_gradients(TABLE)
    assert [makes_versions(TABLE, stage) for stage in (0, 1)] == [True, False]
    assert steady_bubble(TABLE) is None


def test_it_is_planned_as_it_runs() -> None:
    profile = made_of(*[BLOCK] * 6)
    found = plan(profile, 2, 10**6, TABLE)
    assert (found.schedule, found.replicas, sum(found.partition)) == ("own.csv", (1, 1), 6)
    loads = [position.stages[0].slice.load for position in found.positions]
    assert [(load.in_flight, load.versions, load.waiting, load.split) for load in loads] == [
        (4, 2, 0, False),
        (2, 1, 1, True),
    ]
    simulated = simulate(profile, found.to_plan(), TABLE)
    assert (simulated.in_flight, simulated.versions) == ((4, 2), (2, 1))
    assert found.seconds == pytest.approx(simulated.makespan / 8)  # it is filled and drained each time
    planned = [position.memory.total for position in found.positions]
    peaks = [rank.memory.total for rank in simulated.ranks]
    assert planned[0] == peaks[0]
    # Of a split backward the most in flight and the most between I and W are taken to come together.
    assert peaks[1] <= planned[1] <= peaks[1] + 3 * BLOCK.deferred


def test_memory_is_what_the_cap_allows() -> None:
    """Half of the activations of stage 0 do not fit: some of them are recomputed, and it is still no more."""
    profile = made_of(*[BLOCK] * 6)
    free = plan(profile, 2, 10**6, TABLE)
    cap = max(position.memory.total for position in free.positions) - 300
    tight = plan(profile, 2, cap, TABLE)
    assert "recompute" in tight.policies or "swap" in tight.policies
    assert max(rank.memory.total for rank in simulate(profile, tight.to_plan(), TABLE).ranks) <= cap


@pytest.mark.parametrize("name", ["1f1b", "vpipe", "2bw", "zb-h1", "gpipe"])
def test_a_named_schedule_as_a_table_is_planned_the_same(name: str) -> None:
    """Of the synchronous ones the time too; asynchronous tables are drained."""
    kind_table = read_table(write_table(build(name, 3, 12)), "named.csv")
    profile = made_of(*[BLOCK] * 6)
    table = plan(profile, 3, 10**6, kind_table)
    named = simulate(profile, table.to_plan(), build(name, 3, 12))
    assert [position.memory.total for position in table.positions] == [
        rank.memory.total for rank in named.ranks
    ]
    if named.synchronous:
        assert table.seconds == pytest.approx(named.step_time / 12)


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_several_stages_on_a_rank(name: str) -> None:
    table = read_table(write_table(build(name, 2, 4)), "chunks.csv")
    profile = made_of(*[BLOCK] * 8)
    found, named = plan(profile, 2, 10**6, table), plan(profile, 2, 10**6, name, 4, all_ranks=True)
    simulated = simulate(profile, found.to_plan(), table)
    assert [position.memory.total for position in found.positions] == [
        rank.memory.total for rank in simulated.ranks
    ]
    assert len(found.partition) == 4
    assert max(named.replicas) == 2 or found.seconds == pytest.approx(named.seconds)


def test_ranks_in_another_order() -> None:
    """Stage 0 on rank 1: its place is read from the table, not taken from its number."""
    turned = read_table("\n".join(reversed(OWN.splitlines())), "turned.csv")
    profile = made_of(*[BLOCK] * 6)
    found = plan(profile, 2, 10**6, turned)
    simulated = simulate(profile, found.to_plan(), turned)
    assert simulated.in_flight == (4, 2)
    memory = {position.ranks[0]: position.memory.total for position in found.positions}
    assert memory == {rank.rank: rank.memory.total for rank in simulated.ranks}


@pytest.mark.parametrize("tied", [False, True])
def test_it_trains_as_the_plain_model(tied: bool) -> None:
    example = models.bert(2, dropout=0.1) if tied else models.sequential(3, dropout=0.1)
    result = verified(example, 2, schedule=TABLE)
    assert result.ok, result
    assert result.updates >= 8, "it must have been run again"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 10**6, TABLE), "ranks is 3, but the table 'own.csv' is written for 2"),
        ((2, 10**6, TABLE, 6), "minibatches is 6, but the table 'own.csv' is written for 8"),
        (
            (2, 10**6, read_table("0F0,1F0,1F1,1B0,1B1,0B0\n0F1,0B1", "mixed.csv")),
            "share some ranks but not all: it cannot be planned; give the partition yourself",
        ),
    ],
)
def test_tables_that_cannot_be_planned(arguments: tuple, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        plan(made_of(*[BLOCK] * 6), *arguments)


def test_the_commands_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.csv").write_text(OWN)
    profile = Profile((BLOCK,) * 6, DeviceCost(10**6, 1e9, 1e9), LinkCost(1e9, 0.0), 1)
    write_profile(profile, Path("profile.json"))

    def vpipe(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["vpipe", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0)

    assert vpipe("plan", "--profile", "profile.json", "--ranks", 2, "--schedule", "own.csv", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    written = read_plan(Path("plan.json"))
    assert written.schedule == planned["schedule"] == str(tmp_path / "own.csv")
    # The plan names its table by a path that holds anywhere; another one can be given.
    for more in ((), ("--schedule", "own.csv")):
        assert vpipe("simulate", "--profile", "profile.json", "--plan", "plan.json", *more, "--json") == 0
        assert json.loads(capsys.readouterr().out)["versions"] == [2, 1]
    with pytest.raises(ScheduleError, match=r"own.csv' is a table, which a plan only names"):
        simulate(profile, Plan((3, 3), ("keep",) * 6, "own.csv"))
