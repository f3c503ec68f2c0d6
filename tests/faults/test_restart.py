"""Real ranks that fail: the run goes on from its newest checkpoint and ends as if nothing had happened."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.command import wait_until_gone
from tests.faults.runs import be_patient, failures, final_weights, half_done, train, write_config

# A save waits for the one before it: behind the second save, at update 12, the first is on the disk for certain.
KILL = "rank=1,step=14,point=fwd,kind=kill"
SECOND = {
    "exit": "ended with exit code 70 ",
    "gil": "stuck: its interpreter has not run for ",
}
"""What befalls the run when it goes on, and how that is reported."""


@pytest.mark.parametrize("kind", ["exit", pytest.param("gil", marks=pytest.mark.long)])
def test_a_run_survives_faults_and_ends_with_the_same_weights(kind: str, tmp_path: Path) -> None:
    limit = 10.0 if kind == "gil" else 600.0  # only there somebody is to be found by the clock
    write_config(tmp_path, 2, heartbeat_limit=limit, max_updates=24)
    clean, reference = train(tmp_path)
    assert clean.code == 0, clean.said
    second = f"rank=0,step=20,point=step,kind={kind},attempt=1"
    ended, run = train(tmp_path, f"{KILL};{second}", "--max-restarts", 2, prepare=be_patient)
    assert ended.code == 0, ended.said
    killed, back, other, _ = failures(run)
    assert killed["rank"] == 1
    assert killed["how"] == "killed by SIGKILL (stage 1, its last action was 1F14)"
    assert back["recovered"] > killed["ended"]
    assert other["rank"] == 0
    assert other["how"].startswith(SECOND[kind])
    assert other["how"].endswith("(stage 0, its last action was 0STEP20)")
    assert "restart 2 of 2" in ended.err
    log = (run / "output.log.0").read_text()
    assert f"stopped because rank 1 failed: {killed['how']}" in log
    assert log.count("resumed from") == 2, log
    assert final_weights(run) == final_weights(reference)
    assert not half_done(run)
    wait_until_gone(str(tmp_path))


def test_before_training_and_after_it_a_signal_ends_a_rank_at_once(tmp_path: Path) -> None:
    write_config(tmp_path, 2, max_updates=2, checkpoint_interval=0, heartbeat_limit=600.0)
    faults = "rank=1,point=init,kind=term;rank=1,point=shutdown,kind=term,attempt=1"
    ended, run = train(tmp_path, faults, "--max-restarts", 1, prepare=be_patient)
    assert ended.code == 1, ended.said
    before, after = [line for line in failures(run) if "how" in line]
    assert before["how"] == "killed by SIGTERM (stage 1, during the making of the pipeline)"
    assert after["how"].startswith("killed by SIGTERM (stage 1, ")
    log = (run / "output.log.1").read_text()
    assert re.findall(r"VPIPE_FAULT: term at (init|shutdown), ", log) == ["init", "shutdown"]


def test_a_run_that_goes_on_is_drained_at_the_same_updates(tmp_path: Path) -> None:
    """It evaluates after updates 15 and 30 and saves after every fourth; it is killed while it saves the twentieth.

    If it evaluated elsewhere when it goes on from update 16, it would drain the pipeline at other updates.
    """
    keys = {"schedule": "pipedream", "checkpoint_interval": 4, "evaluation_interval": 15, "max_updates": 44}
    write_config(tmp_path, 3, heartbeat_limit=600.0, epochs=10, **keys)
    clean, reference = train(tmp_path)
    assert clean.code == 0, clean.said
    ended, run = train(
        tmp_path, "rank=1,point=ckpt_write,step=20,kind=kill", "--max-restarts", 1, prepare=be_patient
    )
    assert ended.code == 0, ended.said
    assert "step-00000016 after 16 updates" in (run / "output.log.0").read_text()
    assert final_weights(run) == final_weights(reference)
