"""Weights & Biases and MLflow: the metrics of a run, sent there by rank 0 as they are written to metrics.jsonl.

Each has a thread of its own, in which all of its calls are made: a server that is slow or gone costs the training
nothing but what could not be sent, which is counted (`BestEffort`).
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from vpipe.errors import ConfigError
from vpipe.system.best_effort import BestEffort

WAITING = 1000
"""Metrics at most that wait to be sent; further ones are lost."""
END_LIMIT = 30.0
"""Seconds that the end of a run waits for what is still to be sent."""
LONGEST = 500
"""Letters of a parameter that MLflow accepts."""


class WandbSession:
    """One run of a project of Weights & Biases."""

    def __init__(self, project: str, folder: Path, keys: Mapping[str, str]) -> None:
        self._run = import_module("wandb").init(
            project=project, name=folder.name, dir=str(folder), config=dict(keys)
        )

    def send(self, update: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=update)

    def end(self) -> None:
        self._run.finish()


class MlflowSession:
    """One run of an experiment of MLflow."""

    def __init__(self, experiment: str, folder: Path, keys: Mapping[str, str]) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment(experiment)
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params({key: value[:LONGEST] for key, value in keys.items()})

    def send(self, update: int, figures: dict[str, float]) -> None:
        # A name may have letters, digits, spaces and these: _ - . /
        named = {re.sub(r"[^\w\-./ ]", "", name): value for name, value in figures.items()}
        self._mlflow.log_metrics(named, step=update)

    def end(self) -> None:
        self._mlflow.end_run()


Session = WandbSession | MlflowSession
SESSIONS: dict[str, Callable[[str, Path, Mapping[str, str]], Session]] = {
    "wandb": WandbSession,
    "mlflow": MlflowSession,
}
"""By the key of the configuration, which is also the name of the module."""


def check_trackers(source: Path, chosen: Mapping[str, str | None]) -> None:
    """Raise if a key names a project, and its package is not installed."""
    for key, project in chosen.items():
        if project is not None and find_spec(key) is None:
            raise ConfigError(
                f"{source}: {key} is {project!r}, and the package {key} is not installed here: pip install {key}, or "
                f"leave the key out"
            )


def start_trackers(
    chosen: Mapping[str, str | None], folder: Path, keys: Mapping[str, str], effort: BestEffort
) -> list[Tracker]:
    """One for each key that names a project."""
    return [
        Tracker(key, project, folder, keys, effort) for key, project in chosen.items() if project is not None
    ]


class Tracker:
    def __init__(
        self, key: str, project: str, folder: Path, keys: Mapping[str, str], effort: BestEffort
    ) -> None:
        self._key, self._effort = key, effort
        self._waiting: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(
            target=self._work, args=(project, folder, keys), name=f"vpipe {key}", daemon=True
        )
        self._thread.start()

    def write(self, update: int, named: Iterable[tuple[str, float]]) -> None:
        try:
            self._waiting.put_nowait((update, dict(named)))
        except queue.Full:
            self._effort.lost(f"{self._key}: {WAITING} metrics wait to be sent already")

    def close(self) -> None:
        with suppress(queue.Full):
            self._waiting.put(None, timeout=END_LIMIT)
        self._thread.join(END_LIMIT)
        if self._thread.is_alive():
            self._effort.lost(f"{self._key}: it did not take the last metrics within {END_LIMIT:g} s")

    def _work(self, project: str, folder: Path, keys: Mapping[str, str]) -> None:
        session: Session | None = None
        try:
            session = SESSIONS[self._key](project, folder, keys)
        except BaseException as error:  # not logged in, no server: wandb leaves with an exception of its own
            self._lose(error)
        while (metrics := self._waiting.get()) is not None:
            if session is not None:
                try:
                    session.send(*metrics)
                except Exception as error:
                    self._lose(error)
        try:
            if session is not None:
                session.end()
        except Exception as error:
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        text = " ".join(str(error).split())[:200]
        self._effort.lost(f"{self._key}: {type(error).__name__}: {text}")
