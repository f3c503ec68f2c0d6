"""The network between two hosts is cut: both sides end, and name the peer that they lost.

The hosts are network namespaces of this one, joined by a virtual cable; where those are not permitted it is skipped.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.runs import write_config

LIMIT = 3.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Two namespaces; the addresses in them end with 1 and 2."""
    number = os.getpid() % 65536
    names = [f"vpipe-{number}-{side}" for side in "ab"]
    cables = [f"vp{number}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", cables[1], "netns", names[1])
        for last, (name, cable) in enumerate(zip(names, cables, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.231.7.{last}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    else:
        yield list(zip(names, cables, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.timeout(150)
def test_both_sides_name_the_peer_that_they_lost(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    write_config(tmp_path, 2, max_updates=None, epochs=100_000, print_frequency=1, heartbeat_limit=LIMIT)
    ranks = []
    for rank, (name, _) in enumerate(hosts):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "10.231.7.1", "MASTER_PORT": "29517"}
        ranks.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-m", "vpipe", "train", "run.yml"],
                cwd=tmp_path,
                env=os.environ | place | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        _wait_until_it_trains(tmp_path)
        ip("-n", hosts[0][0], "link", "set", hosts[0][1], "down")
        cut = time.monotonic()
        for rank, process in enumerate(ranks):
            _, said = process.communicate(timeout=LIMIT + 5 - (time.monotonic() - cut))
            assert process.returncode == 3
            assert f"error: stopped because rank {1 - rank} failed: not heard of for " in said
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_it_trains(folder: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if any("Iteration" in log.read_text() for log in folder.glob("runs/*/output.log.0")):
            return
        time.sleep(0.2)
    raise AssertionError("the run does not train")
