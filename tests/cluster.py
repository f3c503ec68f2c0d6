"""A SLURM cluster of two nodes on this machine: munged, slurmctld, two slurmd, and all their files in one folder."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.waiting import TIMEOUT, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES = ("node1", "node2")
_CONF = """\
ClusterName=vpipe
SlurmctldHost={host}(127.0.0.1)
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
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; "" if there can."""
    if os.geteuid():
        return "a SLURM cluster of our own takes root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else ""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def write(self) -> None:
        host, ports = socket.gethostname(), _free_ports(1 + len(NODES))
        text = _CONF.format(host=host, folder=self.folder, control=ports[0])
        for node, port in zip(NODES, ports[1:], strict=True):
            text += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000\n"
            )
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
        self._daemon("slurmctld", "-c")
        for node in NODES:
            (place / f"spool-{node}").mkdir()
            self._daemon("slurmd", "-N", node)
        wait_until(lambda: self.run("sinfo", "-h", "-o", "%T %D").strip() == "idle 2", "both nodes")

    def run(self, *command: object, cwd: Path | None = None) -> str:
        """What a command of SLURM prints; anything but its success is an error."""
        done = subprocess.run(
            list(map(str, command)),
            env={**os.environ, **self.environment},
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
        subprocess.run(command, env={**os.environ, **self.environment}, check=True, timeout=TIMEOUT)


@contextmanager
def cluster() -> Iterator[Cluster]:
    # A short path, for the socket's sake, which anybody may enter: jobs run as other users in real life.
    folder = Path(tempfile.mkdtemp(prefix="vpipe-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    made = Cluster(folder)
    try:
        made.write()
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    with_sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in with_sockets]
    for one in with_sockets:
        one.close()
    return ports
