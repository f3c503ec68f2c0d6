"""A rank's side of the supervision: it shows that it lives, and ends when the launcher says who has failed.

A thread beats on the page that the launcher watches: it stops when the process is stopped or its interpreter lock is
held. The same thread reads the verdict. The main thread has a moment to end by itself, which it does if it waits for
the rank that failed; then the thread ends the process, wherever the main thread is.
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
from pathlib import Path
from typing import NoReturn

from vpipe.errors import PeerError, VPipeError
from vpipe.launch.last_error import hold_signals
from vpipe.record.whereabouts import Whereabouts, launchers_page

LAUNCHED = "VPIPE_RUN_FOLDER"
"""Set for a rank: the folder of its run."""
LAUNCHER = "VPIPE_LAUNCHER"
"""Set for a rank: the process that started it."""

FAILED, MISTAKE, PEER_FAILED, ASKED = 1, 2, 3, 75
"""Exit codes of a rank: an exception; a user's mistake, told in one line; another rank failed; a signal asked it to
end, and it has saved a checkpoint."""

BEAT = 0.1
"""Seconds between two beats."""
TO_END = 1.0
"""Seconds that the main thread has to end by itself."""
FOR_VERDICT = 1.5
"""Seconds that a rank whose peer has gone waits to hear why."""

_saying = threading.Lock()


def end_with_launcher() -> None:
    """Be killed by the kernel if the launcher dies, however that happens."""
    faulthandler.enable()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if not Path("/proc", os.environ[LAUNCHER]).exists():
            os._exit(FAILED)  # it died before the kernel was told


def start_beating() -> None:
    """From now on the launcher may take silence for a fault: call it when the large imports are done."""
    page = launchers_page()
    if page is not None:
        place = Whereabouts(page, int(os.environ["RANK"]))
        place.beat()
        threading.Thread(target=_beat, args=(place,), name="heartbeat", daemon=True).start()


def _beat(place: Whereabouts) -> None:
    while not place.page.verdict:
        place.beat()
        time.sleep(BEAT)
    time.sleep(TO_END)
    with _saying:  # not while the main thread says it, and ends
        _stop(place.page.verdict)


def fail(error: Exception) -> NoReturn:
    """End this rank because of an error: its own, or one that another rank's end has caused."""
    hold_signals()
    if not isinstance(error, PeerError):
        if isinstance(error, VPipeError):
            print(f"error: {error}", file=sys.stderr, flush=True)
            _exit(MISTAKE)
        traceback.print_exception(error)
        _exit(FAILED)  # at once: the others have noticed and wait to hear why
    page = launchers_page()
    deadline = time.monotonic() + FOR_VERDICT
    while page is not None and not page.verdict and time.monotonic() < deadline:
        time.sleep(0.01)
    from vpipe.communication.heartbeat import Heartbeat  # whoever meets a PeerError has imported it

    with _saying:
        verdict = Heartbeat.failure if page is None else page.verdict
        if verdict:
            _stop(verdict)
        print(f"error: {error}", file=sys.stderr, flush=True)
        _exit(PEER_FAILED)


def _stop(verdict: str) -> NoReturn:
    # Not by `print`: the main thread may be in something that has put another stream in place of stderr.
    os.write(2, f"error: stopped because {verdict}\n".encode())
    _exit(PEER_FAILED)


def _exit(code: int) -> NoReturn:
    """Without the interpreter's own clean-up, which may wait for threads that wait for a rank that is gone."""
    sys.stdout.flush()
    os._exit(code)
