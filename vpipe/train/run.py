"""The start of a run: this process becomes its launcher or one of its ranks."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.config.arguments import build_schedule, check_blocks
from vpipe.config.file import AUTO, with_plan
from vpipe.errors import ConfigError, RankFailedError, Stopped, VPipeError, printable
from vpipe.launch.facts import host_facts
from vpipe.launch.hosts import Host, hosts_of
from vpipe.launch.idle import is_idle, telling_idle_ranks, wait_as_idle
from vpipe.launch.local import Ranks, run_ranks_here
from vpipe.launch.meeting import forget_meeting
from vpipe.launch.mps import gpus_of, share_one_gpu
from vpipe.launch.place import enter_place, from_elsewhere, rank_directory, rank_interpreter
from vpipe.launch.rank import LAUNCHER, TORCHRUN, end_with_launcher
from vpipe.launch.remote import HostsJob, run_ranks_on_hosts
from vpipe.launch.sbatch import Resources, sbatch_script, submit
from vpipe.launch.slurm import job_folder, join_step, restarts, this_step
from vpipe.launch.watch import FailureLog
from vpipe.observe.results import rewrite_results, write_interrupted_results
from vpipe.observe.trackers import check_trackers
from vpipe.record.run_folder import FAILED, STOPPED, make_run_folder
from vpipe.system.console import announce, inform
from vpipe.system.environment import PROFILE_NAME
from vpipe.system.faults import VARIABLE, read_faults
from vpipe.system.files import exists
from vpipe.system.host_memory import total_memory
from vpipe.system.start import Phases, process_began
from vpipe.system.units import show_bytes
from vpipe.train.capture_ahead import capturing_ahead
from vpipe.train.carried import carried_files
from vpipe.train.preload import preparation

if TYPE_CHECKING:
    from vpipe.config import RunConfig

LEAST_MEMORY = 100 << 20
"""Bytes of its own that a process has when it has imported torch."""


def run(
    config: RunConfig, arguments: Sequence[str], work: Callable[[], None], *, max_restarts: int = 0
) -> None:
    """Do `work` on every rank of the run; `arguments` are those of the same `vpipe` command for a rank.

    A process that torchrun, srun or the launcher has started is a rank and works; any other starts the ranks.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        step = this_step()
        if step is None or step.size == 1 != config.ranks:
            launch(config, arguments, max_restarts=max_restarts, began=process_began())
            return
        _check_started_by_others(config, max_restarts)
        join_step(step, config, arguments, Path(config.log_directory))
    elif LAUNCHER not in os.environ:
        _check_started_by_others(config, max_restarts)
    if LAUNCHER in os.environ or TORCHRUN in os.environ:
        end_with_launcher()
    try:
        enter_place(config, arguments)
        if is_idle(config):
            wait_as_idle(config)
        else:
            with telling_idle_ranks():
                work()
    finally:
        forget_meeting()


def submit_run(
    config: RunConfig, arguments: Sequence[str], resources: Resources, *, max_restarts: int, dry_run: bool
) -> None:
    """Let SLURM start the ranks of a run; `dry_run` only prints the script."""
    check_choosable(config)
    _stages_of_ranks(config)
    check_paths(config)
    if config.python is not None:
        raise ConfigError(
            f"{config.source}: python is {config.python!r}, which is for ranks that `vpipe train` starts by ssh: leave "
            "it out; srun starts the Python that runs this command"
        )
    script = sbatch_script(config, arguments, resources, max_restarts)
    if dry_run:
        print(script, end="")
        return
    job = submit(script)
    print(
        printable(
            f"submitted job {job}: its output is in slurm-{job}.out, its logs and figures in {config.log_directory}"
        )
    )


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
    stages = _stages_of_ranks(config)
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
            stages = _stages_of_ranks(config)  # some ranks may be idle
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


def check_choosable(config: RunConfig) -> None:
    """Raise where there is no plan by which `compress: auto` could choose."""
    if config.compress == AUTO and config.partition != AUTO and config.planned is None:
        raise ConfigError(
            f"{config.source}: compress is {AUTO!r}, which simulates the plan of the run: set partition: auto, or to a "
            "file of `vpipe plan`"
        )


def _stages_of_ranks(config: RunConfig) -> list[str]:
    """The stages of each rank in words, for messages; raises if schedule, partition and model do not fit together."""
    if config.partition == AUTO:
        for key in ("policies", "recompute_ratio", "recompute", "replicas", "chunks", "depth", "placement"):
            if getattr(config, key) is not None:
                raise ConfigError(
                    f"{config.source}: {key} is {getattr(config, key)!r}, but partition is {AUTO!r}, which plans it: "
                    "leave one of the two out"
                )
        return ["some stage"] * config.ranks
    schedule = build_schedule(config)
    check_blocks(config, schedule)
    return [" and ".join(f"stage {s}" for s in schedule.stages_of(rank)) for rank in range(config.ranks)]


def _check_memory(config: RunConfig) -> None:
    """Raise for more ranks than can be started here, before they take the memory of everybody else."""
    needed, memory = config.ranks * LEAST_MEMORY, total_memory()
    if needed > memory:
        raise ConfigError(
            f"{config.source}: the run has {config.ranks} ranks, which need {show_bytes(needed)} before they have any "
            f"weights, and this host has {show_bytes(memory)}: give fewer stages or replicas"
        )


def _check_started_by_others(config: RunConfig, max_restarts: int) -> None:
    """Raise for what only our own launcher could do, where torchrun, srun or another has started the ranks."""
    by_srun = TORCHRUN not in os.environ and this_step() is not None
    other = "srun" if by_srun else "torchrun" if TORCHRUN in os.environ else "another launcher"
    if max_restarts:
        restart = (
            "submit the job with `vpipe train --slurm --max-restarts`" if by_srun else "give it to torchrun"
        )
        raise ConfigError(
            f"--max-restarts is {max_restarts}: a rank that {other} has started cannot start the others again: "
            f"{restart}, or leave it out"
        )
    if config.python is not None:
        raise ConfigError(
            f"{config.source}: python is {config.python!r}, which is for ranks that `vpipe train` starts by ssh, and "
            f"{other} has started this one: leave it out, and let {other} start that Python"
        )
    port = os.environ.get("MASTER_PORT", "")
    if config.port and not by_srun and port != str(config.port):
        has_set = "torchrun has set MASTER_PORT to" if other == "torchrun" else "MASTER_PORT is"
        fix = "give torchrun --master-port" if other == "torchrun" else "make them equal"
        raise ConfigError(
            f"{config.source}: port is {config.port}, but {has_set} {port!r}: {fix}, or leave port out"
        )


def check_paths(config: RunConfig) -> None:
    """Raise for missing files before any rank starts."""
    for key in ("data_dir", "tokenizer", "pretrained"):
        written = getattr(config, key)
        if written is not None and not exists(config.path(written)):
            raise ConfigError(f"{config.source}: {key} is {written!r}: there is no {config.path(written)}")
