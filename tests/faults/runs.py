"""Small real runs with a fault in them, and what is measured of them."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.command import Ended, alive, end, start
from tests.end_to_end.tiny import MODEL
from vpipe.communication import heartbeat
from vpipe.launch import local, watch
from vpipe.launch import rank as supervised

PATIENCE = 200.0
SMALL: dict[str, Any] = MODEL | {
    "synthetic_data": True,
    "schedule": "vpipe",
    "learning_rate": 0.003,
    "max_updates": 12,
    "checkpoint_interval": 3,
    "evaluation_samples": 4,
    "max_samples": 128,
    "timeout": 600,
}


@dataclass(frozen=True)
class Measured:
    """Seconds count from the fault; `recover` and `lost` only where the run was restarted."""

    rank: int
    point: str
    kind: str
    struck: bool
    code: int
    detect: float | None = None
    exit: float | None = None
    recover: float | None = None
    lost: int | None = None
    how: str = ""
    named: bool = False
    """Every log names this rank, with its stage and where it was."""
    clean: bool = False
    """No process, shared memory or half checkpoint is left, and weights are those of the run without a fault."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def write_config(folder: Path, ranks: int, **keys: Any) -> None:
    machines = [f"localhost:{rank}" for rank in range(ranks)]
    (folder / "run.yml").write_text(yaml.safe_dump(SMALL | {"machines": machines} | keys))


def be_patient() -> None:
    """For a process and the ranks that are forked from it: who ends waits as long as it takes to hear why.

    A machine may be so busy that the seconds which are given for that would be over. `make faults` leaves them alone.
    """
    heartbeat.REASON_WAIT = heartbeat.EXIT_WAIT = PATIENCE
    supervised.SIGNAL_LIMIT = local.GRACE = supervised.REASON_WAIT = watch.FOLLOWER_WAIT = PATIENCE


def train(
    folder: Path,
    fault: str = "",
    *options: object,
    timeout: float = 300,
    look: Callable[[int], None] = lambda launcher: None,
    prepare: Callable[[], None] | None = None,
) -> tuple[Ended, Path]:
    """Run it to its end; what it said, and the folder of the run. `look` is called each second.

    `prepare` is called in the launcher's process, before anything else.
    """
    before = set(folder.glob("runs/2*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPIPE_FAULT", fault)
        process = start("train", "run.yml", *options, cwd=folder, new=False, prepare=prepare)
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                out, err = process.communicate(timeout=1.0)
                break
            look(process.pid)
        else:
            raise AssertionError(f"the run did not end within {timeout:g} s")
    finally:
        end(process)
    assert process.returncode is not None
    (run,) = set(folder.glob("runs/2*")) - before
    return Ended(process.returncode, out, err), run


def final_weights(run: Path) -> dict[str, str]:
    """The hashes of the last checkpoint's files."""
    manifest = json.loads((max((run / "checkpoints").glob("step-*")) / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


def failures(run: Path) -> list[dict[str, Any]]:
    path = run / "failures.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def shared_memory() -> set[str]:
    """Names of shared memory; semaphores of Python's pools come and go with the tests themselves."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def half_done(run: Path) -> list[str]:
    """Checkpoints that are not whole."""
    return [path.name for path in (run / "checkpoints").glob(".step-*")]


def measure(
    folder: Path, ranks: int, fault: dict[str, Any], weights: dict[str, str] | None = None
) -> Measured:
    """Run with a fault. With the weights of a run without one, it is restarted and must end with the same."""
    rank, point, kind = fault["rank"], fault["point"], fault["kind"]
    shared = shared_memory()
    text = ",".join(f"{key}={value}" for key, value in fault.items())
    ended, run = train(folder, text, *(() if weights is None else ("--max-restarts", 1)))
    logs = [(run / f"output.log.{r}").read_text() for r in range(ranks)]
    struck = re.search(rf"VPIPE_FAULT: {kind} at {point}, ([0-9.]+)", logs[rank])
    reported = failures(run)
    if struck is None or not reported:
        return Measured(rank, point, kind, struck is not None, ended.code)
    at, first = float(struck[1]), reported[0]
    place = fault.get("step", fault.get("minibatch"))
    back = next((line["recovered"] for line in reported if "recovered" in line), None)
    resumed = re.search(r"resumed from .* after (\d+) updates", logs[0])
    verdict = f"rank {rank} failed: {first['how']}"
    others = [log for r, log in enumerate(logs) if r != rank]
    clean = not alive(str(folder)) and not shared_memory() - shared
    if weights is not None:
        clean = clean and ended.code == 0 and final_weights(run) == weights and not half_done(run)
    return Measured(
        rank,
        point,
        kind,
        True,
        ended.code,
        detect=round(first["found"] - at, 2),
        exit=round(first["ended"] - at, 2),
        recover=None if back is None else round(back - at, 2),
        lost=None
        if weights is None or not place
        else place - int(resumed[1] if resumed and back is not None else 0),
        how=first["how"],
        named=first["rank"] == rank
        and f"stage {rank}" in first["how"]
        and verdict in ended.err
        # At the very end the others may have ended well already.
        and (point == "shutdown" or all(f"stopped because {verdict}" in log for log in others)),
        clean=clean,
    )
