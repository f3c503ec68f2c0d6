"""The comparison of runs: variants, table, picture."""

import io
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_report import Samples
from vpipe.cli.compare import (
    Result,
    Variant,
    caption,
    compare_runs,
    comparison_table,
    plot,
    speed_quartiles,
    split_values,
    variants,
)
from vpipe.cli.loss_plot import text_plot
from vpipe.config import RunConfig
from vpipe.errors import ConfigError, VPipeError
from vpipe.record.events import Events
from vpipe.schedule import Action, Op
from vpipe.system.console import PlainConsole

A, B = Path("configs/a.yml"), Path("configs/b.yml")


def result(label: str, speed: float, **more: Any) -> Result:
    known = {
        "label": label,
        "loss": 2.5,
        "samples_per_s": speed,
        "seconds_per_update": 16 / speed if speed else 0.0,
        "communication_share": 0.125,
        "bubble_share": 0.25,
        "of_limit": 0.9,
        "peak_memory": [2**30, 2**29],
        "updates": 3,
        "losses": [[0, 4.0], [1, 3.0], [2, 2.5]],
    }
    return {**known, **more}


def rows(*results: Result) -> list[list[str]]:
    console = PlainConsole(width=200, file=io.StringIO(), record=True)
    console.print(comparison_table(results))
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_files_alone() -> None:
    assert variants([A, B]) == [Variant("a", A), Variant("b", B)]


def test_every_combination() -> None:
    made = variants([A, B], ["batch_size=8,16", "schedule=gpipe,1f1b"], ["epochs=2"])
    assert len(made) == 8
    assert made[0] == Variant(
        "a batch_size=8 schedule=gpipe", A, ("epochs=2", "batch_size=8", "schedule=gpipe")
    )
    assert made[-1].label == "b batch_size=16 schedule=1f1b"
    assert len({variant.label for variant in made}) == 8


def test_files_of_the_same_name() -> None:
    other = Path("elsewhere/a.yml")
    assert [variant.label for variant in variants([A, other, B])] == ["configs/a.yml", "elsewhere/a.yml", "b"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("8, 16", ["8", "16"]),
        ("[1,2],[2,1]", ["[1,2]", "[2,1]"]),
        ("0.5,[1,[2,3]],x", ["0.5", "[1,[2,3]]", "x"]),
        ("1,", ["1", ""]),
        ("", [""]),
    ],
)
def test_values(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize(
    ("sweeps", "settings", "message"),
    [
        (["batch_size"], [], "--sweep 'batch_size': write a key and its values"),
        (["=1"], [], "write a key and its values"),
        (["batch_size="], [], "write a key and its values"),
        (["batch_size=1,,2"], [], "write a key and its values"),
        (
            ["seed=1", "seed=2"],
            [],
            "--sweep seed=2: seed is set or swept twice: give all its values in one --sweep",
        ),
        (["seed=1,1"], [], "a seed=1 would run 2 times"),
        (["seed=1"], ["seed=2"], "--sweep seed=1: seed is set or swept twice"),
    ],
)
def test_mistakes(sweeps: list[str], settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        variants([A], sweeps, settings)
    assert message in str(caught.value)


def test_an_unknown_key_is_refused_before_anything_is_trained() -> None:
    config = Path(__file__).parents[2] / "configs" / "bert_tiny.yml"
    with pytest.raises(
        ConfigError, match=r"bert_tiny.yml: unknown key 'batchsize' .*did you mean 'batch_size'"
    ):
        compare_runs([config], [], ["batchsize=1,2"], None, as_json=False)


def test_nothing_or_the_same_twice() -> None:
    with pytest.raises(ConfigError, match="nothing to compare"):
        variants([])
    with pytest.raises(ConfigError, match="would run 2 times"):
        variants([A, A])


def test_a_run_that_is_named_twice_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="this run is named twice"):
        compare_runs([tmp_path, tmp_path / "." / ""], [], [], None, as_json=False)
    assert capsys.readouterr().out == ""


def test_table() -> None:
    slow, fast = rows(result("gpipe", 100.0), result("vpipe[x]", 134.0))
    memory = "1.00 0.50"
    assert slow == ["gpipe", "100.0", "–", "1.00x", "160.0", "12.5%", "25.0%", "90.0%", memory, "2.5000"]
    assert fast[:4] == ["vpipe[x]", "134.0 *", "–", "1.34x"]


def test_figures_that_are_no_numbers() -> None:
    unmeasured, measured = rows(result("a", 0.0), result("b", 2.0))
    assert unmeasured[:8] == ["a", *["–"] * 7]
    assert measured[1:4] == ["2.0", "–", "1.00x"]  # of one speed there is no fastest
    assert rows() == []
    assert rows(result("a", 1.0, loss=math.nan))[0][-1] == "nan"
    assert rows(result("a", 1.0, loss=None))[0][-1] == "–"


def test_one_alone_is_not_the_fastest() -> None:
    assert rows(result("a", 5.0))[0][1] == "5.0"
    assert [row[1] for row in rows(result("a", 5.0), result("b", 5.0))] == ["5.0", "5.0"]


def test_the_caption_says_how_much_the_figures_can_be_trusted() -> None:
    assert caption([result("a", 1.0)]) is None
    apart = [result("a", 10.0, quartiles=[9.0, 11.0]), result("b", 20.0, quartiles=[19.0, 21.0])]
    assert str(caption(apart)).startswith("one after the other, each once, not side by side")
    assert "chance" not in str(caption(apart))
    near = [apart[0], result("b", 11.0, quartiles=[10.5, 12.0])]
    assert str(caption(near)).endswith("; quartiles of all overlap: the differences may be chance")
    in_turns = [result("a", 10.0, turns=[10.0, 9.0, 11.7]), result("b", 20.0, turns=[20.0, 20.0, 21.0])]
    assert caption(in_turns) == "3 turns of each, the median shown; turns of one run differ by up to 30%"
    in_turns[1]["turns"] = [11.0, 20.0, 21.0]
    assert str(caption(in_turns)).endswith("; turns of all overlap: the differences may be chance")


def test_variants_are_run_in_turns_and_linked_in_one_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without ranks: a stand-in writes what a run leaves."""
    speeds = iter([10.0, 30.0, 14.0, 20.0, 12.0, 25.0])
    ran: list[str] = []

    def stand_in(config: RunConfig, arguments: Sequence[str], *, quiet: bool) -> Path:
        folder = tmp_path / "runs" / f"{len(ran)}"
        folder.mkdir(parents=True)
        ran.append(config.chosen_schedule)
        (folder / "summary.json").write_text(json.dumps(result("", next(speeds))))
        (folder / "config.yml").write_text(f"schedule: {config.chosen_schedule}\n")
        return folder

    monkeypatch.setattr("vpipe.train.launcher.launch", stand_in)
    monkeypatch.setattr("vpipe.cli.compare.busy_cores", lambda: float(os.cpu_count() or 1))
    monkeypatch.setattr("vpipe.cli.compare.find_spec", lambda name: None)
    file = tmp_path / "run.yml"
    file.write_text("stages: 2\n")
    compare_runs([file], [], ["schedule=gpipe,1f1b"], None, as_json=True, turns=3)
    assert ran == ["gpipe", "1f1b"] * 3
    said = capsys.readouterr()
    slow, fast = json.loads(said.out)
    assert (slow["samples_per_s"], slow["turns"]) == (12.0, [10.0, 14.0, 12.0])
    assert (fast["samples_per_s"], fast["turns"]) == (25.0, [30.0, 20.0, 25.0])
    assert said.err.count("cores busy: the speed of this run says little") == 6
    assert "2 of 2, turn 3 of 3: run schedule=1f1b ..." in said.err
    page = tmp_path / "runs" / "comparison-5.html"
    assert said.err.endswith(f"report {page}\n")
    assert '"name":"schedule gpipe"' in page.read_text()


def test_runs_that_are_over_are_compared_by_loss_over_samples_and_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run makes an update in half the time, but needs twice as many samples."""
    monkeypatch.setattr("vpipe.cli.compare.find_spec", lambda name: None)
    falling = {"one": (100.0, 0.2), "two": (200.0, 0.1)}
    for name, (speed, slope) in falling.items():
        (tmp_path / name).mkdir()
        losses = [[update, 5.0 - slope * update] for update in range(20)]
        (tmp_path / name / "summary.json").write_text(json.dumps(result("", speed, losses=losses)))
    both = [tmp_path / name for name in falling]
    compare_runs(both, [], [], None, as_json=True)
    one, two = json.loads(capsys.readouterr().out)
    goal = 3.15  # of the second run: the mean of its last two losses
    assert (one["label"], two["label"]) == ("one", "two")
    assert one["to_loss"] == pytest.approx({"loss": goal, "updates": 11, "samples": 176, "seconds": 1.76})
    assert two["to_loss"] == pytest.approx({"loss": goal, "updates": 20, "samples": 320, "seconds": 1.6})
    compare_runs(both, [], [], None, as_json=False)
    said = capsys.readouterr().out
    assert "Until the loss was 3.15" in said
    assert "1.6 s *" in said
    with pytest.raises(ConfigError, match="--set and --sweep are for files"):
        compare_runs(both, [], ["seed=1,2"], None, as_json=False)
    (tmp_path / "two" / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"two: it has no summary.json: name the folder of a run that came"):
        compare_runs(both, [], [], None, as_json=False)


def test_curves_in_the_terminal() -> None:
    lines = text_plot([[(0.0, 2.0), (72.0, 1.0)], [(0.0, 2.0), (72.0, 2.0)]], "samples")
    assert lines[0] == "2.000 │####" + "b" * 68
    assert lines[1:3] == ["      │    aaaaaa", "      │          aaaaaaa"]
    assert lines[11] == "1.000 │" + " " * 68 + "aaaa"
    assert lines[13].split() == ["0", "samples", "72"]


def test_quartiles_are_those_of_the_updates(tmp_path: Path) -> None:
    ring, time = Events(0), 0.0
    for update, took in enumerate([1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0]):
        time += took
        ring.add(Action(0, Op.STEP, update), time - 0.1, time, 0.0, 0, 0, update, False)
    ring.write(tmp_path, {}, Samples("process", [], []))
    assert speed_quartiles(tmp_path, result("a", 2.0)) == pytest.approx([16 / 4, 16 / 2])
    assert speed_quartiles(tmp_path / "none", result("a", 2.0)) is None


@pytest.mark.parametrize("count", [0, 1, 3, 16])
def test_plot(tmp_path: Path, count: int) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "comparison.png"
    plot(
        [
            result(f"run{n} batch_size={n}", 10.0 * n, losses=[[0, 1.0], [1, math.nan], [2, None]])
            for n in range(count)
        ],
        path,
    )
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(VPipeError, match=r"pip install 'vpipe\[plot\]'"):
        compare_runs([A], [], [], tmp_path / "comparison.png", as_json=False)


def test_a_plot_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(VPipeError, match="the plot cannot be written: No such file or directory"):
        plot([result("a", 1.0)], tmp_path / "nowhere" / "comparison.png")
