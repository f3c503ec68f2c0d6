"""The job that this process is a rank of: who keeps its rendezvous, where, and under which secret.

started by               the ranks meet                                        the secret
vpipe train              on a socket of the loopback interface that the        drawn by the launcher
                         launcher opened and rank 0 inherits
torchrun, or a script    on a port that rank 0 chooses and torch's own store   VPIPE_SECRET, else drawn by rank 0,
with a process group     tells                                                 told by torch's store, to anyone
anything else that       on MASTER_ADDR:MASTER_PORT, that interface alone      VPIPE_SECRET, else none
sets RANK and the rest
"""

import errno
import json
import os
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from vpipe.communication.rendezvous.client import RendezvousAddress, RendezvousClient
from vpipe.communication.rendezvous.server import Rendezvous
from vpipe.communication.rendezvous.store import MeetingStore
from vpipe.communication.sockets import LOOPBACK
from vpipe.errors import PeerError
from vpipe.system.environment import LISTENER, SECRET


class Job(NamedTuple):
    meeting: RendezvousClient
    store: MeetingStore
    rendezvous: Rendezvous | None
    """Rank 0 keeps it."""

    def close(self) -> None:
        self.meeting.close()
        if self.rendezvous is not None:
            self.rendezvous.close()


_joined: dict[tuple[str, ...], Job] = {}  # the one of this process


def join(rank: int, size: int, timeout: float) -> Job:
    """It lives as long as the process: a world that ends may be followed by another, and a rank that is early
    must not meet the others at a place that is about to close.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", SECRET)
    key = (str(rank), str(size), *(os.environ.get(name, "") for name in names))
    if key not in _joined:
        while _joined:
            _joined.popitem()[1].close()
        find, rendezvous = _open(rank, size, timeout)
        meeting = RendezvousClient(rank, find, timeout)
        _joined[key] = Job(meeting, MeetingStore(meeting), rendezvous)
    return _joined[key]


def _open(rank: int, size: int, timeout: float) -> tuple[Callable[[], RendezvousAddress], Rendezvous | None]:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    secret = os.environ.get(SECRET, "").encode()
    # Somebody else listens there already, and knows nothing of secrets: it tells where we meet, and no more.
    if dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _beside_torch(address, port, secret, rank, size, timeout)
    place = RendezvousAddress(address, port, secret)
    return lambda: place, Rendezvous(_listener(address, port), size, secret) if rank == 0 else None


def _beside_torch(
    address: str, port: int, secret: bytes, rank: int, size: int, timeout: float
) -> tuple[Callable[[], RendezvousAddress], Rendezvous | None]:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"vpipe/rendezvous/{attempt}"
    try:
        store = dist.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, dist.DistError) as error:
        reason = str(error).splitlines()[0]
        raise PeerError(f"torch's store at {address}:{port} does not answer: {reason}") from None

    def find() -> RendezvousAddress:
        try:
            host, where, drawn = json.loads(store.get(name))
            return RendezvousAddress(str(host), int(where), secret or str(drawn).encode())
        except (RuntimeError, dist.DistError):
            raise PeerError(f"rank 0 did not come to the rendezvous within {timeout:g} s") from None
        except (ValueError, TypeError) as error:
            raise PeerError(f"torch's store at {address}:{port} tells no place to meet: {error}") from None

    if rank:
        return find, None
    # All ranks on this host: then nobody else needs to reach them.
    host = LOOPBACK if os.environ.get("LOCAL_WORLD_SIZE") == str(size) else address
    listener = _listener(host, 0)
    drawn = "" if secret else secrets.token_hex(32)
    rendezvous = Rendezvous(listener, size, secret or drawn.encode())
    store.set(name, json.dumps([host, listener.getsockname()[1], drawn]))
    return find, rendezvous


def _listener(address: str, port: int) -> socket.socket:
    """What the launcher has opened for us, or a socket on the interface that has this address."""
    inherited = os.environ.pop(LISTENER, None)
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
            return socket.create_server(where[:2], family=family, backlog=128)
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
