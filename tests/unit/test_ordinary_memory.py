"""Memory to be shared is made without expandable segments, and everything else as the environment says."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from vpipe.communication.cuda_ipc import (
    allocator_settings,
    has_expandable_segments,
    ordinary_memory,
)
from vpipe.system.environment import ALLOCATOR


@pytest.mark.parametrize(
    ("written", "on"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("expandable_segments:False", False),
        ("max_split_size_mb:64", False),
        (" max_split_size_mb : 64 , expandable_segments : True ", True),
        ("expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]", True),
        ("roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True,backend:native", True),
        ("expandable_segments:True,expandable_segments:False", False),
        ("my_expandable_segments:True", False),
    ],
)
def test_settings_are_read_as_torch_reads_them(written: str, on: bool) -> None:
    assert has_expandable_segments(allocator_settings({"PYTORCH_ALLOC_CONF": written})) is on
    assert has_expandable_segments(allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": written})) is on


def test_the_older_variable_comes_first() -> None:
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    assert allocator_settings(both) == "backend:native"
    assert allocator_settings({}) == ""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that were made, one after the other."""
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    settings: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    return settings


def test_segments_are_off_inside_and_on_again_behind_it(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    with suppress(torch.OutOfMemoryError), ordinary_memory():
        assert made == ["max_split_size_mb:64,expandable_segments:False"]
        raise torch.OutOfMemoryError
    assert made[1:] == ["max_split_size_mb:64,expandable_segments:True"]


@pytest.mark.parametrize("written", [None, "expandable_segments:False", "max_split_size_mb:64"])
def test_nothing_is_set_where_they_are_off(
    written: str | None, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if written is not None:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", written)
    with ordinary_memory():
        pass
    assert made == []


def test_torch_takes_the_settings(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    current = torch._C._accelerator_getAllocatorSettings  # type: ignore[attr-defined]
    before = current()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        with ordinary_memory():
            assert current() == "expandable_segments:False"
        assert current() == "expandable_segments:True"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)  # type: ignore[attr-defined]
    assert not recwarn.list
