"""Requests to save or to stop: from any thread of any rank, taken up by all ranks at the same update.

At no instant are all ranks at the same update. But every rank reads every update's loss, so a request travels with the
loss, as bits beside it: the ranks that compute the loss send what was requested of them. A request made on another rank
reaches the first of those through `World.tell`, which that rank looks at now and then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from vpipe.communication import World
from vpipe.errors import PeerError

SAVE, STOP = 1, 2
LOOK = 1.0
"""Seconds between two looks at what other ranks have requested; more where there are many ranks."""
GRACE = 1.0
"""Seconds in which a save that all ranks were asked for (by a signal to each) comes without being passed on."""


class Requests:
    """One rank's. `loss_ranks` compute the loss."""

    def __init__(self, world: World, loss_ranks: Sequence[int]) -> None:
        self._world = world
        self._sends = world.rank in loss_ranks
        others = [rank for rank in range(world.size) if rank not in loss_ranks]
        self._looks_at = others if world.rank == loss_ranks[0] else []
        self._look_interval = LOOK * max(1.0, world.size / 8)
        self._next_look = 0.0
        self._seen: dict[int, list[int]] = {}  # rank ▶ its requests so far, by kind
        self._passed_on = [0, 0]  # this rank's, by kind
        self._open = 0
        self._since = 0.0
        self._lock = threading.Lock()

    def make(self, what: int) -> None:
        """Request a save or a stop; from any thread."""
        with self._lock:
            self._since = self._since if self._open else time.monotonic()
            self._open |= what
        if what & STOP and not self._sends:
            self._pass_on()

    def take(self) -> int:
        """What is requested now, once, to be sent with the next loss."""
        if self._looks_at and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._look_interval
            self._look()
        with self._lock:
            taken, self._open = self._open, 0
        return taken

    def arrived(self, what: int) -> None:
        """These requests came with an update's loss; what is still open on a rank that sends no loss is passed on."""
        if self._sends:
            return
        with self._lock:
            self._open &= ~what
            overdue = self._open and time.monotonic() >= self._since + GRACE
        if overdue:
            self._pass_on()

    def _pass_on(self) -> None:
        with self._lock:
            for kind, bit in enumerate((SAVE, STOP)):
                self._passed_on[kind] += bool(self._open & bit)
            self._open = 0
        with suppress(
            PeerError
        ):  # a rank that cannot be reached has failed, and ends the run for that reason
            self._world.tell("requests", self._passed_on)

    def _look(self) -> None:
        for rank in self._looks_at:
            made = None
            with suppress(PeerError):
                made = self._world.told("requests", rank)
            before = self._seen.get(rank, [0, 0])
            if made is not None and made != before:
                self._seen[rank] = list(made)
                self.make(sum(bit for kind, bit in enumerate((SAVE, STOP)) if made[kind] > before[kind]))
