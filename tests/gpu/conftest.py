"""Tests that need a GPU: skipped, saying why, where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.multiprocess.pool import Pool
from vpipe.stage.host_store import LEAST, PinnedStore


@pytest.fixture(autouse=True)
def _least(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `tasks.train` swaps of small models, ranks that are threads leave set for all tests of the process."""
    monkeypatch.setattr(PinnedStore, "least", LEAST)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool(forked=False)
    try:
        yield made
    finally:
        made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch finds none here"))
