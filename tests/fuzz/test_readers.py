"""Ten thousand bad files of each format: a clear error, or a file that is good after all; no traceback, no hang.

`make fuzz` reads that many and tells how long it took; the suite reads a few dozen of each.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.drawing import BAD_FILES
from tests.fuzz.readers import MAKERS, all_readers
from vpipe.errors import VPipeError

QUICK = 60
OTHERS = {"model": 40, "tokenizer": 40, "shards": 40, "manifest": 150, "metrics": 200}
"""Of formats that take longer to read, have more that can be wrong, or are mostly read all the same."""
LONGEST = 20.0 if BAD_FILES else 0.0
"""Seconds that one file may take in `make fuzz`, where the test has no limit; most take a millisecond."""
LONGEST_MESSAGE = 20_000


def refusal(read: Callable[[], Any]) -> str | None:
    """What is said of a file; None if it is good after all."""
    try:
        read()
    except VPipeError as error:
        return str(error)
    return None


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """0: without a limit."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"a file took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.timeout(0 if BAD_FILES else 240)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MAKERS)
def test_bad_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = all_readers(tmp_path)[name]()
    reported = {"refused": 0, "read": 0}

    def one(raw: bytes) -> None:
        with limited(LONGEST):
            message = refusal(lambda: reader.read(raw))
        reported["read" if message is None else "refused"] += 1
        if message is not None:
            assert message.count("\n") < reader.lines, message
            assert len(message) < LONGEST_MESSAGE

    began, count = time.process_time(), BAD_FILES or OTHERS.get(name, QUICK)
    for _ in range(2):  # a file that is good after all does not count: some more are tried
        strict = settings(
            max_examples=count,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        strict(given(reader.bad)(one))()
        count = 2 * (BAD_FILES - reported["refused"])
        if count <= 0:
            break
    assert reported["refused"]
    if BAD_FILES:
        with capsys.disabled():
            taken = time.process_time() - began
            print(
                f"\n{name}: {reported['refused']} refused, {reported['read']} read, {taken:.0f} s",
                end="",
                flush=True,
            )
