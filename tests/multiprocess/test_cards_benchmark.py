"""`benchmarks/cards.py` without cards: the same measurements over shared memory and gloo."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.pool import Pool

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARTS = ("pairs", "all-reduce", "schedules")


def bench() -> dict[str, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from cards_rank import Bench

        bench = Bench("cpu", quick=True)
        titles = [title for title, rows in bench.run(PARTS) if rows]
        return bench.results | {"titles": titles}
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_ranks_on_the_cpu_measure_all_that_cards_would(
    pool: Pool,
) -> None:
    first, second = pool.run(2, bench)
    assert [row["channel"] for row in first["pairs"]] == ["shared memory", "gloo"]
    for row in first["pairs"]:
        assert min(row["latency_us"], row["there_gb"], row["back_gb"]) > 0
    assert first["all_reduce"]["bus_gb"] > 0
    assert [row["equal"] for row in first["schedules"]] == ["yes"] * 6
    assert {row["channels"] for row in first["schedules"]} == {"shared memory", "gloo"}
    assert second["schedules"] == []  # rank 0 has the weights
    assert [title[:2] for title in first["titles"]] == ["1.", "2.", "2.", "3.", "4.", "4."]
    assert first["left_out"] == ["all that needs cards: ranks were on the CPU"]


def test_what_was_measured_before_a_failure_is_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cards_rank

    class Failing:
        rank = 0

        def __init__(self, *_: object) -> None:
            self.results: dict[str, Any] = {"pairs": []}

        def run(self, parts: object) -> Iterator[tuple[str, list[dict[str, Any]]]]:
            self.results["pairs"].append({"channel": "CUDA IPC", "there_gb": 321.0})
            yield "2. Pairs", self.results["pairs"]
            raise RuntimeError("NCCL hangs")

    monkeypatch.setattr(cards_rank, "Bench", Failing)
    file = tmp_path / "found.json"
    with pytest.raises(RuntimeError, match="NCCL hangs"):
        cards_rank.run_rank(cpu=False, quick=True, parts=PARTS, file=file)
    assert "321" in capsys.readouterr().out
    assert json.loads(file.read_text())["pairs"] == [{"channel": "CUDA IPC", "there_gb": 321.0}]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "cards.py", "--cpu", "--quick", "--json", tmp_path / "found.json"],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert "5. Share of the limit" in done.stdout
    assert (tmp_path / "found.json").exists()


def test_without_cards_it_says_how_to_run_it() -> None:
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "cards.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert done.stderr == "there is no NVIDIA GPU here: run it where there are some, or with --cpu\n"


def test_ranks_that_hang_are_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cards

    monkeypatch.setattr(cards, "LIMIT", 0.5)
    monkeypatch.setattr(sys, "argv", ["-c", "import time; time.sleep(1000)"])
    assert cards.run_ranks([{}, {}]) == [None, None]
    monkeypatch.setattr(sys, "argv", ["cards.py", "--cpu"])
    monkeypatch.setattr(cards, "run_ranks", lambda shares: [None, None])
    with pytest.raises(SystemExit, match="ranks ended with \\[None, None\\]"):
        cards.main()
