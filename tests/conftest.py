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


@pytest.fixture(scope="session")
def captured() -> Callable[..., ModelGraph]:
    """Ranks that are threads, and tests that use the same model, capture it once."""
    return captures.capture_once


@pytest.fixture
def capture_once(captured: Callable[..., ModelGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vpipe.layout, "capture", captured)
