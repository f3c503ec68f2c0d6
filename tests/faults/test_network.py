"""The network between two hosts is cut: both sides end, and name the peer that they lost."""

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.command import end, start, wait_for_line
from tests.faults.hosts import FIRST, TwoHosts, enter, two_hosts
from tests.faults.runs import write_config
from tests.waiting import TIMEOUT

LIMIT = 10.0


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        with two_hosts() as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.mark.long  # test_heartbeat.py lets a process fall silent
def test_both_sides_name_the_peer_that_they_lost(
    hosts: TwoHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = {"max_updates": None, "epochs": 100_000, "print_frequency": 1}
    write_config(tmp_path, 2, machines=["first:0", "second:0"], heartbeat_limit=LIMIT, **endless)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": FIRST, "MASTER_PORT": "29517"}  # a host has all its ports
    for key, value in place.items():
        monkeypatch.setenv(key, value)
    ranks = []
    try:
        for rank, name in enumerate(hosts.names):
            monkeypatch.setenv("RANK", str(rank))
            ranks.append(start("train", "run.yml", cwd=tmp_path, new=False, prepare=partial(enter, name)))
        wait_for_line("Iteration", tmp_path)
        hosts.cut()
        for rank, process in enumerate(ranks):
            _, said = process.communicate(TIMEOUT)
            assert process.returncode == 3
            assert f"error: stopped because rank {1 - rank} failed: no heartbeat for " in said
    finally:
        for process in ranks:
            end(process)
