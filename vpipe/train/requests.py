"""What is asked of a run while it trains: a checkpoint, or an end; by a signal, by the clock, by a failed save.

    SIGTERM, Ctrl-C    finish the update, save, end with exit code 75; another one a second later quits at once
    SIGUSR1            save and go on

The ranks must do it at the same update, and at no instant are they all at the same one. So the ranks that
compute the loss, which every rank reads, send along with an update's loss what is asked of them, and it
holds on every rank when that rank has made that update. An end that only another rank was asked for is passed
on to the first of them through `World.tell`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from vpipe.communication import World
from vpipe.errors import PeerError

SAVE, STOP, GIVE_UP = 1, 2, 4
"""Save and go on; save and end; end because saving failed."""
AGAIN = 1.0
"""Seconds after which a further signal is another one: a launcher may pass on what a terminal sent to all."""
LOOK = 1.0
"""Seconds between two looks at what other ranks were asked for."""


def ignore_requests() -> None:
    """Until training begins, a request for a checkpoint is nothing to die of."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Requests:
    """One rank's. `leader` is the first of those that compute the loss; it also keeps the time."""

    def __init__(
        self, world: World, leader: int, *, minutes: float | None = None, say: Callable[[str], None]
    ) -> None:
        self._world = world
        self._leads = world.rank == leader
        self._minutes = minutes
        self._say = say
        self._asked = 0
        self._lock = threading.Lock()
        self._first: float | None = None  # when this rank was first asked to end
        self._handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self.saved()

    def ask(self, what: int) -> None:
        """From any thread."""
        with self._lock:
            self._asked |= what
        if what == STOP and not self._leads:
            with suppress(PeerError):  # who cannot be told will end for that reason
                self._world.publish("asked to end", True)

    def take(self) -> int:
        """What is asked for now; it is asked for once."""
        if self._leads and self._due is not None and time.monotonic() >= self._due:
            self.ask(SAVE)
            self.saved()
        with self._lock:
            asked, self._asked = self._asked, 0
        return asked

    def saved(self) -> None:
        """The clock starts again."""
        self._due = None if self._minutes is None else time.monotonic() + 60 * self._minutes

    def listen(self) -> None:
        """Heed signals from now on; only the main thread of a process can.

        A thread is told of them by the kernel, through a socket: the main thread may be deep inside a library.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = self._ends = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._handlers[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()

    def close(self) -> None:
        """Signals do again what they did before."""
        if self._ends is not None:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            self._end_thread(self._ends[1])

    def leave_to(self, take: Callable[[], None]) -> None:
        """Close, but signals do what `take` makes them do, and at no instant what they did before.

        It sets the handlers of those that end a process, and the descriptor that the kernel writes them to.
        """
        take()
        if self._ends is not None:
            self._end_thread(self._ends[1])

    def _end_thread(self, writer: socket.socket) -> None:
        self._ends = None
        writer.close()

    def _watch(self, reader: socket.socket) -> None:
        followers = [rank for rank in range(self._world.size) if rank != self._world.rank]
        with reader:
            while True:
                if select.select([reader], [], [], LOOK)[0]:
                    numbers = reader.recv(16)
                    if not numbers or self._ends is None:  # what would be said has no log any more
                        return
                    for number in numbers:
                        self._signalled(number)
                elif self._leads and self._another_was_asked(followers):
                    self.ask(STOP)
                    followers = []

    def _another_was_asked(self, ranks: list[int]) -> bool:
        with suppress(PeerError):
            return any(self._world.published("asked to end", rank) for rank in ranks)
        return False

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        if number == signal.SIGUSR1:
            self._say(f"{name}: a checkpoint is saved after this update")
            self.ask(SAVE)
        elif number in (signal.SIGTERM, signal.SIGINT) and self._first is None:
            self._first = now
            self._say(f"{name}: the run ends after this update, with a checkpoint; once more quits at once")
            self.ask(STOP)
        elif number in (signal.SIGTERM, signal.SIGINT) and now - (self._first or now) > AGAIN:
            os._exit(128 + number)
