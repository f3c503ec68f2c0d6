"""A rank that fails reports its error before a signal ends it, and a signal ends it all the same if it does not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

BEGIN = """
import ctypes, os, signal
from vpipe.errors import VPipeError
from vpipe.launch import rank
from vpipe.launch.rank import fail, hold_signals

rank.SIGNAL_LIMIT = 1000.0  # longer than a busy machine keeps a process from its processor

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


def test_it_reports_its_error_before_it_ends() -> None:
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


def test_one_that_does_not_report_is_ended_inside_a_library_too() -> None:
    stuck = """
rank.SIGNAL_LIMIT = 0.2
signal.signal(signal.SIGUSR1, lambda *_: None)
hold_signals()
signalled(signal.SIGUSR1)  # sets no limit
signal.sigtimedwait([], 0.5)
os.write(2, b"still there")
signalled()
ctypes.CDLL(None).sleep(1_000_000)
"""
    assert ended(stuck) == (128 + signal.SIGTERM, "still there")
