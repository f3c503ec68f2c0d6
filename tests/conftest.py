"""What all tests share: one thread a process, and a capture that is not repeated for the same model."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable

import pytest
import torch

import vpipe.layout
from tests import captures
from vpipe.graph import ModelGraph

torch.set_num_threads(1)

PROCESSES = ("multiprocess", "end_to_end", "faults")
"""Folders whose tests start processes: one worker runs them all, one after the other, from one server."""
MODELS = (
    "transparency",
    "graph_transparency",
    "graph_build",
    "graph_blocks",
    "policies_runtime",
    "asynchronous",
)
"""Files (tests/unit/test_*.py) that use the whole zoo: one worker captures each model once."""
LONG = ("schedule_builders", "plan_optimal", "plan_moments", "simulate_time")


def group(item: pytest.Item) -> str:
    folder, name = item.path.parent.name, item.path.stem.removeprefix("test_")
    return "processes" if folder in PROCESSES else "models" if name in MODELS else name


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make test` gives groups of tests to two workers; xdist reads the groups as soon as all are collected."""
    if item.config.getoption("loadgroup", False):
        item.add_marker(pytest.mark.xdist_group(group(item)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long groups come first: both workers then end at about the same time."""
    order = ("processes", "models", *LONG)
    items.sort(key=lambda item: order.index(group(item)) if group(item) in order else len(order))


@pytest.fixture(scope="session")
def captured() -> Callable[..., ModelGraph]:
    """Ranks that are threads, and tests that use the same model, capture it once."""
    return captures.capture_once


@pytest.fixture
def capture_once(captured: Callable[..., ModelGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vpipe.layout, "capture", captured)
