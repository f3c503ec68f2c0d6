"""Company on the bench: processes that do the same work meanwhile, as the other ranks of a run do.

Ranks of one host share its memory bandwidth, its last cache and its power: a process alone is quicker than any of
them. The others are forks of this process, so that they have its modules and data without building them again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def company(count: int, work: Callable[[], None]) -> Iterator[None]:
    """So many other processes repeat `work` until the end of the `with`."""
    if not hasattr(os, "fork"):
        count = 0
    children = [_start(work) for _ in range(count)]
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _start(work: Callable[[], None]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        # One thread: those of the parent's pool are not here.
        torch.set_num_threads(1)
        while os.getppid() == parent:
            work()
    finally:
        os._exit(0)  # nothing of the parent's is to be ended or flushed from here
