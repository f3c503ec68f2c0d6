"""Ranks without our launcher: one by one, where they name the one that failed, or by torchrun, which restarts them."""

import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tests.end_to_end.command import alive, end, start, vpipe, wait_until_gone
from tests.faults.runs import be_patient, final_weights, half_done, shared_memory, train, write_config
from tests.waiting import TIMEOUT, wait_until

WORD = "error: stopped because rank 1 failed: its process ended and gave no reason"
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


def test_the_others_name_the_rank_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, 3, heartbeat_limit=20.0)
    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    # Rank 0 is sent SIGTERM while it fails for that, as torchrun would do: it names the rank that failed first.
    faults = "rank=1,step=4,point=bwd,kind=kill;rank=0,point=shutdown,kind=term"
    monkeypatch.setenv("VPIPE_FAULT", faults)
    ranks = []
    try:
        for rank in range(3):
            monkeypatch.setenv("RANK", str(rank))
            own = {} if rank else {"listener": listener}
            ranks.append(start("train", "run.yml", cwd=tmp_path, new=False, prepare=be_patient, **own))
        listener.close()
        _, said = ranks[1].communicate(TIMEOUT)
        assert "VPIPE_FAULT" in said
        for rank in (0, 2):
            _, said = ranks[rank].communicate(TIMEOUT)
            assert WORD in said
            assert ("VPIPE_FAULT: term at shutdown" in said) == (rank == 0)
            assert ranks[rank].returncode == 3
            assert "Traceback" not in said
    finally:
        for process in ranks:
            end(process)


@pytest.mark.long  # twice two new interpreters; test_restart.py restarts them itself
def test_torchrun_restarts_and_the_run_ends_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, 2, heartbeat_limit=20.0, max_updates=24)
    monkeypatch.setenv("VPIPE_FAULT", "rank=1,step=14,point=bwd,kind=kill")
    shared = shared_memory()
    try:
        ended = vpipe("train", "run.yml", "--resume", "auto", cwd=tmp_path, launcher=TORCHRUN)
        wait_until_gone(str(tmp_path))
    finally:
        for process in alive(str(tmp_path)):
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
    assert ended.code == 0, ended.said
    wait_until(lambda: not shared_memory() - shared, "the end of its shared memory")  # or of others'
    assert ended.err.count("VPIPE_FAULT: kill at bwd") == 1
    assert "stopped because rank 1 failed" in ended.err
    killed, revived = sorted(tmp_path.glob("runs/2*"))
    # That of update 12 may have been under way; it waits for that of update 9.
    resumed = re.search(r"resumed from (.*)/checkpoints/step-000000(09|12) after (9|12) updates", ended.said)
    assert resumed is not None, ended.said
    assert Path(resumed[1]).name == killed.name
    assert not half_done(revived)
    # Only now: it would have been found by `--resume auto`.
    clean, reference = train(tmp_path)
    assert clean.code == 0, clean.said
    assert final_weights(revived) == final_weights(reference)
