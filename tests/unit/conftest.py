"""Checkpoints to look at and to damage."""

import shutil
from pathlib import Path

import pytest

from tests.checkpoints import alone
from tests.examples import example
from vpipe import Pipeline, checkpoint


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
