"""A rank's side of the supervision: it sends heartbeats, and ends when the launcher writes which rank has failed.

A thread writes heartbeats to the page that the launcher watches: they stop when the process is stopped or its
interpreter lock is held. The same thread reads from the page which rank failed. The main thread has a moment to end by
itself, which it does if it waits for the rank that failed. Then the thread ends the process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from vpipe.errors import PeerError, VPipeError, printable
from vpipe.launch.helpers import state_of
from vpipe.record.whereabouts import Whereabouts, launchers_page
from vpipe.system.descriptors import exhausted

LAUNCHED = "VPIPE_RUN_FOLDER"
"""Set for a rank: the folder of its run."""
LAUNCHER = "VPIPE_LAUNCHER"
"""Set for a rank: the process that started it."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set for a rank that torchrun's agent started."""

FAILED, MISTAKE, PEER_FAILED, ASKED = 1, 2, 3, 75
"""Exit codes of a rank: an exception; a user's mistake, reported in one line; another rank failed; a signal asked it to
end, and it has saved a checkpoint. Errors of `vpipe.errors` have their own."""

INTERVAL = 0.1
"""Seconds between two heartbeats."""
EXIT_WAIT = 1.0
"""Seconds that the main thread has to end by itself."""
REASON_WAIT = 1.5
"""Seconds that a rank whose peer has gone waits to learn why."""
SIGNAL_LIMIT = 5.0
"""Seconds that a failing rank has left once a signal has come: closing waits for others for less than half of that."""
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_reporting = threading.Lock()


def end_with_launcher() -> None:
    """Be killed by the kernel if the launcher, or torchrun's agent, dies, however that happens."""
    faulthandler.enable()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if LAUNCHER in os.environ and state_of(int(os.environ[LAUNCHER])) in ("", "Z"):
            os._exit(FAILED)  # it died before the kernel knew


def start_heartbeat() -> None:
    """From now on the launcher takes silence for a fault: call it when the large imports are done."""
    page = launchers_page()
    if page is not None:
        place = Whereabouts(page, int(os.environ["RANK"]))
        place.beat()
        threading.Thread(target=_send_heartbeats, args=(place,), name="heartbeat", daemon=True).start()


def _send_heartbeats(place: Whereabouts) -> None:
    while not place.page.verdict:
        place.beat()
        time.sleep(INTERVAL)
    time.sleep(EXIT_WAIT)
    with _reporting:  # not while the main thread reports it, and ends
        _stop(place.page.verdict)


def fail(error: Exception) -> NoReturn:
    """End this rank because of an error: its own, or one that another rank's end has caused."""
    with suppress(OSError):
        hold_signals()
    if no_descriptor := exhausted(error):  # before all that may need one
        print(f"error: rank {os.environ['RANK']}: {no_descriptor}", file=sys.stderr, flush=True)
        _exit(MISTAKE)
    page = launchers_page()
    if not isinstance(error, PeerError):
        known = isinstance(error, VPipeError)
        text = f"error: {error}\n" if known else "".join(traceback.format_exception(error))
        if page is not None:
            Whereabouts(page, int(os.environ["RANK"])).fail(text)
        print(text, end="", file=sys.stderr, flush=True)
        # At once: the others have noticed and wait to learn why.
        _exit(error.exit_code if isinstance(error, VPipeError) else FAILED)
    deadline = time.monotonic() + REASON_WAIT
    while page is not None and not page.verdict and time.monotonic() < deadline:
        time.sleep(0.01)
    from vpipe.communication.heartbeat import Heartbeat  # a rank that gets a PeerError has imported it

    with _reporting:
        reason = (page.verdict if page is not None else "") or Heartbeat.failure
        if reason:
            _stop(reason)
        print(f"error: {error}", file=sys.stderr, flush=True)
        _exit(PEER_FAILED)


def _stop(reason: str) -> NoReturn:
    # Not by `print`: the main thread may be in something that has put another stream in place of stderr.
    with suppress(OSError):  # a full disk, a closed pipe
        os.write(2, f"error: stopped because {printable(reason)}\n".encode())
    _exit(PEER_FAILED)


def _exit(code: int) -> NoReturn:
    """Without the interpreter's own clean-up, which may wait for threads that wait for a rank that is gone."""
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def hold_signals() -> None:
    """From now on no signal ends this process before it has reported why it ends. For the main thread to call.

    When a rank dies, torchrun sends SIGTERM to the others; they notice its end at the same instant, and have to close
    what they hold before they can name it. So a signal only sets a limit, which a thread keeps, because the main
    thread may be deep inside a library. A process whose interpreter stands still is left to SIGKILL: our launcher sends
    it 3 s after it knows which rank failed, torchrun 30 s after SIGTERM.
    """
    if signal.getsignal(signal.SIGTERM) is _ignore:
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_end_after_signal, args=(reading,), name="signal limit", daemon=True).start()
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _END_SIGNALS:
        signal.signal(number, _ignore)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The kernel writes the signal's number into the thread's pipe."""


def _end_after_signal(reading: int) -> None:
    while (number := os.read(reading, 1)[0]) not in _END_SIGNALS:
        pass  # another signal that has a handler
    time.sleep(SIGNAL_LIMIT)
    os._exit(128 + number)  # print nothing: a full pipe may be what the main thread is stuck at
