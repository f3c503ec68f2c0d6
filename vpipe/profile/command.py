"""What `vpipe profile` does."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from vpipe.cost import Profile, write_profile
from vpipe.files import read_json
from vpipe.host_memory import cores
from vpipe.launch import LAUNCHED, gpus_of
from vpipe.profile.by_ranks import bench_of, measure_as_rank, profile_by_ranks
from vpipe.simulate.report import duration
from vpipe.sizes import show_bytes

if TYPE_CHECKING:
    from vpipe.config import RunConfig


def profile_command(config: RunConfig, output: Path, as_json: bool) -> None:
    """Measure the configured model as one rank of its run would run it, and write the profile to `output`."""
    if LAUNCHED in os.environ:
        measure_as_rank(config, output)
        return
    from vpipe.tables import show

    profile = profile_config(config)
    write_profile(profile, output)
    if as_json:
        print(json.dumps(read_json(output)))
    else:
        show(profile_table(profile))
        print(f"profile {output}")


def profile_config(config: RunConfig) -> Profile:
    """Measured here, or on a GPU by processes of their own, as many as ranks share it."""
    gpus = gpus_of(config)
    if gpus is None:
        return profile_here(config)
    ((gpu, sharing),) = Counter(gpus).most_common(1)
    return profile_by_ranks(config, sharing, [gpu] * sharing)


def profile_here(config: RunConfig) -> Profile:
    import torch

    before = torch.get_num_threads()
    share = max(1, int(cores()) // config.ranks)  # the threads that the launcher gives a rank
    threads = int(os.environ.get("OMP_NUM_THREADS", share))
    torch.set_num_threads(threads)
    # As many processes of one thread as the other ranks have threads, and as there are cores for.
    company = max(0, min(config.ranks * threads, int(cores())) - threads)
    try:
        bench = bench_of(config)
        # CUDA does not survive the fork that brings company.
        return bench.measure(company=0 if bench.place.type == "cuda" else company)
    finally:
        torch.set_num_threads(before)


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
