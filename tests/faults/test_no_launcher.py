"""Ranks that were started one by one, as torchrun starts them: nobody watches them, and they name the culprit alike."""

import socket
import time

import pytest

from tests.end_to_end.command import end, start
from tests.faults.runs import write_config

WORD = "error: stopped because rank 1 failed: it ended without a word"


@pytest.mark.timeout(150)
def test_the_others_name_the_rank_that_was_killed(tmp_path, monkeypatch):
    write_config(tmp_path, 3, heartbeat_limit=5.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("VPIPE_FAULT", "rank=1,step=4,point=bwd,kind=kill")
    ranks = []
    try:
        for rank in range(3):
            monkeypatch.setenv("RANK", str(rank))
            ranks.append(start("train", "run.yml", cwd=tmp_path, new=False))
        _, said = ranks[1].communicate(timeout=100)
        ended = time.monotonic()
        assert "VPIPE_FAULT" in said
        for rank in (0, 2):
            _, said = ranks[rank].communicate(timeout=30)
            assert WORD in said
            assert ranks[rank].returncode == 3
            assert "Traceback" not in said
        assert time.monotonic() - ended < 5
    finally:
        for process in ranks:
            end(process)
