"""`vpipe converge`: its cases, its figures, and losses that are those of real ranks."""

import json
import threading
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import TIMEOUT
from vpipe.cli import convergence
from vpipe.cli.loss_cases import make_cases, remedy_choices, schedule_choices
from vpipe.cli.loss_rows import Row, predicted_seconds, slowdowns, table
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Profile, write_profile
from vpipe.errors import VPipeError
from vpipe.observe.loss_curves import smoothed
from vpipe.train.convergence import LossCurve, train_curve
from vpipe.train.loss_processes import LossProcesses

CONFIG = """
hidden_size: 16
num_layers: 2
num_heads: 2
vocab_size: 64
sequence_length: 16
batch_size: 2
synthetic_data: true
machines: ['localhost:0', 'localhost:1']
minibatches: 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yml"
    path.write_text(CONFIG)
    return path


def axes(schedules: str, staleness: str | None = None) -> list[Any]:
    return [schedule_choices(schedules), [("", {})], remedy_choices(staleness)]


def test_cases_have_equal_samples_and_synchronous_ones_noremedy_choices(file: Path) -> None:
    cases = make_cases(file, {}, axes("1f1b,vpipe,2bw:8", "none,predict+async_after:5"), 4, 10)
    found = [(case.label, case.interval, case.config.max_updates, case.config.staleness) for case in cases]
    both = ["predict", {"async_after": 5}]
    assert found == [
        ("1f1b", 4, 20, []),
        ("vpipe none", 1, 80, []),
        ("vpipe predict+async_after:5", 1, 80, both),
        ("2bw:8 none", 8, 10, []),
        ("2bw:8 predict+async_after:5", 8, 10, both),
    ]
    assert {case.config.ranks for case in cases} == {4}
    assert [case.config.ranks for case in make_cases(file, {}, axes("vpipe"), None, 10)] == [2]


@pytest.mark.parametrize(("asked", "made", "epochs"), [(None, 4, 1), (3, 3, 0.75), (9, 9, 2.25)])
def test_updates_that_were_asked_for_take_as_many_epochs_as_they_need(
    file: Path, asked: int | None, made: int, epochs: float
) -> None:
    few = {"max_samples": 10, "validation_share": 0.2}  # 4 minibatches
    (case,) = make_cases(file, few, axes("vpipe"), None, asked)
    curve = train_curve(case.config, "cpu")
    assert (len(curve.losses), curve.epochs) == (made, epochs)


@pytest.mark.parametrize(
    ("schedules", "staleness", "message"),
    [
        ("1f1", None, "unknown schedule '1f1'"),
        ("1f1b:x", None, "--schedules '1f1b:x': write a number"),
        ("vpipe", "predicted", "unknown remedy 'predicted'"),
        ("vpipe", "async_after:many", "staleness, entry 0: async_after is 'many'"),
    ],
)
def test_mistakes(file: Path, schedules: str, staleness: str | None, message: str) -> None:
    with pytest.raises(VPipeError, match=message):
        make_cases(file, {}, axes(schedules, staleness), None, 10)


def test_the_predicted_time_of_an_update(file: Path) -> None:
    """Of an endless schedule too: four equal stages take 3 s a minibatch each."""
    block = BlockCost("b", 1.0, 1.0, 1.0, 0.0, 1, 1, 1)
    profile = Profile((block,) * 4, DeviceCost(10**6, 1e9, 1e9), LinkCost(1e12, 0.0), 2)
    cases = make_cases(file, {"partition": None}, axes("1f1b:1,vpipe,2bw:8"), 4, 10)
    curve = LossCurve((1.0,), 2, 0.1, 1.0, (1, 1, 1, 1), (0,) * 4, 0.0)
    seconds = [predicted_seconds(profile, case.config, curve) for case in cases]
    assert seconds == pytest.approx([12.0, 3.0, 24.0], rel=0.05)


def test_figures_of_a_curve() -> None:
    curve = LossCurve(tuple(float(20 - n) for n in range(20)), 4, 0.5, 1.0, (3, 2), (1, 0), 0.5)
    assert curve.final == 1.5  # of the last two
    assert smoothed(curve.losses)[:3] == [20.0, 19.5, 18.5]
    assert curve.samples_to(18.5) == 12
    assert curve.samples_to(1.0) is None
    sooner = LossCurve(tuple(float(20 - 2 * n) for n in range(20)), 4, 0.5, 1.0, (3, 2), (0, 0), 0.0)
    assert curve.slowdown(sooner) == 20 / 11  # to 1.5
    assert sooner.slowdown(curve) == 11 / 20
    row = {
        "label": "vpipe", "updates": 20, "samples": 80, "epochs": 0.5, "staleness": [1, 0], "loss": 1.5, "spread": None,
        "evaluation_loss": 1.0, "diverged": [], "samples_to_goal": 40.0, "seconds_per_update": None,
        "seconds_to_goal": None,
    }  # fmt: skip
    assert [cell for column in table([row], 1).columns for cell in column.cells][-1] == "0.50x"


def test_a_run_that_diverges_is_a_row_like_others(file: Path) -> None:
    keys = {"optimizer": "sgd", "max_samples": 40, "print_frequency": 1}
    rates = [("good", {"learning_rate": 1e-3}), ("wild", {"learning_rate": 1e30})]
    cases = make_cases(file, keys, [*axes("1f1b:2,vpipe")[:1], rates, axes("vpipe")[-1]], None, 4)
    seen: list[tuple[int, int]] = []
    rows = [
        Row(case, [train_curve(case.config, "cpu", lambda n, of, _: seen.append((n, of)))], None)
        for case in cases
    ]
    good, wild, stale, wild_stale = (row.curves[0] for row in rows)
    assert not good.diverged
    assert wild.diverged.startswith("update 1, ")
    assert len(wild.losses) == len(good.losses) == 4
    assert wild.losses[0] == good.losses[0]
    assert wild.losses[1:] == (inf, inf, inf)
    assert seen == [*((n, 4) for n in (1, 2, 3, 4)), (1, 4), *((n, 8) for n in range(1, 9)), (1, 8)]
    assert wild_stale.slowdown(wild) is wild_stale.slowdown(good) is None
    assert [slow.source for slow in slowdowns(rows)] == ["vpipe good, compared with 1f1b:2 good"]
    figures = [row.figures(rows[1].finals) for row in rows]  # nobody reaches what has diverged
    assert {row["samples_to_goal"] for row in figures} == {None}
    assert [len(row["diverged"]) for row in figures] == [0, 1, 0, 1]
    cells = [list(column.cells) for column in table(figures, 1).columns]
    assert cells[3][1] == cells[5][1] == "diverged"
    assert [str(cell).endswith(" *") for cell in cells[3]].count(True) == 1
    assert stale.final < inf


def test_rows_that_are_trained_are_shown_if_the_user_stops_the_rest(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> Iterator[list[LossCurve]]:
        yield [LossCurve((2.0, 1.0), 4, 0.5, 1.0, (3, 2), (0, 0), 0.0)]
        raise KeyboardInterrupt

    monkeypatch.setattr(convergence, "train_all", stopped)
    output, costs = file.with_name("converge.json"), file.with_name("profile.json")
    block = BlockCost("b", 1.0, 1.0, 1.0, 0.0, 1, 1, 1)
    device = DeviceCost(10**6, 1e9, 1e9)
    write_profile(Profile((block,) * 5, device, LinkCost(1e12), 2, optimizer="adamw"), costs)
    with pytest.raises(KeyboardInterrupt):
        convergence.converge(
            file, (), schedules="1f1b,vpipe", stages=None, optimizers="adamw,sgd", staleness=None, rates=None,
            updates=2, seeds=1, jobs=1, device="cpu", profile=costs, picture=file.with_name("a.png"), output=output,
            as_json=True,
        )  # fmt: skip
    shown = capsys.readouterr()
    assert "has the updates of adamw: times of rows with sgd are predicted as if" in shown.err
    assert "stopped by you when 1 of 4 rows were trained" in shown.err
    (row,) = json.loads(shown.out)
    assert row["losses"] == json.loads(output.read_text())["rows"][0]["losses"] == [[2.0, 1.0]]


def test_no_process_is_left_of_runs_that_are_not_waited_for(file: Path) -> None:
    (case,) = make_cases(file, {"max_samples": 100_000}, axes("vpipe"), None, 20_000)
    begun = threading.Event()
    with LossProcesses(1, "cpu") as processes:
        running = processes.begin(case.config, lambda *_: begun.set())
        waiting = processes.begin(case.config, lambda *_: None)
        assert begun.wait(TIMEOUT)
        assert len(processes._running) == 1
    assert waiting.cancelled()
    assert isinstance(running.exception(TIMEOUT), VPipeError)
    assert not processes._running
