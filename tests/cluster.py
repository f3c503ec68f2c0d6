"""A SLURM cluster of two nodes on this machine: munged, slurmctld, two slurmd, and all their files in one folder.

Each node has a network of its own, where the system permits it.
"""

import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.faults.hosts import FIRST, TwoHosts, two_hosts
from tests.waiting import TIMEOUT, wait_until

COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")
PROGRAMS = ("munged", "slurmctld", "slurmd", *COMMANDS, "nsenter", "setpriv")
NODES = ("node1", "node2")
LOOPBACK, SECOND = "127.0.0.1", f"{FIRST[:-1]}2"
# A requeued job waits until its credentials have expired.
_CONF = """\
ClusterName=vpipe
SlurmctldHost={host}({address})
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=120
RebootProgram=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=node1,node2 MaxTime=INFINITE State=UP PriorityTier=10
"""


def missing() -> str:
    """Why there can be no cluster here; "" if there can."""
    if os.geteuid():
        return "a SLURM cluster of our own takes root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else ""


class Cluster:
    def __init__(self, folder: Path, hosts: TwoHosts | None) -> None:
        """Each node on a host of its own, with its own address; without hosts all are on the loopback interface."""
        self.folder = folder
        self.addresses = (LOOPBACK, LOOPBACK) if hosts is None else (FIRST, SECOND)
        # Not `ip netns exec`, which would hide the control groups.
        networks = [] if hosts is None else [f"--net=/var/run/netns/{name}" for name in hosts.names]
        self._enter = [["nsenter", network, "--"] for network in networks] or [[], []]
        self._commands = folder / "bin"

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which the commands of SLURM are those of this cluster."""
        path = f"{self._commands}:{os.environ['PATH']}"
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def write(self) -> None:
        host, ports = socket.gethostname(), _free_ports(1 + len(NODES))
        text = _CONF.format(host=host, folder=self.folder, control=ports[0], address=self.addresses[0])
        for node, address, port in zip(NODES, self.addresses, ports[1:], strict=True):
            place = f"NodeHostname={host} NodeAddr={address} Port={port}"
            text += f"NodeName={node} {place} CPUs=2 RealMemory=1000\n"
        self._commands.mkdir()
        for name in COMMANDS:  # users are on the host of the first node
            program = shlex.join([*self._enter[0], shutil.which(name) or name])
            (self._commands / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            (self._commands / name).chmod(0o755)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge = pwd.getpwnam("munge")
        os.chown(key, munge.pw_uid, munge.pw_gid)
        os.chown(self.folder, munge.pw_uid, munge.pw_gid)

    def start(self) -> None:
        place = self.folder
        self._daemon(
            *("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "--force"),
            *(f"--socket={place}/munge.socket", f"--key-file={place}/munge.key"),
            *(f"--pid-file={place}/munged.pid", f"--log-file={place}/munged.log"),
            *(f"--seed-file={place}/munge.seed", "--num-threads=2"),
        )
        wait_until((place / "munge.socket").exists, "munged")
        self._daemon(*self._enter[0], "slurmctld", "-c")
        for node, enter in zip(NODES, self._enter, strict=True):
            (place / f"spool-{node}").mkdir()
            self._daemon(*enter, "slurmd", "-N", node)
        wait_until(lambda: self.run("sinfo", "-h", "-o", "%T %D").strip() == "idle 2", "both nodes")

    def run(self, *command: object, cwd: Path | None = None) -> str:
        """What a command prints; anything but its success is an error."""
        done = subprocess.run(
            list(map(str, command)),
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        if done.returncode and command[0] != "sinfo":
            raise AssertionError(
                f"{' '.join(map(str, command))}: {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done.stdout

    def state(self, job: str) -> str:
        """Such as RUNNING, PENDING, COMPLETED."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        shown = dict(part.partition("=")[::2] for part in self.run("scontrol", "show", "job", job).split())
        return shown[name]

    def stop(self) -> None:
        """The jobs first: a slurmd that is killed leaves them running."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--full", "--signal=KILL", "--state=RUNNING", "--user=root")
            self.run("scancel", "--user=root")
            wait_until(lambda: not self.run("squeue", "-h"), "the end of the jobs")
        pids = [int(path.read_text()) for path in self.folder.glob("*.pid") if path.read_text().strip()]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGTERM:
                with suppress(AssertionError):
                    wait_until(
                        lambda: not any(Path("/proc", str(pid)).exists() for pid in pids), "the daemons"
                    )

    def _daemon(self, *command: str) -> None:
        subprocess.run(command, env=self.environment, check=True, timeout=TIMEOUT)


@contextmanager
def cluster() -> Iterator[Cluster]:
    # A short path, for the socket's sake, which anybody may enter: jobs run as other users in real life.
    folder = Path(tempfile.mkdtemp(prefix="vpipe-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts = None
        with suppress(OSError, subprocess.CalledProcessError):  # no network namespaces here
            hosts = stack.enter_context(two_hosts())
        made = Cluster(folder, hosts)
        made.write()
        stack.callback(made.stop)
        made.start()
        yield made


def _free_ports(count: int) -> list[int]:
    with_sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in with_sockets]
    for one in with_sockets:
        one.close()
    return ports
