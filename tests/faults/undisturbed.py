"""The runs that are attacked, and their weights if nobody disturbs them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.outside import Job
from tests.faults.runs import final_weights, write_config
from tests.faults.strikes import GLOO, LIMIT
from tests.own_schedule import OWN
from vpipe.schedule import KINDS

HANG = 120.0
"""Seconds within which a run trains again or has ended, whatever else this machine does."""
UPDATES = 60
TABLE = "own.csv"
"""A schedule that a user wrote."""


def lineage(folder: Path, asked: Sequence[int]) -> tuple[int, ...]:
    """Of the updates after which it was asked to end, those from which it was resumed."""
    logs = [run / "output.log.0" for run in sorted(folder.glob("runs/2*"))]
    text = "".join(log.read_text(errors="replace") for log in logs if log.exists())
    resumed = [int(n) for n in re.findall(r"resumed from \S+ after (\d+) updates", text)]
    kept: list[int] = []
    for number in resumed:
        kept = [other for other in kept if other < number] + [number]
    return tuple(number for number in kept if number in asked)


def ranks_of(schedule: str, channel: str) -> int:
    """Three, but two hosts have a rank each, and the model is too small for six stages."""
    chunked = schedule in KINDS and KINDS[schedule].chunks > 1
    return 2 if channel == GLOO or chunked or schedule == TABLE else 3


def make_folder(folder: Path, schedule: str, ranks: int) -> None:
    folder.mkdir()
    (folder / TABLE).write_text(OWN + "\n")
    keys: dict[str, Any] = {
        "schedule": schedule,
        "max_updates": UPDATES,
        "epochs": 1000,
        "checkpoint_interval": 4,
    }
    keys |= {
        "print_frequency": 1,
        "heartbeat_limit": LIMIT,
        "rendezvous_limit": 30,
        "evaluation_interval": 15,
    }
    # No `machines`: ranks may be put on two hosts.
    write_config(folder, ranks, machines=None, stages=ranks, **keys)


def leave_out_last_evaluation() -> None:
    """For a process and the ranks that are forked from it: as if the run had been asked to end where it ends.

    Only a run that ends by itself evaluates there, and counts from there to its next evaluation, which drains the
    pipeline.
    """
    from vpipe.train.trainer import Trainer

    evaluate = Trainer._evaluate

    def evaluate_before_the_end(trainer: Trainer, *rest: Any) -> None:
        if trainer.pipe.updates < trainer.position.updates:
            evaluate(trainer, *rest)

    Trainer._evaluate = evaluate_before_the_end  # type: ignore[method-assign]


class References:
    """Weights of runs that nobody has struck."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[Any, ...], dict[str, str]] = {}

    def weights(self, schedule: str, ranks: int, asked: tuple[int, ...]) -> dict[str, str]:
        """After all updates. To end and be resumed changes nothing, but where the pipeline is drained for it."""
        if schedule in KINDS and KINDS[schedule].synchronous:
            asked = ()
        key = (schedule, ranks, asked)
        if key not in self._known:
            folder = self.folder / f"clean{len(self._known)}"
            make_folder(folder, schedule, ranks)
            for updates in (*asked, UPDATES):
                prepare = None if updates == UPDATES else leave_out_last_evaluation
                options = ("--resume", "auto", "--set", f"max_updates={updates}")
                job = Job(folder, *options, prepare=prepare)
                try:
                    assert job.wait_for_end(2 * HANG), job.output()
                    assert job.codes == [0], job.output()
                finally:
                    job.kill()
            self._known[key] = final_weights(job.runs[-1])
        return self._known[key]
