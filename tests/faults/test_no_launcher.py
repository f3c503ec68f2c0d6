"""Ranks that others have started: one by one, where they name the culprit, or by torchrun, which restarts them."""

import os
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.end_to_end.command import alive, end, start, vpipe
from tests.faults.runs import final_weights, half_done, shared_memory, train, write_config

WORD = "error: stopped because rank 1 failed: it ended without a word"
TORCHRUN = (
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "1",
    "-m",
    "vpipe",
)


@pytest.mark.timeout(150)
def test_the_others_name_the_rank_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, 3, heartbeat_limit=5.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    # Rank 0 is sent SIGTERM while it fails for that, as torchrun would do: it names the culprit first.
    faults = "rank=1,step=4,point=bwd,kind=kill;rank=0,point=shutdown,kind=term"
    monkeypatch.setenv("VPIPE_FAULT", faults)
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
            assert ("VPIPE_FAULT: term at shutdown" in said) == (rank == 0)
            assert ranks[rank].returncode == 3
            assert "Traceback" not in said
        assert time.monotonic() - ended < 5
    finally:
        for process in ranks:
            end(process)


@pytest.mark.timeout(240)
def test_torchrun_restarts_and_the_run_ends_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, 2, heartbeat_limit=5.0, max_updates=24)
    monkeypatch.setenv("VPIPE_FAULT", "rank=1,step=14,point=bwd,kind=kill")
    shared = shared_memory()
    try:
        ended = vpipe("train", "run.yml", "--resume", "auto", cwd=tmp_path, launcher=TORCHRUN, timeout=150)
    finally:
        left = alive(str(tmp_path))
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
    assert ended.code == 0, ended.said
    assert not left
    assert not shared_memory() - shared
    assert ended.err.count("VPIPE_FAULT: kill at bwd") == 1
    assert "stopped because rank 1 failed" in ended.err
    killed, revived = sorted(tmp_path.glob("runs/2*"))
    # That of update 12 may have been under way; it waits for that of update 6.
    resumed = re.search(r"resumed from (.*)/checkpoints/step-000000(06|12) after (6|12) updates", ended.said)
    assert resumed is not None, ended.said
    assert Path(resumed[1]).name == killed.name
    assert not half_done(revived)
    # Only now: it would have been found by `--resume auto`.
    clean, reference = train(tmp_path)
    assert clean.code == 0, clean.said
    assert final_weights(revived) == final_weights(reference)
