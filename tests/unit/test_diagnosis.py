"""The diagnosis: what is wrong with a run on purpose is found, with figures; what is right is not called wrong."""

import json
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vpipe.observe.diagnosis import Finding, diagnose, diagnose_command
from vpipe.record.events import Events, StageBytes
from vpipe.record.status import ENDED, FAILED, StageDrift, Status, Waiting, write_status
from vpipe.schedule import Action, Op


def heard(rank: int, place: str, **more: Any) -> Status:
    """A status of a process that does not exist any more."""
    return Status(
        rank, (rank,), 2**22 + 1, socket.gethostname(), time.time() - 60, place=place, inside=True, **more
    )


def only(folder: Path, topic: str) -> Finding:
    return next(finding for finding in diagnose(folder) if finding.topic == topic)


def test_a_dead_peer_is_told_from_those_who_noticed(tmp_path: Path) -> None:
    lost = "rank 1 closed its connection: it ended or was killed; see its own output"
    waiting = Waiting("0RECV_B5", 1, 0.2)
    write_status(heard(0, "0RECV_B5", state=FAILED, error=lost, updates=5, waiting=waiting), tmp_path)
    write_status(heard(1, "1F7", updates=6), tmp_path)
    found = only(tmp_path, "standstill")
    assert found.grade == "fault"
    assert found.figures == {"culprit": 1, "place": "1F7", "updates": 6}
    assert found.text.startswith("rank 1 (stage 1) died without a message, in 1F7, after 6 updates")
    assert "rank 0 waited for 0RECV_B5 from it" in found.text


def test_a_rank_that_failed_is_told_from_those_who_noticed(tmp_path: Path) -> None:
    write_status(heard(0, "0RECV_B5", state=FAILED, error="rank 1 closed its connection"), tmp_path)
    write_status(heard(1, "1F7", state=FAILED, error="index out of range"), tmp_path)
    assert only(tmp_path, "standstill").figures["culprit"] == 1


def test_what_the_launcher_saw_goes_before_what_the_ranks_said(tmp_path: Path) -> None:
    waiting = Waiting("0RECV_B5", 1, 0.2)
    write_status(
        heard(0, "0RECV_B5", state=FAILED, error="rank 1 closed its connection", waiting=waiting), tmp_path
    )
    how = "killed by SIGKILL (stage 1, its last action was 1F7)"
    (tmp_path / "failures.jsonl").write_text(json.dumps({"attempt": 0, "rank": 1, "how": how}) + "\n")
    found = only(tmp_path, "standstill")
    assert found.text == f"rank 1 failed: {how}; rank 0 waited for 0RECV_B5 from it; 0 updates were made"
    assert found.figures["culprit"] == 1


def test_a_hang_that_is_over_is_remembered(tmp_path: Path) -> None:
    write_status(heard(0, "its end", state=ENDED), tmp_path)
    assert only(tmp_path, "standstill").grade == "fine"
    (tmp_path / "hang.txt").write_text("rank 1 waits for 1RECV_F7 from rank 0\n")
    found = only(tmp_path, "standstill")
    assert found.grade == "notice"
    assert found.text.endswith("but for a while: rank 1 waits for 1RECV_F7 from rank 0")


def test_out_of_memory_says_what_the_memory_went_to(tmp_path: Path) -> None:
    write_status(heard(0, "0F3", state=FAILED, error="DefaultCPUAllocator: can't allocate memory"), tmp_path)
    ring = Events(0)
    for minibatch in range(3):
        ring.add(Action(0, Op.F, minibatch), minibatch, minibatch + 0.5, 0.0, 0, 0, 0, False)
    ring.write(tmp_path, {0: StageBytes(weights=2**20, optimizer=2**21, minibatch=2**22)})
    found = only(tmp_path, "memory")
    assert found.grade == "fault"
    assert found.figures["ran_out"] == [0]
    assert found.figures["largest"] == "activations"
    assert "12 MiB of activations (3 minibatches of 4 MiB)" in found.text
    assert "half the batch_size would save 6 MiB" in found.text


@pytest.mark.parametrize(("retries", "grade"), [([0, 3, 12], "notice"), ([0, 0, 0], "fine")])
def test_an_allocator_that_found_no_room_is_noticed(retries: list[int], grade: str, tmp_path: Path) -> None:
    ring = Events(0)
    ring.add(Action(0, Op.F, 0), 0.0, 0.5, 0.0, 0, 0, 0, False)
    ring.write(tmp_path, {0: StageBytes(weights=2**20, optimizer=2**21, minibatch=2**22)})
    ranks = [{"rank": rank, "allocator_retries": count} for rank, count in enumerate(retries)]
    (tmp_path / "summary.json").write_text(json.dumps({"ranks": ranks}))
    found = only(tmp_path, "memory")
    assert found.grade == grade
    assert found.figures.get("allocator_retries") == ({"rank": 2, "times": 12} if any(retries) else None)
    said = "rank 2's GPU was nearly full: 12 times its allocator found no room"
    assert found.text.startswith(said) == any(retries)


@pytest.mark.parametrize(
    ("losses", "grade", "said"),
    [
        ([3.0, 2.5, 2.2, 2.0, 1.9, 1.8], "fine", "falls, from 3 to 1.8"),
        ([2.0, 2.1, 2.6, 3.5, 5.0, 7.0], "fault", "rises, from 2 to 7"),
        ([2.0, 2.0, 2.01, 2.0, 1.99, 2.0], "notice", "does not fall"),
        ([2.0, 1.9, float("nan"), float("nan"), 1.0], "fault", "is nan from update 3 on; it was 1.9 before"),
    ],
)
def test_a_loss_that_does_not_fall(losses: list[float], grade: str, said: str, tmp_path: Path) -> None:
    ring = Events(0)
    for number, (op, version) in enumerate(((Op.F, 0), (Op.STEP, 1), (Op.STEP, 2), (Op.B, 0))):
        ring.add(
            Action(0, op, 3 if op in (Op.F, Op.B) else number),
            number,
            number + 0.5,
            0.0,
            0,
            0,
            version,
            False,
        )
    ring.write(tmp_path)
    lines = [
        {"kind": "train", "update": number, "loss": loss, "learning_rate": 0.5}
        for number, loss in enumerate(losses, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = only(tmp_path, "loss")
    assert found.grade == grade
    assert said in found.text
    assert found.figures["staleness"] == {0: 2}
    if grade != "fine":
        assert "the learning rate went up to 0.5" in found.text
        assert "stage 0 updates with gradients of weights 2 updates old" in found.text


def test_a_wrong_version_is_found(tmp_path: Path) -> None:
    ring = Events(0)
    for number, (op, version) in enumerate(((Op.F, 0), (Op.STEP, 1), (Op.B, 1))):
        ring.add(Action(0, op, 0), number, number + 0.5, 0.0, 0, 0, version, False)
    ring.write(tmp_path)
    found = only(tmp_path, "versions")
    assert found.grade == "fault"
    assert found.figures["wrong"] == ["0B0 read version 1, its forward 0"]


def stale(overshoot: float, **more: Any) -> StageDrift:
    known = {"optimizer": "adamw", "predicted": False, "samples": 9} | more
    return StageDrift(stage=0, delay=3, drift=0.006, unseen=0.05 + overshoot, seen=0.05, **known)


@pytest.mark.parametrize(
    ("found", "grade", "said"),
    [
        (
            stale(0.2),
            "notice",
            "repeats 20.0% of an update that they have not seen, and its weights move by 0.60%",
        ),
        (stale(0.2), "notice", "set optimizer: muon and staleness: [predict], or schedule: 2bw"),
        (stale(0.2, optimizer="muon"), "notice", "set staleness: [predict], or schedule"),
        (
            stale(0.2, optimizer="muon", predicted=True),
            "notice",
            "set schedule: 2bw, a larger update_interval",
        ),
        (stale(0.01), "fine", "stale weights do little harm: stage 0"),
        (
            stale(0.01, factor=2.5),
            "notice",
            "adamw without prediction is known to need 2.5 times as many samples",
        ),
        (stale(0.2, samples=2), "unknown", "2 samples of the drift are too few"),
    ],
)
def test_a_run_that_stale_weights_slow_down(found: StageDrift, grade: str, said: str, tmp_path: Path) -> None:
    write_status(heard(0, "its end", stale=(found,)), tmp_path)
    finding = only(tmp_path, "staleness")  # while it runs
    assert (finding.grade, said in finding.text) == (grade, True), finding.text
    (tmp_path / "summary.json").write_text(json.dumps({"stale": [asdict(found)]}))
    assert only(tmp_path, "staleness") == finding
    assert finding.figures["stages"][0]["overshoot"] == pytest.approx(found.overshoot)


def test_too_much_communication_says_how_much(tmp_path: Path) -> None:
    ring = Events(0, [(0, 1)])
    for minibatch in range(4):
        for place, (op, took) in enumerate(((Op.F, 0.2), (Op.SEND_F, 0.5), (Op.B, 0.3))):
            start = minibatch + place / 3
            sent = 1000 if op is Op.SEND_F else 0
            ring.add(Action(0, op, minibatch), start, start + took, 0.0, sent, 0, 0, False)
    ring.write(tmp_path)
    found = only(tmp_path, "communication")
    assert found.figures["share"] == pytest.approx(0.5)
    assert found.grade == "fault"
    assert "50.0% of the ranks' busy time goes to messages, 1000 B a minibatch" in found.text


def test_a_folder_with_nothing_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {finding.grade for finding in diagnose(tmp_path)} == {"unknown"}
    diagnose_command(tmp_path, as_json=True)
    assert len(json.loads(capsys.readouterr().out)) == 7
    diagnose_command(tmp_path, as_json=False)
    assert "standstill" in capsys.readouterr().out
