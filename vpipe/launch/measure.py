"""Bandwidth and latency of the network between two hosts, over a TCP connection like the ranks' own.

The caller sends, the listener acknowledges: a byte first, as often as it takes for a median, then blocks of data.
"""

from __future__ import annotations

import socket
import struct
from statistics import median
from time import perf_counter
from typing import NamedTuple

from vpipe.system.host_identity import interface_with

PINGS = 20
FIRST = 256 << 10
"""Bytes of the first block, by which the size of the next is chosen."""
LAST = 256 << 20
"""Bytes of a block at most."""
ENOUGH = 0.25
"""Seconds that a block should take."""
LIMIT = 30.0
"""Seconds that either end waits for the other."""
_SIZE = struct.Struct(">Q")


class MeasuredLink(NamedTuple):
    bandwidth: float
    """Bytes a second."""
    latency: float
    """Seconds, one way."""
    interface: str
    """The caller's, with its address."""


def serve_measurement(link: socket.socket) -> None:
    """Answer the caller; a size of 0 ends it."""
    buffer = bytearray(1 << 20)
    link.settimeout(LIMIT)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while size := _SIZE.unpack(_exactly(link, _SIZE.size))[0]:
        while size:
            count = link.recv_into(buffer, min(size, len(buffer)))
            if not count:
                raise ConnectionResetError("the connection was closed")
            size -= count
        link.sendall(b".")


def measure(link: socket.socket) -> MeasuredLink:
    link.settimeout(LIMIT)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own = str(link.getsockname()[0])
    trip = median(_seconds(link, 1) for _ in range(PINGS))
    size, bandwidth = FIRST, 0.0
    while True:
        taken = _seconds(link, size)
        bandwidth = size / max(taken - trip, 1e-9)
        if taken > ENOUGH / 2 or size == LAST:
            break
        # No more than four times: the first block may have gone in one burst, for which a slow link has room.
        size = int(min(LAST, 4 * size, max(2 * size, size * ENOUGH / taken)))
    link.sendall(_SIZE.pack(0))
    return MeasuredLink(bandwidth, trip / 2, f"{interface_with(own) or '?'} ({own})")


def _seconds(link: socket.socket, size: int) -> float:
    """To send so many bytes and have them acknowledged."""
    block = bytes(min(size, 1 << 20))
    start = perf_counter()
    link.sendall(_SIZE.pack(size))
    while size:
        size -= link.send(block[: min(size, len(block))])
    _exactly(link, 1)
    return perf_counter() - start


def _exactly(link: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = link.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the connection was closed")
        received += part
    return received
