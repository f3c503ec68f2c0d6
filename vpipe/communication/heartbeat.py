"""Beats between ranks that no launcher of ours watches: those of several hosts, and those that torchrun started.

Every pair of ranks has a TCP connection on which each side sends a byte now and then, from a thread. Silence means
that the peer's process is stopped, its host is gone or the network is cut; the end of the connection without a
goodbye, that the process died. The main thread may be waiting in a library that cannot be interrupted, so the
thread gives it a moment to end by itself, and then ends the process. Before that it tells the others whom it lost:
they have not lost us, though we are gone.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from vpipe.communication.interfaces import own_address
from vpipe.errors import PeerError

_BEAT, _GOODBYE, _LOST = b".", b",", b"!"
TO_HEAR = 1.0
"""Seconds that a rank whose main thread has lost a peer waits to hear which one went first."""
TO_END = 2.0
"""Seconds that the main thread has to end by itself once a peer is lost."""
TO_LEAVE = 0.5
"""Seconds that a rank which leaves waits for the others to notice."""
HANDSHAKE = 5.0
"""Seconds that a caller has to show the job's token."""
PEER_FAILED = 3
"""The exit code."""


class Heartbeat:
    """The connections of one rank; `lost` says which peer was lost first, once one was."""

    verdict = ""
    """Of this process, also after its connections were closed: which peer was lost, and how."""

    def __init__(
        self, rank: int, links: Mapping[int, socket.socket], hosts: Sequence[str], limit: float
    ) -> None:
        self.rank = rank
        self.lost = ""
        self.limit = limit
        self._links = dict(links)
        self._hosts = hosts
        self._heard = dict.fromkeys(links, 0.0)
        self._words: dict[int, bytes] = dict.fromkeys(links, b"")
        self._leaving, self._wake = os.pipe()
        for link in links.values():
            link.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye, so that nobody misses this rank; or why it ends, if an error is on its way."""
        error = sys.exc_info()[1]
        deadline = time.monotonic() + TO_HEAR
        while isinstance(error, PeerError) and not self.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        os.write(self._wake, b"x")
        self._thread.join()
        Heartbeat.verdict = self.lost
        if isinstance(error, Exception):
            why = self.lost or f"rank {self.rank} failed: {type(error).__name__}: {error}"
            self._tell(_LOST + why.replace("\n", " ").encode() + b"\n")
        else:
            self._tell(_GOODBYE)
        self._leave()
        os.close(self._leaving)
        os.close(self._wake)

    def _run(self) -> None:
        turn = self.limit / 20
        now = time.monotonic()
        self._heard = dict.fromkeys(self._links, now)
        while not self.lost:
            before, sent = now, self._tell(_BEAT)
            while time.monotonic() < sent + turn:
                ends = [self._leaving, *(link.fileno() for link in self._links.values())]
                ready, _, _ = select.select(ends, [], [], max(0.0, sent + turn - time.monotonic()))
                if self._leaving in ready:
                    return
                for peer in [peer for peer, link in self._links.items() if link.fileno() in ready]:
                    self._listen(peer)
            now = time.monotonic()
            if now - before > self.limit / 2:  # it was this process that stood still
                self._heard = dict.fromkeys(self._links, now)
            self._miss(now)
        self._tell(_LOST + self.lost.encode() + b"\n")
        if not select.select([self._leaving], [], [], TO_END)[0]:
            os.write(2, f"error: stopped because {self.lost}\n".encode())
            os._exit(PEER_FAILED)

    def _leave(self) -> None:
        """Close the connections when what was said has been heard: a close with beats unread would undo it."""
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + TO_LEAVE
        left = list(self._links.values())
        while left and (ready := select.select(left, [], [], max(0.0, deadline - time.monotonic()))[0]):
            for link in ready:
                with suppress(BlockingIOError, OSError):
                    if link.recv(4096):
                        continue
                left.remove(link)
        for link in self._links.values():
            link.close()

    def _tell(self, words: bytes) -> float:
        for link in self._links.values():
            with suppress(OSError):  # full: it hears nothing anyway; broken: reading will tell
                link.send(words)
        return time.monotonic()

    def _listen(self, peer: int) -> None:
        try:
            said = self._links[peer].recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        self._heard[peer] = time.monotonic()
        # Beats come before other words; within those a dot is a dot.
        words = self._words[peer] = (self._words[peer] + said).lstrip(_BEAT)
        if words.startswith(_LOST) and b"\n" in words:
            self.lost = self.lost or words[1:].partition(b"\n")[0].decode(errors="replace")
        elif words.startswith(_GOODBYE):
            self._links.pop(peer).close()
        elif not said:
            self._links.pop(peer).close()
            self.lost = self.lost or f"rank {peer} failed: it ended without a word ({self._hosts[peer]})"

    def _miss(self, now: float) -> None:
        silent = [peer for peer in self._links if now - self._heard[peer] > 0.9 * self.limit]
        if silent and not self.lost:
            seconds = max(now - self._heard[peer] for peer in silent)
            ranks = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
            hosts = ", ".join(dict.fromkeys(self._hosts[peer] for peer in silent))
            self.lost = f"{ranks} failed: not heard of for {seconds:.1f} s (on {hosts}): stopped, or the network is cut"


def connect_beats(
    rank: int, size: int, towards: tuple[str, int], gather: Callable[[str, Any], list[Any]], limit: float
) -> Heartbeat:
    """Connect every pair of ranks; `gather` is called once by every rank. The higher rank of a pair calls."""
    token = os.urandom(16).hex()
    with socket.create_server((own_address(towards), 0), backlog=size) as listener:
        address = listener.getsockname()[:2]
        others = gather("beats", [*address, token, socket.gethostname()])
        links: dict[int, socket.socket] = {}
        deadline = time.monotonic() + max(limit, 2 * HANDSHAKE)
        try:
            for peer in range(rank):
                host, port, theirs, _ = others[peer]
                link = links[peer] = socket.create_connection((host, port), timeout=limit)
                link.sendall(f"{theirs} {rank:8d}".encode())
            while len(links) < size - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                link, _ = listener.accept()
                caller = _check(link, token)
                if caller is not None and rank < caller < size and caller not in links:
                    links[caller] = link
                else:
                    link.close()
        except OSError as error:
            for link in links.values():
                link.close()
            missing = sorted(set(range(size)) - {rank} - set(links))
            raise PeerError(f"ranks {missing} could not be reached for their beats: {error}") from error
    return Heartbeat(rank, links, [host for *_, host in others], limit)


def _check(link: socket.socket, token: str) -> int | None:
    """The rank of a caller that shows the token."""
    link.settimeout(HANDSHAKE)
    said = b""
    with suppress(OSError):
        while len(said) < len(token) + 9 and (part := link.recv(len(token) + 9 - len(said))):
            said += part
    shown, _, caller = said.decode(errors="replace").partition(" ")
    known = hmac.compare_digest(shown.encode(), token.encode())
    return int(caller) if known and caller.strip().isdigit() else None
