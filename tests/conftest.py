"""Settings of all tests: one thread a process, and a capture that is not repeated for the same model.

torch is imported by the tests: the process that only hands them out to workers does without it.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VPIPE_CACHE"] = ""  # nothing is kept in the home of whoever runs the tests

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import drawing

if TYPE_CHECKING:
    from vpipe.graph import ModelGraph

drawing.load_profile()

PROCESSES = ("multiprocess", "faults", "end_to_end")
"""Folders whose tests share a server that processes are forked from."""
MODELS = (
    "test_graph_transparency.py",
    "test_transparency.py",
    "test_graph_build.py",
    "test_graph_blocks.py",
    "test_asynchronous.py",
    "test_policies_runtime.py",
    "test_pretrained.py",
    "test_verify.py",
)
"""Files whose tests share captured models."""


def room(file: Path) -> str:
    """Tests of one room run in one worker, so that what they share is made once."""
    if file.parent.name in PROCESSES:
        return "processes"
    return "models" if file.name in MODELS else str(file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The two large rooms come first, one for each worker; then the workers share out the other files."""
    order = {"processes": 0, "models": 1}
    items.sort(key=lambda item: order.get(room(item.path), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`: by rooms in place of files."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class RoomScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return room(Path(nodeid.split("::", 1)[0]))

    return RoomScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many tests were skipped, and why."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def captured() -> "Callable[..., ModelGraph]":
    """Ranks that are threads, and tests that use the same model, capture it once."""
    from tests import captures

    return captures.capture_once


@pytest.fixture
def capture_once(captured: "Callable[..., ModelGraph]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.pipeline.captured.capture", captured)
