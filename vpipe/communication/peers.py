"""Connections between the ranks of a job, made when they have met: each end proves to the other that it belongs there.

Each rank listens and draws a key, which the others are given at the rendezvous. The higher rank of a pair calls. A
stranger at the socket is turned away without delay for the ranks (`admission.py`).
"""

import queue
import secrets
import socket
import time
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Any

from vpipe.communication.admission import RETRY, BackgroundTask, other_user, serve_members
from vpipe.communication.handshake import Introduction, RefusedError, introduce
from vpipe.errors import PeerError
from vpipe.system.deadline import Deadline

CONNECT_LIMIT = 3.0
"""Seconds of one attempt to connect: the kernel would wait longer each time that the other end's queue is full."""


def connect_peers(
    rank: int,
    peers: Collection[int],
    listener: socket.socket,
    name: str,
    gather: Callable[[str, Any], list[Any]],
    timeout: float,
) -> dict[int, socket.socket]:
    """A connection to each peer. `gather` is called once, with this name, by every rank of the world."""
    key, address = secrets.token_bytes(32), listener.getsockname()
    others = gather(name, [address.decode() if isinstance(address, bytes) else address, key.hex()])
    awaited = {peer for peer in peers if peer > rank}
    arrived: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
    links: dict[int, socket.socket] = {}
    deadline = Deadline(timeout)

    def check(who: Introduction) -> str:
        if who.rank not in awaited:
            return f"rank {who.rank} is here already, or does not call this rank"
        awaited.discard(who.rank)
        return ""

    def welcome(who: Introduction, link: socket.socket) -> None:
        arrived.put((who.rank, link))

    try:
        with closing(BackgroundTask(serve_members(listener, key, name, check, welcome), f"vpipe {name}")):
            me = Introduction(rank, secrets.token_bytes(16))
            for peer in sorted(peer for peer in peers if peer < rank):
                place, theirs = others[peer]
                kind = (listener.family, listener.type)
                where = place if isinstance(place, str) else tuple(place)
                links[peer] = _call(kind, where, bytes.fromhex(theirs), me, f"rank {peer} ({name})", deadline)
            while len(links) < len(peers):
                try:
                    caller, link = arrived.get(timeout=deadline.slice())
                except queue.Empty:
                    if not deadline.left():
                        raise
                else:
                    links[caller] = link
    except (PeerError, queue.Empty) as error:
        while not arrived.empty():
            arrived.get()[1].close()
        for link in links.values():
            link.close()
        if isinstance(error, PeerError):
            raise
        missing = sorted(set(peers) - set(links))
        raise PeerError(
            f"ranks {missing} did not connect to rank {rank} within {timeout:g} s ({name})"
        ) from None
    return links


def _call(
    kind: tuple[int, int], address: Any, key: bytes, me: Introduction, who: str, deadline: Deadline
) -> socket.socket:
    """A connection to a rank that listens already, and may be in the middle of a crowd of strangers."""
    while True:
        link = socket.socket(*kind)
        try:
            link.settimeout(max(RETRY, min(CONNECT_LIMIT, deadline.left())))
            link.connect(address)
            if (user := other_user(link)) is not None:
                raise RefusedError(f"belongs to user {user}")
            introduce(link, key, me, deadline)
            return link
        except RefusedError as error:
            link.close()
            raise PeerError(f"what answers in place of {who} {error}: nothing is sent to it") from None
        except ConnectionRefusedError:
            link.close()
            raise PeerError(f"{who} has gone: it ended or was killed; see its own output") from None
        except OSError as error:  # its queue is full, or we had to make room for others
            link.close()
            if not deadline.left():
                raise PeerError(f"{who} did not answer rank {me.rank}: {error}") from None
            time.sleep(RETRY)
