"""The start of a process: its phases add up, and the collector is as it was afterwards."""

import gc
import json
import time

import pytest

from vpipe.system import start
from vpipe.system.start import Phases, collector_off, launchers_phases, phase_table, process_began


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(start.time, "monotonic", lambda: now[0])
    return now


def test_phases_follow_each_other_and_add_up(clock: list[float]) -> None:
    phases = Phases("import", since=97.0, before={"launch": 0.5})
    phases.begin("build")
    clock[0] += 2
    phases.end()
    clock[0] += 40  # nobody's
    phases.include({"capture": 4.0, "build": 1.0})
    phases.begin("first update")
    clock[0] += 10
    assert phases.running
    phases.end()
    phases.move("compile", 8.0)
    assert not phases.running
    expected = {
        "launch": 0.5,
        "import": 3.0,
        "build": 3.0,
        "capture": 4.0,
        "compile": 8.0,
        "first update": 2.0,
    }
    assert phases.seconds == expected
    assert list(phases.seconds) == list(expected)
    assert phase_table(phases.seconds).splitlines()[-1] == "first update after   20.50 s"


def test_a_rank_knows_the_phases_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launchers_phases() == {}
    monkeypatch.setenv(start.VARIABLE, json.dumps({"launch": 0.5, "plan": 2}))
    assert launchers_phases() == {"launch": 0.5, "plan": 2.0}


def test_this_process_began_before_now() -> None:
    assert 0 <= time.monotonic() - process_began() < 24 * 3600


def test_the_collector_is_off_inside_and_as_before_afterwards() -> None:
    assert gc.isenabled()
    with collector_off(), collector_off():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
