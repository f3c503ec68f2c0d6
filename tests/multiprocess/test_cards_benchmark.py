"""`benchmarks/cards.py` without cards: the same measurements over shared memory and gloo."""

import os
import subprocess
import sys
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

        return Bench("cpu", quick=True).run(PARTS)
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_ranks_on_the_cpu_measure_all_that_cards_would(
    pool: Pool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pool.run(2, bench)
    assert [row["channel"] for row in first["pairs"]] == ["shared memory", "gloo"]
    for row in first["pairs"]:
        assert min(row["latency_us"], row["there_gb"], row["back_gb"]) > 0
    assert first["all_reduce"]["bus_gb"] > 0
    assert [row["equal"] for row in first["schedules"]] == ["yes"] * 6
    assert {row["channels"] for row in first["schedules"]} == {"shared memory", "gloo"}
    assert second["schedules"] == []  # rank 0 has the weights
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from cards_rank import show

    show(first)
    printed = capsys.readouterr().out
    assert "Schedules against the plain model" in printed
    assert "Left out: all that needs cards" in printed


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
