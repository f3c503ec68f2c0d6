"""The session that runs benchmarks one after the other: what runs beside them stands still while one is timed."""

import subprocess
import sys
from pathlib import Path

import pytest

SESSION = Path(__file__).parents[2] / "benchmarks" / "gpu_session.py"
COUNTING = """
import sys, time
while True:
    with open(sys.argv[1], "a") as file:
        file.write("x")
    time.sleep(0.02)
"""
LOOKING = """
import pathlib, sys, time
file = pathlib.Path(sys.argv[1])
before = file.stat().st_size
time.sleep(0.5)
print("moved" if file.stat().st_size > before else "stood still")
"""


@pytest.fixture
def session(tmp_path: Path) -> list[str]:
    (tmp_path / "counting.py").write_text(COUNTING)
    (tmp_path / "looking.py").write_text(LOOKING)
    return [sys.executable, str(SESSION), "--logs", str(tmp_path / "logs")]


def call(session: list[str], *arguments: str) -> str:
    ended = subprocess.run([*session, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_long_job_stands_still_while_a_quiet_step_runs_and_outlives_the_call(
    session: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "count"
    file.touch()
    look = f"{sys.executable} {tmp_path / 'looking.py'} {file}"
    begin = f"{sys.executable} {tmp_path / 'counting.py'} {file}"
    # The interpreter of the background job has to start before it can be seen to move.
    waited = f"beside: {sys.executable} -c 'import time; time.sleep(1)'"
    first = call(session, "--background", begin, waited, f"beside: {look}", f"quiet: {look}")
    assert [line.strip() for line in first.splitlines() if line.startswith("    ")] == [
        "moved",
        "stood still",
    ]
    second = call(session, f"beside: {look}", "--end")
    assert "moved" in second
    assert "stood still" in call(session, f"beside: {look}")


def test_no_step_lasts_longer_than_there_is_time(session: list[str]) -> None:
    said = call(session, "--seconds", "0.5", "quiet: sleep 60", "quiet: sleep 61")
    assert "sleep 60: was ended: there was no more time" in said
    assert "left out: sleep 61" in said
