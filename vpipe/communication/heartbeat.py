"""Heartbeats between ranks that no launcher of ours watches: ranks of several hosts, or started by torchrun.

Every pair of ranks has a TCP connection on which a thread of each side sends a byte regularly. Silence means
that the peer's process is stopped, its host is gone or the network is cut. A connection that ends without a goodbye
means that the process died. The thread then sends the reason to the other ranks, which are still connected to us and
would blame us. It gives the main thread a moment to end by itself and then ends the process: the main thread
may be waiting in a library that cannot be interrupted.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from vpipe.communication.admission import HANDSHAKE_LIMIT
from vpipe.communication.peers import connect_peers
from vpipe.errors import PeerError
from vpipe.system.network import own_address

_BEAT, _GOODBYE, _FAILURE = b".", b",", b"!"
REASON_WAIT = 1.0
"""Seconds that a rank whose main thread has lost a peer waits to learn which one failed first."""
EXIT_WAIT = 2.0
"""Seconds that the main thread has to end by itself once a peer is lost."""
CLOSE_WAIT = 0.5
"""Seconds that a rank which leaves waits for the others to notice."""
PEER_FAILED = 3
"""The exit code."""


class Heartbeat:
    """The connections of one rank; `lost` names the peer that was lost first, and how, once one was."""

    failure = ""
    """The same for this process, also after the connections were closed."""

    def __init__(
        self, rank: int, links: Mapping[int, socket.socket], hosts: Sequence[str], limit: float
    ) -> None:
        self.rank = rank
        self.lost = ""
        self.limit = limit
        self._links = dict(links)
        self._hosts = hosts
        self._last_heard = dict.fromkeys(links, 0.0)
        self._unread: dict[int, bytes] = dict.fromkeys(links, b"")
        self._closing, self._wake = os.pipe()
        for link in links.values():
            link.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send a goodbye to the peers, or the reason if this rank ends because of an error."""
        error = sys.exc_info()[1]
        deadline = time.monotonic() + REASON_WAIT
        while isinstance(error, PeerError) and not self.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        os.write(self._wake, b"x")
        self._thread.join()
        Heartbeat.failure = self.lost
        if isinstance(error, Exception):
            why = self.lost or f"rank {self.rank} failed: {type(error).__name__}: {error}"
            self._send(_FAILURE + why.replace("\n", " ").encode() + b"\n")
        else:
            self._send(_GOODBYE)
        self._close_links()
        os.close(self._closing)
        os.close(self._wake)

    def _run(self) -> None:
        interval = self.limit / 20
        now = time.monotonic()
        self._last_heard = dict.fromkeys(self._links, now)
        while not self.lost:
            before = now
            self._send(_BEAT)
            deadline = time.monotonic() + interval
            while not self.lost and time.monotonic() < deadline:
                ends = [self._closing, *(link.fileno() for link in self._links.values())]
                ready, _, _ = select.select(ends, [], [], max(0.0, deadline - time.monotonic()))
                if self._closing in ready:
                    return
                for peer in [peer for peer, link in self._links.items() if link.fileno() in ready]:
                    self._receive(peer)
            now = time.monotonic()
            if now - before > self.limit / 2:  # this process itself was stopped
                self._last_heard = dict.fromkeys(self._links, now)
            self._check_silence(now)
        self._send(_FAILURE + self.lost.encode() + b"\n")
        if not select.select([self._closing], [], [], EXIT_WAIT)[0]:
            os.write(2, f"error: stopped because {self.lost}\n".encode())
            os._exit(PEER_FAILED)

    def _send(self, message: bytes) -> None:
        for link in self._links.values():
            with suppress(OSError):  # full: the peer does not read; broken: reading will find it
                link.send(message)

    def _receive(self, peer: int) -> None:
        try:
            received = self._links[peer].recv(4096)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        self._last_heard[peer] = time.monotonic()
        # Heartbeats come before any other message; within a message a dot is a dot.
        message = self._unread[peer] = (self._unread[peer] + received).lstrip(_BEAT)
        if message.startswith(_FAILURE) and b"\n" in message:
            self.lost = self.lost or message[1:].partition(b"\n")[0].decode(errors="replace")
        elif message.startswith(_GOODBYE):
            self._links.pop(peer).close()
        elif not received:
            self._links.pop(peer).close()
            self.lost = (
                self.lost
                or f"rank {peer} failed: its process ended and gave no reason (on {self._hosts[peer]})"
            )

    def _check_silence(self, now: float) -> None:
        silent = [peer for peer in self._links if now - self._last_heard[peer] > 0.9 * self.limit]
        if silent and not self.lost:
            seconds = max(now - self._last_heard[peer] for peer in silent)
            ranks = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
            hosts = ", ".join(dict.fromkeys(self._hosts[peer] for peer in silent))
            self.lost = f"{ranks} failed: no heartbeat for {seconds:.1f} s (on {hosts}): stopped, or the network is cut"

    def _close_links(self) -> None:
        """Wait until the peers have closed: to close with heartbeats unread would discard our last message."""
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + CLOSE_WAIT
        left = list(self._links.values())
        while left and (ready := select.select(left, [], [], max(0.0, deadline - time.monotonic()))[0]):
            for link in ready:
                with suppress(BlockingIOError, OSError):
                    if link.recv(4096):
                        continue
                left.remove(link)
        for link in self._links.values():
            link.close()


def connect_heartbeat(
    rank: int,
    hosts: Sequence[str],
    towards: tuple[str, int],
    gather: Callable[[str, Any], list[Any]],
    limit: float,
) -> Heartbeat:
    """Connect every pair of ranks; `hosts` are the names of theirs. Every rank calls `gather` once."""
    peers = [peer for peer in range(len(hosts)) if peer != rank]
    with socket.create_server((own_address(towards), 0), backlog=socket.SOMAXCONN) as listener:
        links = connect_peers(rank, peers, listener, "heartbeat", gather, max(limit, 2 * HANDSHAKE_LIMIT))
    return Heartbeat(rank, links, hosts, limit)
