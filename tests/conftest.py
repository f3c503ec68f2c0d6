"""What all tests share: one thread a process, and a capture that is not repeated for the same model."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable

import pytest
import torch

import vpipe.layout
from tests import captures, drawing
from vpipe.graph import ModelGraph

torch.set_num_threads(1)
drawing.load_profile()

LONG = (
    "end_to_end/test_train.py",
    "unit/test_transparency.py",
    "unit/test_graph_blocks.py",
    "unit/test_policies_runtime.py",
    "multiprocess/test_schedules.py",
    "unit/test_asynchronous.py",
    "unit/test_graph_build.py",
    "unit/test_plan_optimal.py",
    "faults/test_network.py",
    "faults/test_supervision.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` gives files to two workers, the long ones first: both then end at about the same time."""
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(f"{item.path.parent.name}/{item.path.name}", len(order)))


@pytest.fixture(scope="session")
def captured() -> Callable[..., ModelGraph]:
    """Ranks that are threads, and tests that use the same model, capture it once."""
    return captures.capture_once


@pytest.fixture
def capture_once(captured: Callable[..., ModelGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vpipe.layout, "capture", captured)
