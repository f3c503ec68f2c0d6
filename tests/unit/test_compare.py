"""The comparison of runs: variants, table, picture."""

import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from vpipe.cli.compare import Result, Variant, compare_runs, comparison_table, plot, split_values, variants
from vpipe.errors import ConfigError, VPipeError
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


def test_table() -> None:
    slow, fast = rows(result("gpipe", 100.0), result("vpipe[x]", 134.0))
    memory = "1.00 0.50"
    assert slow == ["gpipe", "100.0", "1.00x", "160.0", "12.5%", "25.0%", "90.0%", memory, "2.5000"]
    assert fast[:3] == ["vpipe[x]", "134.0 *", "1.34x"]


def test_figures_that_are_no_numbers() -> None:
    (row,) = rows(result("a", 0.0))
    assert row[:4] == ["a", "0.0", "–", "0.0"]
    assert rows() == []
    assert rows(result("a", 1.0, loss=math.nan))[0][-1] == "nan"
    assert rows(result("a", 1.0, loss=None))[0][-1] == "–"


def test_one_alone_is_not_the_fastest() -> None:
    assert rows(result("a", 5.0))[0][1] == "5.0"
    assert [row[1] for row in rows(result("a", 5.0), result("b", 5.0))] == ["5.0", "5.0"]


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
