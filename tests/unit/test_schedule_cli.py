"""`vpipe schedule`, as users call it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vpipe.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["vpipe", "schedule", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "pipedream", "--stages", 4, "--minibatches", 8, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"][3][:4] == ["3F0", "3B0", "3STEP0", "3F1"]
    assert facts["bubble"] == pytest.approx(3 / 11)
    assert facts["steady_bubble"] == 0
    assert facts["in_flight"] == [4, 3, 2, 1]
    assert facts["versions"] == [4, 3, 2, 1]
    assert (facts["name"], facts["stages"], facts["minibatches"]) == ("pipedream", 4, 8)


def test_json_with_communication(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("1f1b", "--stages", 2, "--minibatches", 1, "--replicas", "2,1", "--json", "--communication")
    assert run(monkeypatch, *arguments) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert ranks[0] == ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0REDUCE0", "0STEP0"]
    assert ranks[1] == ["0REDUCE0", "0STEP0"]


def test_drawing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "interleaved", "--stages", 2, "--minibatches", 4, "--chunks", 3) == 0
    out = capsys.readouterr().out
    assert "rank 1  ·   1F0 1F1" in out
    assert "bubble 7.7%" in out


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("pipedream", "--stages", 4), "bubble 27.3%, 0.0% in the steady state"),
        (("2bw", "--stages", 4, "--update-interval", 5), "bubble 27.3%, 0.0% in the steady state"),
        (("1f1b", "--stages", 4), "bubble 27.3%"),
        # One rank of the second stage does the work of two of the first, which wait for it.
        (("vpipe", "--stages", 2, "--replicas", "2,1"), "bubble 40.7%, 33.3% in the steady state"),
    ],
)
def test_the_bubble_of_the_table_and_of_the_steady_state(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[object, ...],
    shown: str,
) -> None:
    assert run(monkeypatch, *arguments, "--minibatches", 8, "--svg", tmp_path / "a.svg") == 0
    assert shown in capsys.readouterr().out.splitlines()
    assert f"; {shown}</text>" in (tmp_path / "a.svg").read_text()


def test_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, csv = tmp_path / "a.svg", tmp_path / "a.csv"
    assert (
        run(monkeypatch, "zb-v", "--stages", 2, "--minibatches", 4, "--svg", svg, "--csv", csv, "--json") == 0
    )
    built = json.loads(capsys.readouterr().out)
    assert svg.read_text().startswith("<svg")
    assert run(monkeypatch, "--from", csv, "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert read == built | {"name": "a.csv"}
    assert run(monkeypatch, csv, "--json") == 0  # as other commands take it, in place of a name
    assert json.loads(capsys.readouterr().out) == read
    assert (
        run(monkeypatch, "gpipe", "--stages", 1, "--minibatches", 1, "--csv", tmp_path / "no" / "a.csv") == 74
    )
    assert "cannot be written" in capsys.readouterr().err


def test_a_wrong_table_is_refused_with_its_grid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "wrong.csv"
    table.write_text("0F0,0B0\n1B0,1F0\n")
    assert run(monkeypatch, "--from", table) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: schedule 'wrong.csv' cannot run: rank 1: 1B0 stands before 1F0, which it needs",
        "time    0",
        "rank 0  F0",
        "rank 1  [1B0] << stands before 1F0, which it needs",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpip", "--stages", 2, "--minibatches", 2], "unknown schedule 'gpip': did you mean 'gpipe'?"),
        (["gpipe", "--stages", 0, "--minibatches", 2], "stages is 0"),
        (["gpipe", "--stages", 2, "--minibatches", 0], "minibatches is 0"),
        (["gpipe", "--stages", 2], "give NAME, --stages and --minibatches, or --from FILE"),
        (["gpipe", "--stages", 2, "--minibatches", 2, "--replicas", "2;1"], "--replicas '2;1' is not a list"),
        (["gpipe", "--from", "a.csv"], "give either a schedule's name or --from, not both"),
        (["--from", "nowhere.csv"], "nowhere.csv: cannot be read"),
        (["nowhere.csv"], "nowhere.csv: cannot be read"),
    ],
)
def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[object], message: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_torch_is_not_needed() -> None:
    code = (
        "import sys; from vpipe.cli import main; sys.argv = sys.argv[:1] + "
        "['schedule', 'gpipe', '--stages', '2', '--minibatches', '2', '--json']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
