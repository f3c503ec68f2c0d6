"""Hosts on this machine that ssh reaches: network namespaces with an sshd in each, and files of their own where asked.

    namespace a  10.231.7.1 ──cable── 10.231.7.2  namespace b
    the launcher's host, an sshd      an sshd

Everything is in one temporary folder: keys, known hosts, and an `ssh` that reads no configuration but ours.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.command import Ended, end
from tests.faults.hosts import TwoHosts, two_hosts
from tests.faults.runs import SMALL
from tests.waiting import TIMEOUT, wait_until

REPOSITORY = Path(__file__).parents[2]
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
ADDRESSES = ("10.231.7.1", "10.231.7.2")
PORT = 2222
MACHINES = [f"{address}:0" for address in ADDRESSES]
ENDLESS: dict[str, Any] = {"max_updates": None, "epochs": 100_000, "print_frequency": 1}


class SshHosts:
    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        self.network = hosts
        self.folder = folder
        self._servers: list[subprocess.Popen[bytes]] = []
        for name in ("user", "host"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(key, check=True, capture_output=True)
        public = (folder / "host.pub").read_text().split()[:2]
        self.known = "".join(f"[{address}]:{PORT} {' '.join(public)}\n" for address in ADDRESSES)
        (folder / "known").write_text(self.known)
        shutil.copy(folder / "user.pub", folder / "authorized")
        (folder / "config").write_text(
            f"Host *\n Port {PORT}\n IdentityFile {folder}/user\n IdentitiesOnly yes\n User root\n"
            f" UserKnownHostsFile {folder}/known\n GlobalKnownHostsFile /dev/null\n ConnectTimeout 5\n"
        )
        tools = folder / "bin"
        tools.mkdir()
        (tools / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        (tools / "ssh").chmod(0o755)

    def serve(
        self,
        number: int,
        environment: Mapping[str, str] = {},
        own: Path | None = None,
        files: Mapping[str, str] = {},
    ) -> None:
        """Start the sshd of a host. Its sessions have these variables; its folder `own` is not the others', and has
        these files."""
        variables = {
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "PATH": os.environ["PATH"],
        } | environment
        config = self.folder / f"sshd-{number}"
        config.write_text(
            f"ListenAddress {ADDRESSES[number]}:{PORT}\nHostKey {self.folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nPermitRootLogin yes\n"
            f"PasswordAuthentication no\nSetEnv {' '.join(f'{key}={value}' for key, value in variables.items())}\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd sends those who have not logged in
        script = "" if own is None else f"mount -t tmpfs none {own} && "
        script += "".join(f"echo '{text}' > {own}/{name} && " for name, text in files.items())
        command = ["unshare", "-m", "sh", "-c", f"{script}exec {SSHD} -D -e -f {config}"]
        server = subprocess.Popen(
            ["ip", "netns", "exec", self.network.names[number], *command],
            stderr=(self.folder / f"sshd-{number}.log").open("wb"),
            start_new_session=True,
        )
        self._servers.append(server)
        deadline = time.monotonic() + 30
        while "listening" not in (self.folder / f"sshd-{number}.log").read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"sshd does not start: {(self.folder / f'sshd-{number}.log').read_text()}")
            time.sleep(0.02)

    def environment(self) -> dict[str, str]:
        """For the launcher: our `ssh` comes first."""
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}

    def inside(self, number: int, *command: str) -> list[str]:
        """The command on a host."""
        return ["ip", "netns", "exec", self.network.names[number], *command]

    def seen_by(self, server: int, path: Path) -> Path:
        """The path as the server that was started as this one sees it, which may have files of its own."""
        return Path(f"/proc/{self._servers[server].pid}/root{path}")

    def processes(self, number: int) -> list[int]:
        """Those of a host, without its sshd."""
        said = subprocess.run(
            ["ip", "netns", "pids", self.network.names[number]], check=True, capture_output=True, text=True
        ).stdout.split()
        return [pid for pid in map(int, said) if "sshd" not in _name(pid)]

    def close(self) -> None:
        for server in self._servers:
            server.send_signal(signal.SIGTERM)
        for name in self.network.names:
            pids = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
            for pid in map(int, pids.stdout.split()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for server in self._servers:
            server.wait()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return "sshd"  # it has gone


@contextmanager
def ssh_hosts(folder: Path) -> Iterator[SshHosts]:
    """Two hosts, whose sshds the caller starts; skips the test where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in (SSHD, "ssh", "ssh-keygen", "ip", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    with ExitStack() as stack:
        try:
            made = SshHosts(stack.enter_context(two_hosts()), folder)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        stack.callback(made.close)
        yield made


_MOUNT = 'cp run.yml .. && mount -t tmpfs none "$PWD" && cd "$PWD" && cp ../run.yml . && exec "$0" "$@"'
ALONE = ("unshare", "-m", "sh", "-c", _MOUNT)


class Bench:
    """A folder with a run, and the hosts that it runs on."""

    def __init__(self, hosts: SshHosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        folder.mkdir()

    def write(self, **keys: Any) -> None:
        """A key that is None is left out."""
        given = SMALL | {"machines": MACHINES} | keys
        values = {key: value for key, value in given.items() if value is not None}
        (self.folder / "run.yml").write_text(yaml.safe_dump(values))

    def start(
        self,
        *options: str,
        number: int = 0,
        variables: Mapping[str, str] = {},
        own: bool = False,
        **keys: Any,
    ) -> Any:
        """The command on a host, by default `vpipe train` over both; with `own`, in a folder that nobody else sees."""
        self.write(**keys)
        alone = ALONE if own else ()
        command = options if options[:1] == ("-m",) else ("-m", "vpipe", *(options or ("train", "run.yml")))
        return subprocess.Popen(
            self.hosts.inside(number, *alone, sys.executable, *command),
            cwd=self.folder,
            env={
                **os.environ,
                **self.hosts.environment(),
                "OMP_NUM_THREADS": "1",
                "COLUMNS": "160",
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *options: str, **keys: Any) -> Ended:
        process = self.start(*options, **keys)
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        finally:
            end(process)
        return Ended(process.returncode, out, err)

    def torchrun(self, *options: str, counts: tuple[int, int] = (1, 1), **keys: Any) -> list[Ended]:
        """`vpipe train` with these options under torchrun, with so many ranks on each host; they share no folder."""
        meet = ("--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", "29544")
        processes = []
        try:
            for number, count in enumerate(counts):
                place = ("--node-rank", str(number), "--nproc-per-node", str(count))
                command = ("-m", "torch.distributed.run", *meet, *place, "-m", "vpipe", "train", "run.yml")
                secret = {"VPIPE_SECRET": "of this test"}
                process = self.start(
                    *command, *options, number=number, variables=secret, own=number == 1, **keys
                )
                processes.append(process)
            said = [process.communicate(timeout=TIMEOUT) for process in processes]
        finally:
            for process in processes:
                end(process)
        return [Ended(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]

    @property
    def latest(self) -> Path:
        return max(self.folder.glob("runs/2*"))

    def wait_until_empty(self) -> None:
        """Until no process of a run is left on any host."""
        wait_until(
            lambda: not any(self.hosts.processes(number) for number in (0, 1)), "the end of all processes"
        )
