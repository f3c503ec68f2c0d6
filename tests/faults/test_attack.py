"""Some random signals from outside (`make attack` sends many), to runs over both channels."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.attack import GLOO, SHARED

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.long  # a process of its own: it gets a network and a /dev/shm that only it has
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("channel", "schedule"), [(SHARED, "vpipe"), (GLOO, "1f1b")])
def test_a_run_that_is_struck_ends_as_if_nothing_had_been(channel: str, schedule: str) -> None:
    if (
        channel == GLOO
        and subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no network namespaces here")
    command = [sys.executable, "-m", "tests.faults.attack", "--rounds", "3", "--seed", "2"]
    ended = subprocess.run(
        [*command, "--schedules", schedule, "--channels", channel],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=880,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 strikes at " in ended.stdout
