"""The ranks of a SLURM job: this task of a step as a rank, and the run that a requeued job goes on with.

`srun vpipe train run.yml` starts a task for each rank. The variables that SLURM sets give a task its rank; where the
ranks meet, and their secret, stand in a file in the log directory (`meeting.py`).
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vpipe.errors import ConfigError, PeerError, VPipeError
from vpipe.launch.hosts import is_here
from vpipe.launch.meeting import Meeting, read_meeting, write_meeting
from vpipe.launch.rank import LAUNCHED
from vpipe.record.run_folder import make_log_directory, make_run_folder, newest_runs, read_object
from vpipe.system.environment import LISTENER, SECRET
from vpipe.system.faults import ATTEMPT
from vpipe.system.files import write_json
from vpipe.system.host_memory import usable_cores
from vpipe.system.network import LOOPBACK, own_address
from vpipe.system.ownership import is_ours

if TYPE_CHECKING:
    from vpipe.config import RunConfig

JOB = "slurm.json"
"""In the folder of a run that a SLURM job has made: the job, and the command."""
SPECIAL_STEPS = 0xFFFFFFF0
"""Numbers from here are no steps of srun: the batch script, the shell of salloc."""
MOST_NODES = 100_000
LOOKED_UP = 4
"""Names of other nodes that are looked up until one has an address."""


class Step(NamedTuple):
    """A task of a step, as SLURM describes it to the task."""

    job: str
    number: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    nodes: Sequence[str]
    node: str
    launcher: str
    """The port of its srun, which is the same for all tasks."""

    @property
    def meeting(self) -> str:
        """The name of a file that no other step has."""
        return f".slurm-{self.job}.{self.number}-{restarts()}-{self.launcher}"


def this_step(environment: Mapping[str, str] = os.environ) -> Step | None:
    """The step that this process is a task of; None outside of `srun`."""
    number = environment.get("SLURM_STEP_ID", "")
    if not number.isdecimal() or int(number) >= SPECIAL_STEPS:
        return None
    try:
        return Step(
            environment["SLURM_JOB_ID"],
            int(number),
            int(environment["SLURM_PROCID"]),
            int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"]),
            int(environment["SLURM_LOCALID"]),
            len(environment.get("SLURM_GTIDS", "0").split(",")),
            list(islice(node_names(environment.get("SLURM_STEP_NODELIST", "")), MOST_NODES)),
            environment.get("SLURMD_NODENAME", ""),
            environment.get("SLURM_SRUN_COMM_PORT", "0"),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"SLURM_STEP_ID is {number}, but the other variables of a SLURM task are not all there ({error}): start "
            "the ranks with srun, or unset SLURM_STEP_ID"
        ) from None


def node_names(written: str) -> Iterator[str]:
    """`rack[1-2]n[01,07],login` is rack1n01, rack1n07, rack2n01, rack2n07, login."""
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", written):
        before, bracket, rest = part.partition("[")
        if not bracket:
            yield part
            continue
        numbers, _, after = rest.partition("]")
        for piece in numbers.split(","):
            first, _, last = piece.partition("-")
            if not first.isdecimal() or not (last or first).isdecimal():
                return  # a notation that we do not know
            for number in range(int(first), int(last or first) + 1):
                yield from node_names(f"{before}{number:0{len(first)}}{after}")


def restarts() -> int:
    """How often the SLURM job was requeued, and its step begun again; 0 outside of a job."""
    if "SLURM_JOB_ID" not in os.environ:
        return 0
    counts = (os.environ.get(name, "") for name in ("SLURM_RESTART_COUNT", ATTEMPT))
    return sum(int(count) for count in counts if count.isdecimal())


def job_folder(log_directory: Path, arguments: Sequence[str]) -> Path:
    """A new folder for a run; of a SLURM job that was requeued, the one in which the same command was at work."""
    job = {name: os.environ.get(f"SLURM_{name.upper()}") for name in ("cluster_name", "job_id")}
    if job["job_id"] is None:
        return make_run_folder(log_directory)
    noted = {**job, "arguments": list(arguments)}
    if restarts():
        for folder in newest_runs(log_directory):
            if is_ours(folder / JOB) and read_object(folder / JOB) == noted:
                return folder
    folder = make_run_folder(log_directory)
    write_json(folder / JOB, noted)
    return folder


def join_step(step: Step, config: RunConfig, arguments: Sequence[str], log_directory: Path) -> None:
    """Become the rank that this task is: set the variables of torchrun, and those of our launcher."""
    if step.size not in (config.ranks, config.ranks + config.idle):
        raise ConfigError(
            f"{config.source} describes {config.ranks} ranks and srun has started {step.size} tasks: "
            f"use srun --ntasks={config.ranks}, or change machines, stages or replicas"
        )
    log_directory = log_directory.absolute()
    make_log_directory(log_directory)  # every rank: who cannot write there would wait for a file in vain
    place = log_directory / step.meeting
    if step.rank:
        meeting = read_meeting(place, config.rendezvous_limit)
    else:
        try:
            os.environ[LAUNCHED] = str(job_folder(log_directory, arguments))
            meeting = _open(step, int(os.environ.get("MASTER_PORT", config.port)))
        except VPipeError as error:
            write_meeting(place, PeerError(str(error)))
            raise
        write_meeting(place, meeting)
    share = os.environ.get("SLURM_CPUS_PER_TASK") or max(1, usable_cores() // step.local_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
    os.environ.setdefault(SECRET, meeting.secret)
    os.environ |= {
        "RANK": str(step.rank),
        "WORLD_SIZE": str(step.size),
        "LOCAL_RANK": str(step.local_rank),
        "LOCAL_WORLD_SIZE": str(step.local_size),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        ATTEMPT: str(restarts()),
    }


def check_machine(config: RunConfig, rank: int) -> None:
    """Raise if `machines` names another host for a rank than SLURM has placed it on."""
    step = this_step()
    if step is None or config.machines is None:
        return
    machine = config.machines[rank]
    host = machine.rpartition(":")[0]
    if host != step.node and not is_here(host):
        raise ConfigError(
            f"{config.source}: machines names {machine!r} for rank {rank}, which SLURM has placed on {step.node}: "
            "write localhost, which is any node here, or leave machines out and give stages"
        )


def _open(step: Step, port: int) -> Meeting:
    """Listen where the other nodes find this one."""
    address = os.environ.get("MASTER_ADDR") or _address(step)
    try:
        listener = socket.create_server((address, port), backlog=socket.SOMAXCONN)
    except OSError as error:
        raise PeerError(
            f"rank 0 cannot listen on {address}:{port} ({error.strerror or error}): give an address of its node in "
            "MASTER_ADDR, and in `port` a port that is free, or 0 for any"
        ) from None
    where = int(listener.getsockname()[1])
    listener.set_inheritable(True)  # a container begins with another program
    os.environ[LISTENER] = str(listener.detach())
    return Meeting(address, where, "" if SECRET in os.environ else secrets.token_hex(32))


def _address(step: Step) -> str:
    """This node's address on the interface that leads to the other nodes."""
    others = [name for name in step.nodes if name != step.node]
    if not others:
        return LOOPBACK
    # Where the names of nodes have no address there is still the one that the tasks find their srun at.
    for name in (*others[:LOOKED_UP], os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")):
        try:
            found = own_address((socket.gethostbyname(name), 9)) if name else LOOPBACK
        except OSError:
            continue
        if found != LOOPBACK:
            return found
    return LOOPBACK
