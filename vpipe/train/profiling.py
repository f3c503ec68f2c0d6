"""A configured model on the bench: by processes of their own, as many as ranks share a GPU, each with its share of it.

They are started as the ranks of a run are, watched and ended with it: by `vpipe profile` of the run's configuration,
which a rank reads as "measure with the others".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vpipe.config.arguments import make_optimizer_factory
from vpipe.config.file import resolved_yaml
from vpipe.cost import Profile, read_profile
from vpipe.launch.local import Ranks, run_ranks_here
from vpipe.launch.mps import gpus_of
from vpipe.launch.rank import end_with_launcher, start_heartbeat
from vpipe.system.files import write_text
from vpipe.system.host_memory import cores

if TYPE_CHECKING:
    from vpipe.config import RunConfig
    from vpipe.profile.model import ModelBench


def profile_by_ranks(config: RunConfig, count: int, gpus: Sequence[int] | None) -> Profile:
    """So many processes measure at once, each with its share of the GPU, as the ranks of a run; they end with it."""
    with TemporaryDirectory(prefix="vpipe-profile-") as name:
        folder = Path(name)
        described, output = folder / "config.yml", folder / "profile.json"
        write_text(described, resolved_yaml(config))
        arguments = ["profile", str(described), "--output", str(output)]
        run_ranks_here(
            Ranks(
                arguments,
                count,
                folder,
                ["the bench"] * count,
                quiet=True,
                heartbeat_limit=config.heartbeat_limit,
                patience=config.timeout,
                gpus=gpus,
            )
        )
        return read_profile(output)


def measure_as_rank(config: RunConfig, output: Path) -> None:
    """One of these processes: the first writes what it has measured."""
    end_with_launcher()
    from vpipe.communication import ProcessWorld
    from vpipe.profile.together import profile_together

    start_heartbeat()
    profile_together(ProcessWorld(timeout=config.timeout), bench_of(config), output)


def bench_of(config: RunConfig) -> ModelBench:
    from vpipe.profile.model import ModelBench
    from vpipe.system.device import choose_device
    from vpipe.train.models import build_model

    place = choose_device(None, 0)
    model, batch, loss_fn = build_model(config, "meta")
    return ModelBench(
        model,
        batch,
        loss_fn,
        optimizer=make_optimizer_factory(config),
        precision=config.precision,
        compile="inductor" if config.compile else None,
        cuda_graphs=config.cuda_graphs,
        place=place,
    )


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
