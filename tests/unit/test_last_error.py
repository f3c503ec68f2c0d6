"""Last words: a rank that fails speaks before a signal ends it, and a signal ends it all the same if it does not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

BEGIN = """
import ctypes, os, signal
from vpipe.errors import VPipeError
from vpipe.launch import last_error
from vpipe.launch.last_error import hold_signals
from vpipe.launch.rank import fail

last_error.TO_SPEAK = 1000.0  # a process that gets no processor for a while may speak all the same

def signalled(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
"""


def ended(script: str) -> tuple[int, str]:
    """The exit code of a process that does this, and what it complained of."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run(
        [sys.executable, "-c", BEGIN + script], env=environment, capture_output=True, text=True
    )
    return found.returncode, found.stderr


def test_it_speaks_before_it_ends() -> None:
    held = "hold_signals(); hold_signals(); signalled(); signalled(signal.SIGINT)\n"
    assert ended(held + "fail(VPipeError('this is why'))") == (2, "error: this is why\n")


def test_failing_holds_signals_by_itself() -> None:
    mistake = """
class Mistake(VPipeError):
    def __str__(self):
        signalled()
        return "this is why"
fail(Mistake())
"""
    assert ended(mistake) == (2, "error: this is why\n")


def test_who_does_not_come_to_speak_is_ended_inside_a_library_too() -> None:
    stuck = """
last_error.TO_SPEAK = 0.2
signal.signal(signal.SIGUSR1, lambda *_: None)
hold_signals()
signalled(signal.SIGUSR1)  # sets no limit
signal.sigtimedwait([], 0.5)
os.write(2, b"still there")
signalled()
ctypes.CDLL(None).sleep(1_000_000)
"""
    assert ended(stuck) == (128 + signal.SIGTERM, "still there")
