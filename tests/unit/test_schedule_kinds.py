"""The facts stated of the named schedules, against their programs; and a new one that states nothing."""

import ast
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import vpipe
from tests import models
from tests.drawing import draws
from tests.schedules import ASYNCHRONOUS
from tests.unit.test_plan_optimal import made_of
from tests.unit.test_verify import check as verified
from vpipe.cost import BlockCost, Plan
from vpipe.errors import ScheduleError
from vpipe.plan import plan
from vpipe.plan.planner import kinds_of
from vpipe.schedule import KINDS, Action, Op, PipelineShape, Schedule, ScheduleKind, build, check, holdings
from vpipe.schedule.facts import splits_backward
from vpipe.schedule.program import Exists
from vpipe.simulate import simulate

RULES = [name for name, kind in KINDS.items() if kind.holding is not None]
COUNTS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def held_by_rule(kind: ScheduleKind, schedule: Schedule, total: int) -> list[tuple[int, int]]:
    """In flight and versions of each stage, by its place alone."""
    assert kind.holding is not None
    found, behind = [], schedule.num_ranks
    for ranks in schedule.placement:
        own = -(-total // len(ranks))
        place = kind.holding(schedule.num_ranks, behind, len(ranks), own, schedule.update_interval)
        found.append((place.in_flight, place.versions))
        behind -= len(ranks)
    return found


@draws(150)
@given(st.sampled_from(RULES), st.integers(1, 6), st.integers(1, 4), st.integers(1, 60), st.data())
def test_rules_of_holding_are_what_programs_hold(
    name: str, positions: int, replicas: int, total: int, data: st.DataObject
) -> None:
    kind = KINDS[name]
    interval = None if kind.synchronous else data.draw(st.none() | st.integers(positions * replicas, 30))
    if not kind.synchronous:  # so many that all is filled
        total = max(total, 4 * positions * replicas + 2 * (interval or positions * replicas))
    schedule = build(name, positions, total, replicas=[replicas] * positions, update_interval=interval)
    programs = [(found.in_flight, found.versions) for found in holdings(schedule)]
    rule = held_by_rule(kind, schedule, total)
    if kind.synchronous or schedule.update_interval % replicas == 0:
        assert programs == rule
    assert all(p[0] <= r[0] and p[1] <= r[1] for p, r in zip(programs, rule, strict=True))


@draws(150)
@given(st.sampled_from(RULES), COUNTS, st.integers(1, 60), st.none() | st.integers(1, 30))
def test_rules_of_holding_are_bounds_for_uneven_replicas(
    name: str, replicas: list[int], total: int, interval: int | None
) -> None:
    kind = KINDS[name]
    try:
        wanted = None if kind.synchronous else interval
        schedule = build(name, len(replicas), total, replicas=replicas, update_interval=wanted)
    except ScheduleError:
        return  # too short for two versions
    rule = held_by_rule(kind, schedule, total)
    for found, (in_flight, versions) in zip(holdings(schedule), rule, strict=True):
        assert found.in_flight <= in_flight
        assert found.versions <= versions


@draws(100)
@given(st.sampled_from(ASYNCHRONOUS), COUNTS, st.none() | st.integers(1, 30))
@example("vpipe", [1, 3, 1], 5)  # the second stage has more under way than the first
def test_everything_is_known_after_the_lag(name: str, replicas: list[int], interval: int | None) -> None:
    """No stage has more under way than lies between an update and the one that is `lag` later."""
    try:
        schedule = build(name, len(replicas), None, replicas=replicas, update_interval=interval)
    except ScheduleError:
        return
    ranks, found = sum(replicas), []
    for stage, count in enumerate(replicas):
        behind = sum(replicas[stage:])
        under_way = -(-behind // count) * count
        found.append(-(-under_way // schedule.update_interval))
    assert schedule.lag == max(found)
    rule = KINDS[name].holding
    assert rule is not None
    assert (
        schedule.lag <= rule(ranks, 1, 1, 1, interval or KINDS[name].interval((1,) * ranks, None, None)).lag
    )


def test_what_a_kind_says_is_what_it_builds() -> None:
    for name, kind in KINDS.items():
        for positions, minibatches in product((1, 2, 3), (1, 4, 7)):
            schedule = build(name, positions, minibatches)
            assert schedule.name == name
            assert schedule.synchronous == kind.synchronous
            assert schedule.num_stages == kind.chunks * positions
            assert splits_backward(schedule) == kind.splits_backward
            assert (
                any(
                    action.op is Op.I
                    for rank in range(schedule.num_ranks)
                    for action in schedule.program(rank)
                )
                == kind.splits_backward
            )


def test_auto_tries_every_kind_once() -> None:
    """`pipedream` is `vpipe` by another name."""
    tried = [kind.name for kind in kinds_of("auto")]
    assert tried == [name for name in KINDS if name != "pipedream"]


def test_nobody_else_decides_by_a_name() -> None:
    """Outside vpipe/schedule/ a schedule's name is a default, or shown; nobody compares or chooses by it."""
    root = Path(vpipe.__file__).parent
    for path in root.rglob("*.py"):
        if path.parent.name == "schedule":
            continue
        # The launcher names the package of that name on other hosts.
        package = {"vpipe"} if path.parent.name == "launch" else set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare | ast.MatchValue):
                decided: list[ast.AST] = list(ast.walk(node))
            elif isinstance(node, ast.IfExp):
                decided = [node.body, node.orelse]
            elif isinstance(node, ast.Return) and node.value is not None:
                decided = [node.value]
            else:
                continue
            texts = {part.value for part in decided if isinstance(part, ast.Constant)}
            assert (texts - package).isdisjoint(KINDS), f"{path}, line {node.lineno}"


def pairs(shape: PipelineShape, rank: int, exists: Exists) -> Iterator[Action]:
    """Two minibatches forward, then both backward and an update: stages hold two more the further ahead they are."""
    behind = len(shape.replicas) - 1 - rank
    ahead = [2 * number for number in range(behind)]
    for first in ahead:
        yield from (Action(rank, Op.F, m) for m in (first, first + 1) if exists(m))
    first = 0
    while exists(first):
        following = first + 2 * behind
        yield from (Action(rank, Op.F, m) for m in (following, following + 1) if exists(m))
        group = [m for m in (first, first + 1) if exists(m)]
        yield from (Action(rank, Op.B, m) for m in group)
        yield Action(rank, Op.STEP, group[-1])
        first += 2


def two_at_a_time(replicas: Any, depth: Any, wanted: int | None) -> int:
    return 2


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ScheduleKind:
    """A schedule as CONTRIBUTING.md tells how to add one: an order, and a line in the registry."""
    kind = ScheduleKind(
        "pairs",
        synchronous=False,
        make=lambda shape: shape.schedule(partial(pairs, shape)),
        interval=two_at_a_time,
    )
    monkeypatch.setitem(KINDS, "pairs", kind)
    return kind


def test_a_new_schedule_is_planned_and_simulated_by_its_programs(toy: ScheduleKind) -> None:
    schedule = build("pairs", 3, 12)
    check(schedule)
    held = [6, 4, 2]
    assert [stage.in_flight for stage in holdings(schedule)] == held
    assert [stage.versions for stage in holdings(schedule)] == [3, 2, 1]
    block = BlockCost("b", 1.0, 1.0, 1.0, 0.0, 100, 4, 1000)
    profile = made_of(*[block] * 6)
    found = plan(profile, 3, 10**6, "pairs")
    assert (found.schedule, found.replicas) == ("pairs", (1, 1, 1))
    loads = [position.stages[0].slice.load for position in found.positions]
    assert [(load.in_flight, load.versions, load.lag) for load in loads] == [(6, 3, 3), (4, 2, 3), (2, 1, 3)]
    simulated = simulate(profile, found.to_plan(), None, 40)
    assert simulated.versions == (3, 2, 1)
    assert [position.memory.total for position in found.positions] == [
        rank.memory.total for rank in simulated.ranks
    ]
    assert "pairs" in [kind.name for kind in kinds_of("auto")]
    assert simulate(profile, Plan((2, 2, 2), ("keep",) * 6), "pairs", 40).update_interval == 2
    with pytest.raises(ScheduleError, match="schedule 'pairs' has one rank on each position, not 2, 1"):
        build("pairs", 2, 4, replicas=(2, 1))


def test_a_new_schedule_trains_as_the_plain_model(toy: ScheduleKind) -> None:
    result = verified(models.sequential(3, dropout=0.1), 2, schedule="pairs")
    assert result.ok, result
    assert result.schedule == "pairs"
