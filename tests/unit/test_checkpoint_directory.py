"""Checkpoints side by side: which ones count, which ones stay."""

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.checkpoints import rewrite
from vpipe import checkpoint
from vpipe.errors import VPipeError


def test_leftovers_of_crashes_are_not_seen_and_pruned(saved: Path) -> None:
    shutil.copytree(saved / "step-00000002", saved / ".step-00000003.tmp-ab12")
    shutil.copytree(saved / "step-00000001", saved / ".step-00000001.old-ab12")
    assert checkpoint.newest(saved) == saved / "step-00000002"
    deleted = checkpoint.prune(saved, keep=1)
    assert {path.name for path in saved.iterdir()} == {"step-00000002"}
    assert len(deleted) == 3


def test_one_that_was_moved_aside_counts_until_its_successor_is_there(saved: Path) -> None:
    aside = (saved / "step-00000002").rename(saved / ".step-00000002.old-ab12")
    assert checkpoint.newest(saved) == aside
    checkpoint.prune(saved, keep=1)
    assert [path.name for path in saved.iterdir()] == [aside.name]


def test_damaged_ones_do_not_count_as_kept(saved: Path) -> None:
    (saved / "step-00000002" / "stage-000.safetensors").unlink()
    assert checkpoint.prune(saved, keep=1) == []
    with pytest.raises(VPipeError, match="keep is 0"):
        checkpoint.prune(saved, keep=0)


def with_losses(directory: Path, losses: dict[int, object]) -> None:
    """Copies of a checkpoint, as if saved at these updates with these evaluation losses."""
    for updates, loss in losses.items():
        path = directory / f"step-{updates:08d}"
        if not path.exists():
            shutil.copytree(directory / "step-00000002", path)
        rewrite(path, lambda c, reported=loss: c.update(extra={checkpoint.EVALUATION: reported}))


def test_the_best_stays_beside_the_newest(saved: Path) -> None:
    with_losses(saved, {1: 3.0, 2: 2.0, 3: float("nan"), 4: 2.5, 5: None, 6: 2.0, 7: 2.75})
    deleted = checkpoint.prune(saved, keep=1)
    assert [path.name for path in checkpoint.checkpoints(saved)] == ["step-00000006", "step-00000007"]
    assert len(deleted) == 5
    with_losses(saved, {6: 2.8})
    checkpoint.prune(saved, keep=1)  # the newest is the best
    assert [path.name for path in checkpoint.checkpoints(saved)] == ["step-00000007"]


def test_what_may_still_be_written_is_left_alone(saved: Path) -> None:
    for token in ("ab12", "cd34"):
        shutil.copytree(saved / "step-00000002", saved / f".step-00000003.tmp-{token}")
    old = time.time() - 7200
    for path in (saved / ".step-00000003.tmp-ab12").iterdir():
        os.utime(path, (old, old))
    os.utime(saved / ".step-00000003.tmp-ab12", (old, old))
    deleted = checkpoint.prune(saved, keep=2, unfinished_after=3600)
    assert [path.name for path in deleted] == [".step-00000003.tmp-ab12"]


def test_what_is_to_be_spared_stays(saved: Path) -> None:
    assert checkpoint.prune(saved, keep=1, spare=[saved / "step-00000001"]) == []
