"""The wire between the launcher and the agent of a host: JSON messages, a line each, over two pipes.

Nothing blocks: what cannot be written yet is kept, so that an end whose peer is cut off still sees its silence. A
thread sends heartbeats, also while the main thread is busy.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from contextlib import suppress
from typing import Any

LONGEST = 64 << 20
"""Bytes of a line."""
ROOM = 1 << 20
"""Bytes that may wait to be written before logs are held back."""
_BEAT = b"{}\n"


class Wire:
    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing
        self.ended = False
        """The other end has closed it, or has ended."""
        self.heard = time.monotonic()
        self._looked = self.heard
        self._unread, self._unwritten = b"", b""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)

    def start_heartbeat(self, limit: float) -> None:
        def beat() -> None:
            while not self._closing.wait(min(1.0, limit / 20)):
                with self._lock:
                    if not self._unwritten:
                        self._unwritten = _BEAT
                self.flush()

        threading.Thread(target=beat, name="wire", daemon=True).start()

    def send(self, **message: Any) -> None:
        with self._lock:
            self._unwritten += json.dumps(message, ensure_ascii=False).encode() + b"\n"
        self.flush()

    @property
    def full(self) -> bool:
        return len(self._unwritten) > ROOM

    def flush(self, seconds: float = 0.0) -> None:
        """Write what can be written now; wait for all of it for so long."""
        deadline = time.monotonic() + seconds
        while True:
            with self._lock, suppress(BlockingIOError):
                if self._closing.is_set():
                    return
                try:
                    while self._unwritten:
                        self._unwritten = self._unwritten[os.write(self.writing, self._unwritten[:65536]) :]
                except OSError as error:
                    if isinstance(error, BlockingIOError):
                        raise
                    self._unwritten = b""  # what the other end has said before it ended can still be read
            left = deadline - time.monotonic()
            if not self._unwritten or left <= 0:
                return
            _ready(self.writing, select.POLLOUT, left)

    def receive(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """The messages that have come; waits so long for the first."""
        if self.ended and not self._unread:
            return []
        if not self.ended and _ready(self.reading, select.POLLIN, seconds):
            self._read()
        lines = self._unread.split(b"\n")
        self._unread = lines.pop()
        if len(self._unread) > LONGEST:
            self.ended = True
        return [message for message in map(_parse, lines) if message]

    def _read(self) -> None:
        with suppress(BlockingIOError):
            try:
                for _ in range(64):
                    part = os.read(self.reading, 65536)
                    if not part:
                        self.ended = True
                        return
                    self._unread += part
                    self.heard = time.monotonic()
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    raise
                self.ended = True

    def silence(self, limit: float) -> float:
        """Seconds since the other end was heard; pauses of this process itself do not count."""
        now = time.monotonic()
        if now - self._looked > limit / 2:
            self.heard = now
        self._looked = now
        return now - self.heard

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            for descriptor in {self.reading, self.writing}:
                with suppress(OSError):
                    os.close(descriptor)
            self.ended = True


def _ready(descriptor: int, event: int, seconds: float) -> bool:
    poll = select.poll()  # select takes no descriptor above 1023
    poll.register(descriptor, event)
    return bool(poll.poll(1000 * seconds))


def _parse(line: bytes) -> dict[str, Any]:
    """Empty for a heartbeat, and for what a login script has printed."""
    with suppress(ValueError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict):
            return value
    return {}
