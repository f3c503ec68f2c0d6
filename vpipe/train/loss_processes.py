"""Loss curves of runs in processes of their own, of which none is left when we leave."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO, TYPE_CHECKING

from pydantic import TypeAdapter

from vpipe.config.file import read_config, resolved_yaml
from vpipe.errors import VPipeError
from vpipe.launch.rank import end_with_launcher
from vpipe.train.convergence import LossCurve, OnUpdate, train_curve

if TYPE_CHECKING:
    from vpipe.config import RunConfig

LINE_EVERY = 0.5
"""Seconds between two lines about the updates of a run: a list, where its result is an object."""


class LossProcesses:
    """So many processes at the same time, to be used in a `with` statement."""

    def __init__(self, jobs: int, device: str | None) -> None:
        self.device = device
        self._pool = ThreadPoolExecutor(jobs)  # each thread waits for a process
        self._running: set[subprocess.Popen[str]] = set()
        self._over = False
        self._changes = threading.Lock()

    def begin(self, config: RunConfig, on_update: OnUpdate) -> Future[LossCurve]:
        """Train this run when it is its turn; `on_update` is called by another thread."""
        return self._pool.submit(self._train, config, on_update)

    def __enter__(self) -> LossProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changes:
            self._over = True
            for process in self._running:
                process.kill()
        self._pool.shutdown(cancel_futures=True)

    def _train(self, config: RunConfig, on_update: OnUpdate) -> LossCurve:
        with NamedTemporaryFile("w", suffix=".yml", encoding="utf-8") as file, TemporaryFile("w+") as errors:
            file.write(resolved_yaml(config))
            file.flush()
            with self._changes:
                if self._over:
                    raise CancelledError
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, file.name, self.device or ""],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the process that asked
                )
                self._running.add(process)
            with process:
                assert process.stdout is not None
                result = _follow(process.stdout, on_update)
            with self._changes:
                self._running.remove(process)
            if process.returncode:
                errors.seek(0)
                reason = (errors.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
                raise VPipeError(f"{config.source}: the run with seed {config.seed} failed: {reason}")
        return TypeAdapter(LossCurve).validate_json(result)


def _follow(lines: IO[str], on_update: OnUpdate) -> str:
    """Report its updates; the last line."""
    line = ""
    for line in lines:
        if line.startswith("["):
            with suppress(ValueError, TypeError):  # a line of somebody else's
                on_update(*json.loads(line))
    return line


def main(path: str, device: str) -> None:
    end_with_launcher()
    said = time.monotonic()

    def report(made: int, of: int, loss: float) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_EVERY or made == of:
            said = time.monotonic()
            print(json.dumps([made, of, loss]), flush=True)

    print(json.dumps(asdict(train_curve(read_config(Path(path)), device or None, report))))


if __name__ == "__main__":
    main(*sys.argv[1:])
