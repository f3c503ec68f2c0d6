"""A job whose processes are all stopped for longer than every limit, and continued (row 35 of docs/reliability.md)."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.command import alive, end, rank_process, start, wait_for_line
from tests.faults.runs import failures, write_config
from tests.waiting import TIMEOUT, wait_until

LIMIT = 5.0


def state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.long  # it takes longer than the limits; test_supervision.py and test_deadline.py have clocks of their own
def test_a_job_that_was_suspended_goes_on_and_blames_no_rank(tmp_path: Path) -> None:
    """The ranks are stopped before the launcher, and continued after it: it sees them stand still."""
    write_config(tmp_path, 3, max_updates=2000, heartbeat_limit=LIMIT, checkpoint_interval=1000)
    process = start("train", "run.yml", cwd=tmp_path, new=False)
    try:
        wait_for_line("update", tmp_path)
        ranks = [wait_until(lambda rank=rank: rank_process(rank, tmp_path)) for rank in range(3)]
        others = [int(each) for each in alive(str(tmp_path)) if int(each) not in ranks]
        assert process.pid in others
        for each in ranks:
            os.kill(each, signal.SIGSTOP)
        time.sleep(1.0)
        for each in others:
            os.kill(each, signal.SIGSTOP)
        wait_until(lambda: all(state(each) == "T" for each in (*ranks, *others)))
        time.sleep(2 * LIMIT)
        for each in others:
            os.kill(each, signal.SIGCONT)
        time.sleep(0.3)
        for each in ranks:
            os.kill(each, signal.SIGCONT)
        os.kill(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        for each in alive(str(tmp_path)):
            os.kill(int(each), signal.SIGCONT)
        end(process)
    assert process.returncode == 75, out + err
    (run,) = tmp_path.glob("runs/2*")
    assert not failures(run)
    for rank in range(3):
        assert "error" not in (run / f"output.log.{rank}").read_text()
