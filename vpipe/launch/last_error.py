"""Last words: from its failure on, no signal ends a rank before it has said why it ends.

When a rank dies, torchrun sends SIGTERM to the others; they notice its end at the same instant, and have to close what
they hold before they can name it. A signal then kills nothing: it sets a limit, which a thread keeps, because the main
thread may be deep inside a library. A process whose interpreter stands still is left to SIGKILL: our launcher sends it
3 s after its verdict, torchrun 30 s after SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

TO_SPEAK = 5.0
"""Seconds that the process has left once a signal has come: closing waits for others for less than half of that."""
_ENDING = (signal.SIGTERM, signal.SIGINT)


def hold_signals() -> None:
    """This process is about to say why it ends, and to end: there is no way back. For the main thread to call."""
    if signal.getsignal(signal.SIGTERM) is _held:
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_keep_limit, args=(reading,), name="last words", daemon=True).start()
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _ENDING:
        signal.signal(number, _held)


def _held(number: int, frame: FrameType | None) -> None:
    """The thread is told by the kernel."""


def _keep_limit(reading: int) -> None:
    while (number := os.read(reading, 1)[0]) not in _ENDING:
        pass  # another signal that has a handler
    time.sleep(TO_SPEAK)
    os._exit(128 + number)  # without a word: a full pipe may be what the main thread is stuck at
