"""A device that several ranks share, on the bench: one of them measures alone, then all at once.

    alone     rank 0 ▪▪▪▪▪▪▪▪      the others wait; the link to the host and that to a peer are measured then too
    together  rank 0   ▪▪▪▪▪▪▪▪    ▪: rounds that count
              rank 1 ············  the others begin before and end after

Ranks of one GPU have multiprocessors of their own, but its memory and its power they share: a block takes longer while
the others compute. The profile has the times of that, and how much longer they are (`DeviceCost.crowding`). Blocks come
as often as in the model: what they take of memory and of power differs, and with it what they leave to others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vpipe.communication import World
from vpipe.cost import Profile, read_profile, write_profile
from vpipe.profile.device import measure_device
from vpipe.profile.links import measure_link
from vpipe.profile.model import ModelBench

MARGIN = 1.0
"""Seconds that the others work before rank 0 measures, and after it."""


def profile_together(world: World, bench: ModelBench, file: Path, seconds: float = 5.0) -> Profile:
    """What rank 0 measures while all ranks of the world work on this device; it writes it to `file`."""
    world.all_gather("at the bench", None)
    if world.rank == 0:
        device, link = measure_device(bench.place), measure_link(bench.place)
    world.all_gather("on the bench", None)
    bench.round()  # what is compiled, or recorded, is so before anybody waits for it
    world.all_gather("warm", None)
    alone: Profile | None = None
    if world.rank == 0:
        bench.work_for(seconds / 4)
        bench.forget()
        bench.work_for(seconds / 2)
        alone = bench.profile(device, link)
    world.all_gather("measured alone", None)
    if world.size > 1:
        bench.begin_at(world.rank / world.size)
        bench.work_for(MARGIN)
        bench.forget()
        bench.work_for(seconds)
        if world.rank != 0:
            bench.work_for(MARGIN)
    world.all_gather("measured together", None)
    bench.swap()
    if alone is not None:
        write_profile(_shared(alone, bench.profile(device, link), world.size), file)
    world.all_gather("written", None)
    return read_profile(file)


def _shared(alone: Profile, together: Profile, ranks: int) -> Profile:
    crowding = _seconds(together) / _seconds(alone) if _seconds(alone) else 1.0
    device = replace(
        together.device,
        memory=together.device.memory // ranks,
        shared_by=ranks,
        crowding=max(1.0, round(crowding, 4)),
        adding=together.device.adding * max(1.0, crowding),
    )
    return replace(together, device=device)


def _seconds(profile: Profile) -> float:
    return sum(block.forward + block.backward for block in profile.blocks)
