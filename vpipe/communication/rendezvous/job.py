"""The job that this process is a rank of: the address of its rendezvous, and the secret.

started by               the ranks meet                                        the secret
vpipe train              on a socket of the loopback interface that the        drawn by the launcher
                         launcher opened and rank 0 inherits
torchrun, or a script    on a port that rank 0 chooses and torch's own store   VPIPE_SECRET, else drawn by rank 0,
with a process group     publishes                                             readable in torch's store
srun                     on a socket that rank 0 opens (`launch/slurm.py`)     drawn by rank 0, in a file of mode 600
anything else that       on MASTER_ADDR:MASTER_PORT, that interface alone      VPIPE_SECRET, else none
sets RANK and the rest
"""

import errno
import json
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from vpipe.communication.rendezvous.client import LateError, RendezvousAddress, RendezvousClient
from vpipe.communication.rendezvous.server import Rendezvous
from vpipe.errors import PeerError
from vpipe.system.environment import IDLE, LISTENER, SECRET
from vpipe.system.network import LOOPBACK


class RendezvousStore(dist.Store):
    """The rendezvous as a store of torch.distributed, for process groups; bytes travel as Latin-1 text."""

    def __init__(self, client: RendezvousClient) -> None:
        super().__init__()
        self._client = client
        self._seconds = client.timeout

    def set(self, key: str, value: bytes | str) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self._client.change("set", key, raw.decode("latin-1"))

    def get(self, key: str) -> bytes:
        try:
            return self._client.get(key, self._seconds).encode("latin-1")
        except PeerError as error:
            raise dist.DistStoreError(str(error)) from None

    def add(self, key: str, value: int) -> int:
        return int(self._client.change("add", key, value))

    def check(self, keys: list[str]) -> bool:
        return all(self._client.change("check", key) for key in keys)

    def deleteKey(self, key: str) -> bool:  # the name by which torch calls it
        return bool(self._client.change("delete", key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        for key in keys:
            try:
                self._client.get(key, seconds)
            except LateError as error:
                # The barrier of torch looks every 10 s and then waits again: it takes this error for "not yet".
                # That a rank has ended is another error, which the barrier lets through.
                raise dist.DistStoreError(str(error)) from None

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()


class Job(NamedTuple):
    client: RendezvousClient
    store: RendezvousStore
    rendezvous: Rendezvous | None
    """Rank 0 serves it."""

    def close(self) -> None:
        self.client.close()
        if self.rendezvous is not None:
            self.rendezvous.close()


_NAME = "vpipe/rendezvous"
"""Where rank 0 publishes the address in torch's store. Every attempt of a job writes it anew: torchrun's agents have no
number of the attempt that is the same for all of them, each counts only the restarts that it began itself."""

_joined: dict[tuple[str, ...], Job] = {}  # the one of this process


def join(rank: int, size: int, timeout: float, idle: int = 0) -> Job:
    """Besides the ranks of the job so many idle ones may connect, to learn of its end.

    The job lives as long as the process: a world that ends may be followed by another, and a rank that is early
    must not connect to a rendezvous that is about to close.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", SECRET)
    key = (str(rank), str(size), *(os.environ.get(name, "") for name in names))
    if key not in _joined:
        while _joined:
            _joined.popitem()[1].close()
        find, rendezvous = _open(rank, size, timeout, idle)
        client = RendezvousClient(rank, find, timeout)
        _joined[key] = Job(client, RendezvousStore(client), rendezvous)
    return _joined[key]


def tell_idle_ranks() -> None:
    """That the run has ended as it should, if this process is the rank 0 that they wait for."""
    for job in _joined.values():
        if job.rendezvous is not None and int(os.environ.get(IDLE, "0")):
            job.client.tell_end()


def _open(
    rank: int, size: int, timeout: float, idle: int = 0
) -> tuple[Callable[[], RendezvousAddress], Rendezvous | None]:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    secret = os.environ.get(SECRET, "").encode()
    # torch's own store listens there already, and has no secret: it only holds the address of the rendezvous.
    if dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _beside_torch(address, port, secret, rank, size, timeout, idle)
    place = RendezvousAddress(address, port, secret)
    return lambda: place, Rendezvous(_listener(address, port), size, secret, idle) if rank == 0 else None


def _beside_torch(
    address: str, port: int, secret: bytes, rank: int, size: int, timeout: float, idle: int
) -> tuple[Callable[[], RendezvousAddress], Rendezvous | None]:
    try:
        store = dist.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, dist.DistError) as error:
        reason = str(error).splitlines()[0]
        raise PeerError(f"torch's store at {address}:{port} does not answer: {reason}") from None

    def find() -> RendezvousAddress:
        try:
            host, where, drawn = json.loads(store.get(_NAME))
            return RendezvousAddress(str(host), int(where), secret or str(drawn).encode())
        except dist.DistNetworkError:
            raise PeerError(
                f"torch's store at {address}:{port} has gone: its torchrun ended or was killed"
            ) from None
        except (RuntimeError, dist.DistError):
            raise PeerError(f"rank 0 did not come to the rendezvous within {timeout:g} s") from None
        except (ValueError, TypeError) as error:
            raise PeerError(
                f"torch's store at {address}:{port} has no address of the rendezvous: {error}"
            ) from None

    if rank:
        return find, None
    # All ranks are on this host: nobody else needs to reach them. Idle ones may be elsewhere.
    host = LOOPBACK if not idle and os.environ.get("LOCAL_WORLD_SIZE") == str(size) else address
    listener = _listener(host, 0)
    drawn = "" if secret else secrets.token_hex(32)
    rendezvous = Rendezvous(listener, size, secret or drawn.encode(), idle)
    store.set(_NAME, json.dumps([host, listener.getsockname()[1], drawn]))
    return find, rendezvous


def _listener(address: str, port: int) -> socket.socket:
    """The socket that the launcher has opened for us, or one on the interface that has this address."""
    inherited = os.environ.pop(LISTENER, None)
    with suppress(OSError):  # a container that passes no descriptors on
        if inherited is not None:
            listener = socket.socket(fileno=int(inherited))
            listener.set_inheritable(False)
            return listener
    problem = "it has no address"
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        found, problem = [], error.strerror or str(error)
    for family, _, _, _, where in found:
        try:
            return socket.create_server(where[:2], family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PeerError(
                    f"port {port} of {address} is taken: another job or program listens there: "
                    "give this job another MASTER_PORT"
                ) from None
            problem = error.strerror or str(error)
    raise PeerError(
        f"MASTER_ADDR is {address!r}, where rank 0 cannot listen ({problem}): give an address of rank 0's host"
    )
