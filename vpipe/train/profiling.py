"""The measurement of a configured model: on a GPU by as many processes as ranks share it, each with its share of it.

They are started, watched and ended as the ranks of a run are, with the command `vpipe profile`: in a process that is a
rank it measures together with the other ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vpipe.config.arguments import make_optimizer_factory
from vpipe.config.file import resolved_yaml
from vpipe.cost import Profile, read_profile
from vpipe.errors import VPipeError
from vpipe.launch.local import Ranks, run_ranks_here
from vpipe.launch.meeting import MEETING
from vpipe.launch.mps import gpus_of
from vpipe.launch.rank import LAUNCHED, LAUNCHER, end_with_launcher, start_heartbeat
from vpipe.record.whereabouts import VARIABLE as PAGE
from vpipe.system.console import announce, inform, progress
from vpipe.system.environment import DEVICE, GPU_SHARE, IDLE, LISTENER, PROFILE_NAME, SECRET
from vpipe.system.faults import ATTEMPT
from vpipe.system.files import write_text
from vpipe.system.host_memory import cores, keep_freed_memory
from vpipe.system.start import VARIABLE as PHASES
from vpipe.train.preload import preparation

if TYPE_CHECKING:
    from vpipe.communication import World
    from vpipe.config import RunConfig
    from vpipe.profile.model import MeasuredModel


def profile_by_ranks(config: RunConfig, count: int, gpus: Sequence[int] | None) -> Profile:
    """Measured by so many processes at once, which share the GPU as the ranks of a run do."""
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
                ["profile"] * count,
                quiet=True,
                heartbeat_limit=config.heartbeat_limit,
                patience=config.timeout,
                gpus=gpus,
                prepare=preparation(config),
            )
        )
        return read_profile(output)


def measure_as_rank(config: RunConfig, output: Path) -> None:
    """The work of one of these processes; the first writes the profile."""
    end_with_launcher()
    from vpipe.communication import ProcessWorld
    from vpipe.profile.contention import profile_shared_device

    start_heartbeat()
    profile_shared_device(ProcessWorld(timeout=config.timeout), measured_model(config), output)


def measure_before_training(world: World, config: RunConfig, output: Path) -> None:
    """By the ranks of a run, which all share one GPU. The first writes the profile, and all have their memory again."""
    from vpipe.profile.contention import profile_shared_device
    from vpipe.system.device import choose_device
    from vpipe.system.device_memory import release_memory

    profile_shared_device(world, measured_model(config), output)
    release_memory(choose_device(None, 0))


def measured_model(config: RunConfig) -> MeasuredModel:
    from vpipe.profile.model import MeasuredModel
    from vpipe.system.device import choose_device
    from vpipe.train.workload import build_workload

    work = build_workload(config, "meta")
    return MeasuredModel(
        work.model,
        work.batch,
        work.loss_fn,
        optimizer=make_optimizer_factory(config),
        precision=config.precision,
        chunked_loss=config.chunked_loss,
        compile="inductor" if config.compile else None,
        cuda_graphs=config.cuda_graphs,
        predict=config.remedies.predict,
        place=choose_device(None, 0),
    )


def profile_config(config: RunConfig) -> Profile:
    """Measured in this process, or on a GPU by as many processes as ranks share it."""
    gpus = gpus_of(config)
    announce(f"{config.source}: measuring the blocks of the model, this machine and its links")
    if gpus is None:
        return profile_here(config)
    ((gpu, sharing),) = Counter(gpus).most_common(1)
    profile = profile_by_ranks(config, sharing, [gpu] * sharing)
    if profile.device.eager_kinds:
        inform(
            f"{config.source}: {profile.device.eager_kinds} kinds of blocks were measured without CUDA graphs, which "
            "found no memory"
        )
    return profile


def profile_here(config: RunConfig) -> Profile:
    import torch

    keep_freed_memory()  # as the ranks of a run do
    before = torch.get_num_threads()
    share = max(1, int(cores()) // config.ranks)  # the threads that the launcher gives a rank
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", share)))
    try:
        with progress() as report:
            report(0.0, "capturing the model")
            return measured_model(config).measure(ranks=config.ranks, report=report)
    finally:
        torch.set_num_threads(before)


def profile_in_own_process(config: RunConfig) -> Profile:
    """Measured by a command of its own: for a rank, which has threads and is to take its device later."""
    with TemporaryDirectory(prefix="vpipe-profile-") as name:
        described, output = Path(name, "config.yml"), Path(name, "profile.json")
        write_text(described, resolved_yaml(config))
        command = [sys.executable, "-m", "vpipe", "profile", str(described), "--output", str(output)]
        done = subprocess.run(
            command,
            env=_without_rank(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
            raise VPipeError(f"{config.source}: its model cannot be measured: {last}")
        return read_profile(output)


def _without_rank() -> dict[str, str]:
    """The environment without what makes a process a rank of this run."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    names |= {LAUNCHED, LAUNCHER, SECRET, LISTENER, IDLE, MEETING, PAGE, PHASES, ATTEMPT, PROFILE_NAME}
    if GPU_SHARE in os.environ:  # then the launcher has chosen the device
        names |= {DEVICE, GPU_SHARE}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {name: value for name, value in kept.items() if not name.startswith("TORCHELASTIC_")}
