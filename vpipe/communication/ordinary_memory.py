"""GPU memory that another process may open, in a process whose allocator has expandable segments.

Expandable segments leave fewer gaps, so the launcher asks for them (`launch/mps.py`). But memory of such a segment is
opened by taking a descriptor out of the process that owns it (pidfd_getfd), which many hosts forbid between
siblings. Memory of an ordinary segment is opened by a handle. So what is shared is made while the setting is off: then
torch's allocator leaves expandable segments alone.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from vpipe.system.environment import ALLOCATOR

_SEGMENTS = re.compile(r"(?<![^,])expandable_segments:(True|False)(?![^,])")


@contextmanager
def ordinary_memory() -> Iterator[None]:
    """What is allocated on a GPU here lies in ordinary segments."""
    settings = allocator_settings(os.environ)
    if not has_expandable_segments(settings):
        yield
        return
    _set(_SEGMENTS.sub("expandable_segments:False", settings))
    try:
        yield
    finally:
        _set(settings)


def allocator_settings(environment: Mapping[str, str]) -> str:
    """As torch reads them: the first of the variables that is there, blanks left out."""
    written = next((environment[name] for name in ALLOCATOR if name in environment), "")
    return "".join(written.split())


def has_expandable_segments(settings: str) -> bool:
    """Whether they are on: of several mentions the last holds."""
    return _SEGMENTS.findall(settings)[-1:] == ["True"]


def _set(settings: str) -> None:
    """All of them: some that are not mentioned would fall back to their defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its successor is not in every torch
        torch.cuda.memory._set_allocator_settings(settings)
