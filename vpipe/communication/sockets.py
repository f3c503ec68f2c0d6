"""Sockets between ranks: the network interface to use, reads of an exact length.

Left to itself, gloo takes the interface that the host's name belongs to: often the loopback interface, where no other
host finds it, or one that strangers can reach.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from vpipe.system.deadline import Deadline
from vpipe.system.host_identity import interface_with

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@contextmanager
def gloo_on(address: str) -> Iterator[None]:
    """Gloo groups made meanwhile use the interface with this address, unless the user has named one.

    NCCL reads its variable when its first communicator is made, so that one stays set. Left to itself, it takes the
    first interface that it finds: on another network than gloo's, where there are several.
    """
    name = interface_with(address)
    interface = os.environ.get(_GLOO, name)
    if interface is not None:
        os.environ.setdefault(_NCCL, f"={interface}")  # exactly these, not all that begin so
    if _GLOO in os.environ or name is None:
        yield
        return
    os.environ[_GLOO] = name
    try:
        yield
    finally:
        del os.environ[_GLOO]


def receive_exactly(link: socket.socket, count: int, deadline: Deadline | None = None) -> bytes:
    """So many bytes, within the deadline, or the socket's own limit."""
    received = bytearray()
    while len(received) < count:
        try:
            if deadline is not None:
                link.settimeout(deadline.slice() or 1e-3)
            more = link.recv(min(count - len(received), 1 << 20))
        except TimeoutError:
            if deadline is None or not deadline.left():
                raise
            continue
        if not more:
            raise ConnectionResetError("the connection was closed")
        received += more
    return bytes(received)
