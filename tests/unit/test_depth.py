"""Depths that users choose: programs, facts, simulation and training follow from one list."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import example
from tests.unit.test_verify import check as verified
from vpipe.cli import main
from vpipe.config.file import read_config
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile, read_plan, write_plan
from vpipe.errors import ConfigError, ScheduleError
from vpipe.pipeline import Pipeline
from vpipe.pipeline.threads import run_ranks
from vpipe.schedule import Deadlock, build, check, holdings, lower, walk
from vpipe.schedule.kind import too_shallow
from vpipe.schedule.reductions import with_late_reductions
from vpipe.schedule.staircase import depths, staircase
from vpipe.simulate import simulate

STAIRCASES = ("1f1b", "zb-h1", "pipedream", "vpipe", "2bw")


def program(schedule: Any, rank: int, count: int) -> str:
    return " ".join(str(action)[1:] for action in itertools.islice(schedule.program(rank), count))


def test_two_minibatches_a_stage() -> None:
    schedule = build("1f1b", 3, 8, depth=[4, 2, 0])
    assert program(schedule, 0, 8) == "F0 F1 F2 F3 F4 B0 F5 B1"
    assert program(schedule, 1, 7) == "F0 F1 F2 B0 F3 B1 F4"
    assert program(schedule, 2, 4) == "F0 B0 F1 B1"


def test_zb_2p_has_no_bubble() -> None:
    """Its published memory: 2 p - 1 minibatches on each stage, where ZB-H1 holds p."""
    schedule = build("zb-h1", 4, 12, depth=[6, 4, 2, 0])
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    for event in walk(schedule):
        begin.setdefault(event.rank, event.start)
        end[event.rank] = event.end
    assert [end[rank] - begin[rank] for rank in range(4)] == [3 * 12] * 4
    assert [held.in_flight for held in holdings(schedule)] == [7, 7, 7, 7]


@pytest.mark.parametrize(
    ("name", "depth", "expected"),
    [
        ("1f1b", [6, 4, 2, 0], [(7, 1, 0), (5, 1, 0), (3, 1, 0), (1, 1, 0)]),
        ("pipedream", [6, 4, 2, 0], [(7, 7, 6), (5, 5, 4), (3, 3, 2), (1, 1, 0)]),
        ("pipedream", [10, 2, 1, 0], [(11, 11, 10), (3, 3, 2), (2, 2, 1), (1, 1, 0)]),
        ("vpipe", [3, 3, 0, 0], [(4, 4, 3), (4, 4, 3), (1, 1, 0), (1, 1, 0)]),
        ("2bw", [6, 4, 2, 0], [(7, 2, 1), (5, 2, 1), (3, 2, 1), (1, 1, 0)]),
    ],
)
def test_facts(name: str, depth: list[int], expected: list[tuple[int, int, int]]) -> None:
    schedule = build(name, 4, 40, depth=depth)
    check(schedule)
    assert [tuple(held) for held in holdings(schedule)] == expected
    # An endless one is known by its beginning.
    endless = build(name, 4, 40 if schedule.synchronous else None, depth=depth)
    sample = replace(endless, minibatches=endless.representative)
    assert [tuple(held) for held in holdings(sample)] == expected
    assert endless.lag == schedule.lag


def test_the_interval_of_2bw_follows_the_depth() -> None:
    assert build("2bw", 4, None, depth=[6, 4, 2, 0]).update_interval == 6
    assert build("2bw", 4, None, depth=[1, 1, 1, 0]).update_interval == 4
    with pytest.raises(ScheduleError, match="with this depth schedule '2bw' needs at least 6"):
        build("2bw", 4, None, depth=[6, 4, 2, 0], update_interval=5)


@pytest.mark.parametrize("name", STAIRCASES)
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1, 3)])
def test_the_usual_depths_change_nothing(name: str, replicas: tuple[int, ...]) -> None:
    plain, same = (build(name, 3, 9, replicas=replicas, depth=d) for d in (None, depths(replicas)))
    assert same.depth is None
    for rank in range(plain.num_ranks):
        assert list(plain.program(rank)) == list(same.program(rank))


@pytest.mark.parametrize("stages", [2, 3])
def test_what_is_refused_is_what_would_wait_for_ever(stages: int) -> None:
    """The rule in a line, against the walk of every small pipeline."""
    refused = 0
    for replicas in itertools.product((1, 2, 3), repeat=stages):
        usual = build("1f1b", stages, 14, replicas=replicas)
        for depth in itertools.product(range(4 if stages == 2 else 3), repeat=stages):
            order = partial(staircase, usual.placement, depth, None, 14)
            assert (too_shallow(replicas, depth) is None) == runs(replace(usual, order=order))
            refused += too_shallow(replicas, depth) is not None
    assert refused > 10


@pytest.mark.parametrize("interval", [None, pytest.param(5, marks=pytest.mark.long)])
def test_what_is_refused_of_replicas_is_what_would_wait_for_ever_at_an_update(interval: int | None) -> None:
    """Ranks of a stage update together, with minibatches in flight: each REDUCE stands where it ends."""
    refused = 0
    for replicas in ((2, 1), (3, 1), (1, 2), (2, 2), (3, 2), (2, 3), (2, 1, 1), (2, 1, 2)):
        usual = build("pipedream", len(replicas), None, replicas=replicas, update_interval=interval)
        for depth in itertools.product(range(4 if len(replicas) == 2 else 3), repeat=len(replicas)):
            order = partial(staircase, usual.placement, depth, None, usual.update_interval)
            made = lower(replace(usual, order=order, minibatches=30, depth=depth))
            late = replace(made, order=partial(with_late_reductions, made.order))
            assert (too_shallow(replicas, depth, joint=True) is None) == runs(late)
            refused += too_shallow(replicas, depth) is None and not runs(late)
    assert refused > 5
    message = (
        "forwards that the 2 replicas of stage 0 only run after their joint update: give stage 0 at least 1"
    )
    with pytest.raises(ScheduleError, match=message):
        build("pipedream", 2, None, replicas=(2, 1), depth=[0, 1])
    assert build("1f1b", 2, 4, replicas=(2, 1), depth=[0, 1]).depth == (0, 1)


def runs(schedule: Any) -> bool:
    try:
        return len(list(walk(schedule))) > 0
    except Deadlock:
        return False


@pytest.mark.parametrize(
    ("name", "depth", "message"),
    [
        ("gpipe", [1, 0], "depth is 1, 0, but schedule 'gpipe' has a warm-up of its own: leave depth out"),
        ("zb-v", [1, 0], "but schedule 'zb-v' has a warm-up of its own"),
        ("1f1b", [1], "depth 1 names 1 stages, but there are 2: give one number for each"),
        ("1f1b", [0, 1], "depth of stage 0 is 0, but stage 1 has 1, .*: give stage 0 at least 1"),
        ("1f1b", [-1, 0], "depth of stage 0 is -1: it must be a whole number, 0 or more"),
        ("1f1b", [True, 0], "depth of stage 0 is True"),
        ("pipedream", [10**9, 0], "depth of stage 0 is 1000000000: schedules are built for 4,096 at most"),
    ],
)
def test_mistakes(name: str, depth: list[Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(name, 2, 4, depth=depth)


BLOCKS = tuple(BlockCost("b", 1.0, 1.0, 1.0, 0.0, 10, 2, 8) for _ in range(4))
SLOW = Profile(BLOCKS, DeviceCost(1 << 40, 1e9, 1e9), LinkCost(1.0, 0.0), 1)


@pytest.mark.parametrize("name", STAIRCASES)
@pytest.mark.parametrize("depth", [(6, 4, 2, 0), (4, 3, 3, 1)])
def test_a_simulation_holds_what_the_programs_say(name: str, depth: tuple[int, ...]) -> None:
    result = simulate(SLOW, Plan((1,) * 4, ("keep",) * 4, name, depth=depth))
    held = holdings(build(name, 4, result.minibatches, depth=depth))
    assert list(result.in_flight) == [stage.in_flight for stage in held]
    assert list(result.versions) == [stage.versions for stage in held]
    assert result.steady or result.synchronous


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_more_minibatches_in_flight_hide_a_slow_link(ahead: int) -> None:
    """A forward, its message of 58 s and back: 176 s for each minibatch, shared by all that are in flight."""
    blocks = [BlockCost("b", 10.0, 10.0, 10.0, 0.0, 0, cut, 0) for cut in (0, 58, 0, 0)]
    profile = Profile(tuple(blocks), DeviceCost(1 << 40, 1e9, 1e9), LinkCost(1.0, 0.0), 1)
    plan = Plan((2, 2), ("keep",) * 4, "pipedream", depth=(ahead, 0))
    seconds = 1 / simulate(profile, plan, None, 200).samples_per_second
    round_trip = 20 + 58 + 20 + 40 + 58 + 40
    assert seconds == pytest.approx(max(60, round_trip / (ahead + 1)), rel=0.02)


@pytest.fixture
def _one_capture(capture_once: None) -> Iterator[None]:
    return


@pytest.mark.usefixtures("_one_capture")
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {"schedule": "1f1b", "depth": [4, 2, 0], "minibatches": 6}),
        (3, {"schedule": "zb-h1", "depth": [4, 2, 0], "minibatches": 6}),
        (2, {"schedule": "pipedream", "depth": [3, 0], "clip_norm": 0.1}),
        (3, {"schedule": "vpipe", "depth": [2, 3], "replicas": [2, 1]}),
        (2, {"schedule": "2bw", "depth": [4, 2]}),
    ],
    ids=lambda value: value.get("schedule") if isinstance(value, dict) else "",
)
def test_training_equals_the_plain_model(ranks: int, options: dict[str, Any]) -> None:
    result = verified(example("sequential", dropout=0.1), ranks, **options)
    assert result.ok, result


@pytest.mark.usefixtures("_one_capture")
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_ranks_hold_the_versions_and_bytes_that_are_predicted(schedule: str) -> None:
    model, batch, loss_fn = example("sequential", dropout=0.1)
    depth = [6, 4, 2, 0]

    def train(world: Any) -> tuple[int, int, int]:
        def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, 1e-2)

        options: dict[str, Any] = {"loss_fn": loss_fn, "schedule": schedule, "depth": depth}
        with Pipeline(model, batch, optimizer=sgd, world=world, **options) as pipe:
            (stage,) = pipe.runtime.stages.values()
            held, versions, forward = pipe.runtime.count_held(), 0, stage.forward

            def watch(*args: Any) -> Any:
                nonlocal versions
                outputs = forward(*args)
                versions = max(versions, stage.optimizer.num_versions)
                return outputs

            stage.forward = watch  # type: ignore[method-assign]
            one = 0
            for _ in pipe.train([batch]):
                one = held.peak  # of a single minibatch
            for _ in pipe.train([batch] * 24):
                pass
            return held.peak, one, versions

    found = run_ranks(4, train)
    known = holdings(build(schedule, 4, 24, depth=depth))
    assert [peak / one for peak, one, _ in found] == [stage.in_flight for stage in known]
    assert [versions for _, _, versions in found] == [stage.versions for stage in known]


def test_a_plan_file_has_the_depth(tmp_path: Path) -> None:
    plan, path = Plan((1, 1), ("keep",) * 2, "pipedream", depth=(5, 0)), tmp_path / "plan.json"
    write_plan(plan, path)
    assert read_plan(path).depth == (5, 0)
    run = tmp_path / "run.yml"
    run.write_text("partition: plan.json\n")
    assert read_config(run).depth == [5, 0]
    assert read_config(run, {"schedule": "1f1b"}).depth is None, "it was planned for another schedule"
    assert read_config(run, schedule="zb-v").depth is None


@pytest.mark.parametrize("value", ["[-1, 0]", "[1.5, 0]", "[]", "many", "[5000, 0]"])
def test_the_key(tmp_path: Path, value: str) -> None:
    run = tmp_path / "run.yml"
    run.write_text(f"stages: 2\ndepth: {value}\n")
    with pytest.raises(ConfigError, match=r"run.yml: depth"):
        read_config(run)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["vpipe", "schedule", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0)

    shape = ("--stages", "4", "--minibatches", "20")
    assert run("pipedream", *shape, "--depth", "6,4,2,0", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["depth"], facts["versions"]) == ([6, 4, 2, 0], [7, 5, 3, 1])
    assert run("pipedream", *shape, "--depth", "6,x") == 2
    assert "--depth '6,x' is not a list of numbers: write 2,0" in capsys.readouterr().err
