"""What `vpipe profile` does."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from vpipe.cost import Profile, write_profile
from vpipe.files import read_json
from vpipe.host_memory import cores
from vpipe.simulate.report import duration
from vpipe.sizes import show_bytes

if TYPE_CHECKING:
    from vpipe.config import RunConfig


def profile_command(config: RunConfig, output: Path, as_json: bool) -> None:
    """Measure the configured model as one rank of its run would run it, and write the profile to `output`."""
    from vpipe.tables import show

    profile = profile_config(config)
    write_profile(profile, output)
    if as_json:
        print(json.dumps(read_json(output)))
    else:
        show(profile_table(profile))
        print(f"profile {output}")


def profile_config(config: RunConfig) -> Profile:
    import torch

    from vpipe.device import choose_device
    from vpipe.models import build_model
    from vpipe.profile.model import profile_model
    from vpipe.weights import optimizer_factory

    place = choose_device(None, 0)
    before = torch.get_num_threads()
    share = max(1, int(cores()) // config.ranks)  # the threads that the launcher gives a rank
    threads = int(os.environ.get("OMP_NUM_THREADS", share))
    torch.set_num_threads(threads)
    # As many processes of one thread as the other ranks have threads, and as there are cores for.
    company = max(0, min(config.ranks * threads, int(cores())) - threads)
    try:
        model, batch, loss_fn = build_model(config, "meta")
        profile = profile_model(
            model,
            batch,
            loss_fn,
            optimizer=optimizer_factory(config.optimizer, config.learning_rate, config.weight_decay),
            precision=config.precision,
            compile="inductor" if config.compile else None,
            company=0 if place.type == "cuda" else company,  # CUDA does not survive a fork
            place=place,
        )
    finally:
        torch.set_num_threads(before)
    if place.type == "cuda":
        shared_by = ranks_of_a_gpu(config, torch.cuda.device_count())
        profile = replace(profile, device=replace(profile.device, shared_by=shared_by))
    return profile


def ranks_of_a_gpu(config: RunConfig, gpus: int) -> int:
    """The most that share one and its link to the host: as `machines` says, or one after the other."""
    if config.machines is not None:
        return max(Counter(config.machines).values())
    return -(-config.ranks // gpus)


def profile_table(profile: Profile) -> Table:
    blocks = profile.blocks
    step = sum(block.forward + block.backward for block in blocks)
    title = (
        f"{len(blocks)} blocks, minibatches of {profile.batch_size}: {duration(step)} forward and backward"
    )
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("block", justify="right")
    table.add_column("name", overflow="fold")
    for column in ("forward", "input gradient", "weight gradient", "update", "spread"):
        table.add_column(column, justify="right")
    for column in ("kept", "boundary", "parameters"):
        table.add_column(column, justify="right")
    for index, block in enumerate(blocks):
        times = (block.forward, block.input_gradient, block.weight_gradient, block.update)
        sizes = (block.kept_bytes, block.boundary_bytes, block.parameter_bytes)
        table.add_row(
            str(index),
            block.name,
            *map(duration, times),
            f"{block.spread:.0%}",
            *(show_bytes(count) for count in sizes),
        )
    device, link = profile.device, profile.link
    table.caption = (
        f"device {show_bytes(device.memory)}, to the host {show_bytes(device.to_host)}/s, "
        f"back {show_bytes(device.from_host)}/s; "
        f"link {show_bytes(link.bandwidth)}/s, {duration(link.latency)}; an action {duration(device.overhead)}; "
        f"optimizer {profile.optimizer_ratio:g} bytes for each byte of parameters"
    )
    return table
