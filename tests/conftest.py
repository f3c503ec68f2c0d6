"""What all tests share: one thread a process, and a capture that is not repeated for the same model object."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vpipe.layout
from vpipe.graph import ModelGraph, capture

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def captured() -> Callable[..., ModelGraph]:
    """Ranks that are threads, and tests that use the same model, capture it once."""
    made: dict[int, tuple[ModelGraph, nn.Module]] = {}

    def once(model: nn.Module, example_batch: Any, loss_fn: Any = None) -> ModelGraph:
        if id(model) not in made:
            made[id(model)] = (capture(model, example_batch, loss_fn), model)
        return made[id(model)][0]

    return once


@pytest.fixture
def capture_once(captured: Callable[..., ModelGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vpipe.layout, "capture", captured)
