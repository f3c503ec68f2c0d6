"""Sockets between ranks: the network interface to use, connections that show a token, reads of an exact length.

Left to itself, gloo takes the interface that the host's name belongs to: often the loopback interface, where no other
host finds it, or one that strangers can reach.
"""

import fcntl
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from vpipe.errors import PeerError

LOOPBACK = "127.0.0.1"
TOKEN_LIMIT = 5.0
"""Seconds that a caller has to show the job's token."""
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def own_address(towards: tuple[str, int]) -> str:
    """This host's address on the interface that leads to the rendezvous."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(towards)
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK


@contextmanager
def gloo_on(address: str) -> Iterator[None]:
    """Gloo groups made meanwhile use the interface with this address, unless the user has named one.

    NCCL reads its variable when its first communicator is made, so that one stays set. Left to itself, it takes the
    first interface that it finds: on another network than gloo's, where there are several.
    """
    name = _interface_with(address)
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


def _interface_with(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe, _GET_ADDRESS, request)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def connect_peers(
    rank: int,
    peers: Collection[int],
    listener: socket.socket,
    name: str,
    gather: Callable[[str, Any], list[Any]],
    timeout: float,
) -> dict[int, socket.socket]:
    """A connection to each peer. `gather` is called once, with this name, by every rank of the world.

    The higher rank of a pair calls and shows the other's token. A caller that does not show it is disconnected.
    """
    token, address = os.urandom(16).hex(), listener.getsockname()
    others = gather(name, [address.decode() if isinstance(address, bytes) else address, token])
    links: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout
    try:
        for peer in (peer for peer in peers if peer < rank):
            address, shown = others[peer]
            link = links[peer] = socket.socket(listener.family, listener.type)
            link.settimeout(timeout)
            link.connect(address if isinstance(address, str) else tuple(address))
            link.sendall(f"{shown} {rank:8d}".encode())
        while len(links) < len(peers):
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            link, _ = listener.accept()
            caller = _caller(link, token)
            if caller in peers and caller > rank and caller not in links:
                links[caller] = link
            else:
                link.close()
    except OSError as error:
        for link in links.values():
            link.close()
        missing = sorted(set(peers) - set(links))
        raise PeerError(
            f"ranks {missing} did not connect to rank {rank} within {timeout:g} s: {error}"
        ) from error
    return links


def _caller(link: socket.socket, token: str) -> int:
    """The rank of a caller that shows the token, else -1."""
    link.settimeout(TOKEN_LIMIT)
    try:
        shown, _, rank = receive_exactly(link, len(token) + 9).partition(b" ")
    except OSError:
        return -1
    known = hmac.compare_digest(shown, token.encode())
    return int(rank) if known and rank.strip().isdigit() else -1


def receive_exactly(link: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        more = link.recv(min(count - len(received), 1 << 20))
        if not more:
            raise ConnectionResetError("the connection was closed")
        received += more
    return bytes(received)
