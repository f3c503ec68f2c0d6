"""Checkpoints to look at and to damage; the pipeline against the plain model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.both_ways import Check
from tests.checkpoints import alone
from tests.examples import example
from vpipe import Pipeline, checkpoint
from vpipe.graph import ModelGraph


@pytest.fixture(scope="session")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints side by side."""
    directory = tmp_path_factory.mktemp("runs")
    tiny = example("sequential", layers=2)

    def work(pipe: Pipeline) -> None:
        for _ in range(2):
            for _ in pipe.train([tiny[1]]):
                pass
            checkpoint.save(pipe, directory, {"position": pipe.updates})

    alone(work, tiny)
    return directory


@pytest.fixture
def saved(two_steps: Path, tmp_path: Path) -> Path:
    """A copy of them that may be damaged."""
    return Path(shutil.copytree(two_steps, tmp_path / "runs"))


@pytest.fixture(scope="session")
def checker(captured: Callable[..., ModelGraph]) -> Check:
    return Check(captured)


@pytest.fixture
def check_synchronous(checker: Check, capture_once: None) -> Check:
    """Trains both ways and compares; what the plain model comes to is kept for other tests."""
    return checker
