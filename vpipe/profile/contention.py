"""Contention while a model is measured: other processes do the same work, as the other ranks of a run do.

Ranks of one host share its memory bandwidth, its last cache and its power, and ranks of one GPU its memory and its
power: each of them is slower than a rank alone. On the CPU the others are forks of the process that measures, which
have its modules and data without building them again. On a GPU they are ranks, of which the first measures:

    alone   rank 0 ▪▪▪▪▪▪▪▪      the others wait; the links to the host and to a peer are measured then too
    shared  rank 0   ▪▪▪▪▪▪▪▪    ▪: rounds that count
            rank 1 ············  the others start before and stop after

All ranks have minibatches of one size at a time, as in a run: with small ones the device has pauses, in which it would
slow nobody down who measures large ones.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vpipe.communication import World
from vpipe.cost import Profile, read_profile, write_profile
from vpipe.profile.device import measure_device
from vpipe.profile.links import measure_link

if TYPE_CHECKING:
    from vpipe.profile.model import MeasuredModel

MARGIN = 0.5
"""Seconds that the other ranks work before rank 0 measures, and after it."""


@contextmanager
def busy_processes(count: int, work: Callable[[], None]) -> Iterator[None]:
    """So many forks of this process repeat `work` until the end of the `with`."""
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
        os._exit(0)  # nothing of the parent's may be closed or flushed from here


def profile_shared_device(world: World, model: MeasuredModel, file: Path, seconds: float = 5.0) -> Profile:
    """The times of rank 0 while all ranks of the world work on this device; it writes the profile to `file`.

    Kinds of blocks come as often as in the model: they differ in the memory bandwidth and power that they leave to
    other ranks.
    """
    world.all_gather("profile: before the links", None)
    if world.rank == 0:
        # Ranks of one card are connected by CUDA IPC.
        nccl = world.size == 1 or torch.cuda.device_count() > 1
        device, link = measure_device(model.place, nccl=nccl), measure_link(model.place)
    world.all_gather("profile: before the first round", None)
    model.warm()  # compiles, or captures graphs, before anybody waits for it
    world.all_gather("profile: warm", None)
    alone: Profile | None = None
    if world.rank == 0:
        model.run_for(seconds / 4, whole=False, size=0)
        model.clear()
        model.run_for(seconds / 2, size=0)
        alone = model.profile(device, link)
    world.all_gather("profile: measured alone", None)
    share, margin = world.rank / world.size, MARGIN if world.size > 1 else 0.0
    for size in range(0 if world.size > 1 else 1, model.sizes):
        model.run_for(margin, share, whole=False, size=size)
        model.clear(size)
        model.run_for(seconds / model.sizes, share, size=size)
        if world.rank != 0:
            model.run_for(margin, share, whole=False, size=size)
        world.all_gather(f"profile: measured size {size}", None)
    model.measure_host()
    if alone is not None:
        write_profile(_with_contention(alone, model.profile(device, link), world.size), file)
    world.all_gather("profile: written", None)
    return read_profile(file)


def _with_contention(alone: Profile, shared: Profile, ranks: int) -> Profile:
    factor = max(1.0, _seconds(shared) / _seconds(alone))
    device = replace(
        shared.device,
        memory=shared.device.memory // ranks,
        shared_by=ranks,
        crowding=round(factor, 4),
        adding=shared.device.adding * factor,
    )
    return replace(shared, device=device)


def _seconds(profile: Profile) -> float:
    return sum(block.forward + block.backward for block in profile.blocks)
