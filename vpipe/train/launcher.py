"""The launcher of a run: it plans where that is left to it, starts the ranks, and waits for them to end."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.config.file import AUTO, with_plan
from vpipe.errors import ConfigError, RankFailedError, Stopped, VPipeError
from vpipe.launch.facts import host_facts
from vpipe.launch.hosts import Host, hosts_of
from vpipe.launch.local import Ranks, run_ranks_here
from vpipe.launch.mps import gpus_of, share_one_gpu
from vpipe.launch.place import from_elsewhere, rank_directory, rank_interpreter
from vpipe.launch.remote import HostsJob, run_ranks_on_hosts
from vpipe.launch.slurm import job_folder, restarts
from vpipe.launch.watch import FailureLog
from vpipe.observe.results import rewrite_results, write_interrupted_results
from vpipe.observe.trackers import check_trackers
from vpipe.record.run_folder import FAILED, STOPPED, make_run_folder
from vpipe.system.console import announce, inform
from vpipe.system.environment import PROFILE_NAME
from vpipe.system.faults import VARIABLE, read_faults
from vpipe.system.host_memory import total_memory
from vpipe.system.start import Phases
from vpipe.system.units import show_bytes
from vpipe.train.capture_ahead import capturing_ahead
from vpipe.train.carried import carried_files
from vpipe.train.checks import check_choosable, check_paths, stages_of_ranks
from vpipe.train.preload import preparation

if TYPE_CHECKING:
    from vpipe.config import RunConfig

LEAST_MEMORY = 100 << 20
"""Bytes of its own that a process has when it has imported torch."""


def launch(
    config: RunConfig,
    arguments: Sequence[str],
    *,
    quiet: bool = False,
    max_restarts: int = 0,
    began: float | None = None,
) -> Path:
    """Start the ranks of a run and wait for them to end; its folder, where its logs and figures are.

    `began` is when the command did, by the monotonic clock; default: now.
    """
    phases = Phases("launch", began)
    read_faults(os.environ.get(VARIABLE, ""))
    hosts = [] if config.machines is None else hosts_of(config.machines)
    apart = any(not host.here for host in hosts)
    if not apart:
        _check_memory(config)
        if config.python is not None:
            raise ConfigError(
                f"{config.source}: python is {config.python!r}, which is for the other hosts of `machines`, and there "
                "are none: leave it out"
            )
    check_choosable(config)
    stages = stages_of_ranks(config)
    if not apart:
        check_paths(config)
        rank_interpreter(config, arguments)  # raises where the image of a container is missing
    if config.container is None:  # else it is the image that must have them
        check_trackers(config.source, {"wandb": config.wandb, "mlflow": config.mlflow})
    runs = Path(config.log_directory)
    # `vpipe compare` runs the same command several times, and all of them again after a requeue.
    folder = make_run_folder(runs) if quiet else job_folder(runs, arguments)
    for note in config.notes:
        inform(f"{config.source}: {note}")
    counted = "1 rank" if config.ranks == 1 else f"{config.ranks} ranks"
    announce(f"{config.source}: starting {counted}, with logs and figures in {folder}")
    with nullcontext() if apart else capturing_ahead(config):
        variables = None
        if config.partition == AUTO and not apart:  # on several hosts the ranks do it
            variables = _left_to_ranks(config)
            if variables is None:
                arguments, config = _planned(config, arguments, folder, phases)
            stages = stages_of_ranks(config)  # some ranks may be idle
        arguments = from_elsewhere(config, arguments)
        with _writing_results(folder):
            if apart:
                phases.end()
                order = _order(config, arguments, folder, stages) | {"phases": phases.seconds}
                _run_on_hosts(config, hosts, order, folder, stages, quiet=quiet, max_restarts=max_restarts)
            else:
                ranks = _ranks_here(config, arguments, folder, stages, quiet, phases, variables or {})
                log = FailureLog(folder)
                with_restarts(lambda attempt: run_ranks_here(ranks, attempt, log), folder, max_restarts)
    return folder


def _left_to_ranks(config: RunConfig) -> dict[str, str] | None:
    """Variables for ranks that measure their model themselves when they have met, and plan; None: we plan for them.

    Ranks that share a GPU measure together: other processes would import and build the same once more before them.
    """
    if not share_one_gpu(gpus_of(config)):
        return None
    if config.code:  # whether it was measured depends on the captured model
        return {}
    from vpipe.train.planning import kept_profile, profile_name

    name = profile_name(config)
    return {PROFILE_NAME: name} if kept_profile(name) is None else None


def _planned(
    config: RunConfig, arguments: Sequence[str], folder: Path, phases: Phases
) -> tuple[Sequence[str], RunConfig]:
    """The arguments of the ranks and their configuration, with the plan of the run in the place of `auto`."""
    from vpipe.train.planning import PLAN, write_run_plan

    plan = folder.absolute() / PLAN
    write_run_plan(config, plan, phases, all_ranks=share_one_gpu(gpus_of(config)))
    phases.begin("launch")
    config = with_plan(config, plan)
    for note in config.notes:
        inform(f"{config.source}: {note}")
    return [*arguments, "--set", f"partition={plan}"], config


@contextmanager
def _writing_results(folder: Path) -> Iterator[None]:
    """Around the ranks: if they do not end as they should, the folder gets what is known of the run all the same."""
    try:
        yield
    except VPipeError as error:
        write_interrupted_results(folder, FAILED, str(error).partition("\n")[0])
        raise
    except SystemExit as ended:
        if ended.code != Stopped.exit_code:
            print(
                "the run was stopped by you, at once: updates after its newest checkpoint are lost",
                file=sys.stderr,
                flush=True,
            )
            write_interrupted_results(
                folder, STOPPED, "it ended at once: updates after its newest checkpoint are lost"
            )
        raise


def _ranks_here(
    config: RunConfig,
    arguments: Sequence[str],
    folder: Path,
    stages: Sequence[str],
    quiet: bool,
    phases: Phases,
    variables: Mapping[str, str],
) -> Ranks:
    return Ranks(
        arguments,
        config.ranks,
        folder,
        stages,
        port=config.port,
        directory=rank_directory(config),
        interpreter=rank_interpreter(config, arguments),
        quiet=quiet,
        heartbeat_limit=config.heartbeat_limit,
        patience=config.timeout,
        gpus=gpus_of(config),
        phases=phases,
        prepare=preparation(config),
        variables=variables,
    )


def with_restarts(run_once: Callable[[int], object], folder: Path, max_restarts: int) -> None:
    """Call it with the number of the attempt, again after each fault."""
    for attempt in range(max_restarts + 1):
        try:
            run_once(restarts() + attempt)
            return
        except RankFailedError as error:
            if attempt == max_restarts:
                if max_restarts:
                    raise RankFailedError(
                        *f"gave up after {max_restarts} restarts: {error}".split("\n", 1)
                    ) from None
                raise
            print(
                f"{error}\nrestart {attempt + 1} of {max_restarts}, from the newest good checkpoint of {folder}",
                file=sys.stderr,
                flush=True,
            )


def _order(
    config: RunConfig, arguments: Sequence[str], folder: Path, stages: Sequence[str]
) -> dict[str, Any]:
    """The run as the agents of its hosts read it."""
    command, _, *options = arguments
    while "--set" in options:  # the configuration that the hosts are given has these values
        place = options.index("--set")
        del options[place : place + 2]
    return {
        "files": carried_files(config),
        "source": str(config.source),
        "command": command,
        "options": options,
        "folder": str(folder.absolute()),
        "cwd": str(Path.cwd()),
        "stages": list(stages),
    }


def _run_on_hosts(
    config: RunConfig,
    hosts: Sequence[Host],
    order: dict[str, Any],
    folder: Path,
    stages: Sequence[str],
    *,
    quiet: bool,
    max_restarts: int,
) -> None:
    job = HostsJob(
        hosts,
        config.python or sys.executable,
        host_facts(),
        order,
        folder.absolute(),
        config.port,
        stages,
        config.heartbeat_limit,
        config.rendezvous_limit,
        quiet,
    )
    log = FailureLog(folder)
    apart: list[str] = []
    with_restarts(lambda attempt: apart.extend(run_ranks_on_hosts(job, attempt, log)), folder, max_restarts)
    if order["command"] == "eval":
        shutil.rmtree(folder, ignore_errors=True)  # its ranks have removed those of their hosts
    elif apart:
        rewrite_results(folder)  # with the figures that have come from the other hosts
    if hosts[0].name in apart and folder.exists():
        print(
            f"checkpoints and model are in {folder.absolute()} of {hosts[0].name}, where rank 0 was",
            file=sys.stderr,
        )


def _check_memory(config: RunConfig) -> None:
    """Raise for more ranks than can be started here, before they take the memory of everybody else."""
    needed, memory = config.ranks * LEAST_MEMORY, total_memory()
    if needed > memory:
        raise ConfigError(
            f"{config.source}: the run has {config.ranks} ranks, which need {show_bytes(needed)} before they have any "
            f"weights, and this host has {show_bytes(memory)}: give fewer stages or replicas"
        )
