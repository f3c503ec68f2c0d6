"""Signals to a rank that trains, as requests to its pipeline.

SIGTERM, Ctrl-C    finish the update, save, end with exit code 75; another one a second later quits at once
SIGUSR1            save and go on
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline

AGAIN = 1.0
"""Seconds after which a further signal is another one: a launcher may pass on what a terminal sent to all."""


def ignore_save_signal() -> None:
    """Until training begins, a request for a checkpoint does not end the process."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Signals:
    def __init__(self, pipe: Pipeline, say: Callable[[str], None]) -> None:
        self._pipe = pipe
        self._say = say
        self._first: float | None = None  # when this rank was first asked to end
        self._handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._writer: socket.socket | None = None

    def listen(self) -> None:
        """Take signals from now on; only the main thread of a process can.

        The kernel writes them to a socket that a thread reads: the main thread may be deep inside a library.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._handlers[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True).start()

    def close(self) -> None:
        """Restore the handlers that were there before."""
        if self._writer is not None:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            self._end_thread()

    def hand_over(self, take: Callable[[], None]) -> None:
        """Close, but without an instant at which the handlers of before are set: `take` sets others.

        It sets the handlers of the signals that end a process, and the descriptor that the kernel writes them to.
        """
        take()
        self._end_thread()

    def _end_thread(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _read(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(16):
                if self._writer is None:  # the log is closed by now
                    return
                for number in numbers:
                    self._received(number)

    def _received(self, number: int) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        if number == signal.SIGUSR1:
            self._say(f"{name}: a checkpoint is saved after this update")
            self._pipe.request_save()
        elif number in (signal.SIGTERM, signal.SIGINT) and self._first is None:
            self._first = now
            self._say(f"{name}: the run ends after this update, with a checkpoint; once more quits at once")
            self._pipe.request_stop()
        elif number in (signal.SIGTERM, signal.SIGINT) and now - (self._first or now) > AGAIN:
            os._exit(128 + number)
