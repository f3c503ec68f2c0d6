"""What is kept for all runs of a user: found again, bounded, and never taken from where others can write."""

import os
import threading
import time
from pathlib import Path

import pytest

from vpipe.errors import NotWrittenError
from vpipe.system import user_cache
from vpipe.system.user_cache import VARIABLE, find, keep, making

NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "made" / "cache"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def kept(name: str) -> str | None:
    file = find("things", name)
    return None if file is None else file.read_text()


def put(name: str, text: str = "text") -> None:
    keep("things", name, lambda path: Path(path).write_text(text) and None)


def test_what_was_kept_is_found(root: Path) -> None:
    assert kept("a") is None
    put("a", "one")
    put("a", "two")
    assert kept("a") == "two"
    assert kept("b") is None
    assert root.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in (root / "things").iterdir()] == ["a"]


@pytest.mark.parametrize("where", [".", "things", "things/a"])
def test_nothing_is_taken_from_where_others_can_write(root: Path, where: str) -> None:
    put("a")
    path = root / where
    before = path.stat().st_mode
    path.chmod(before | 0o020)
    assert kept("a") is None
    path.chmod(before)
    assert kept("a") == "text"
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
        assert kept("a") is None


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    put("a")
    (root / "things" / "b").symlink_to(root / "things" / "a")
    assert kept("b") is None
    (tmp_path / "link").symlink_to(root / "things")
    os.rename(root / "things", tmp_path / "moved")
    os.rename(tmp_path / "link", root / "things")
    assert kept("a") is None


def test_the_least_recently_used_goes_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate(("new", "used", "old")):
        put(name)
        os.utime(root / "things" / name, (1000 - age, 1000 - age))
    assert kept("used") == "text"
    monkeypatch.setattr(user_cache, "MOST_FILES", 2)
    put("newest")
    assert sorted(entry.name for entry in (root / "things").iterdir()) == ["newest", "used"]
    monkeypatch.setattr(user_cache, "MOST_BYTES", 100)
    put("large", "x" * 200)
    assert [entry.name for entry in (root / "things").iterdir()] == ["large"]


def test_what_cannot_be_kept_is_no_error(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        Path(path).write_text("half")
        raise NotWrittenError("the disk is full")

    keep("things", "a", fail)
    assert list((root / "things").iterdir()) == []
    (tmp_path / "file").touch()
    for value in ("", "relative", str(tmp_path / "file" / "below")):
        monkeypatch.setenv(VARIABLE, value)
        put("a")
        assert kept("a") is None


def make(log: list[str], name: str, seconds: float = 0.2) -> None:
    with making("things", "a"):
        if kept("a") is None:
            log.append(name)
            time.sleep(seconds)
            put("a", name)


def test_one_makes_what_all_need(root: Path) -> None:
    log: list[str] = []
    makers = [threading.Thread(target=make, args=(log, name)) for name in "xyz"]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(10)
    assert log == [kept("a")]
    assert [entry.name for entry in (root / "things").iterdir()] == ["a"]


def test_who_waits_in_vain_makes_it(root: Path) -> None:
    """The first cannot keep what it makes; then the others do not wait for each other."""
    began = threading.Barrier(3)
    inside = threading.Barrier(2)

    def make_nothing() -> None:
        with making("things", "a"):
            began.wait(10)
            time.sleep(0.2)

    def follow() -> None:
        began.wait(10)
        with making("things", "a"):
            inside.wait(10)

    makers = [threading.Thread(target=target) for target in (make_nothing, follow, follow)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(20)
    assert inside.n_waiting == 0
    assert not inside.broken


def test_nobody_waits_for_ever(root: Path) -> None:
    entered = threading.Event()
    leave = threading.Event()

    def hold() -> None:
        with making("things", "a"):
            entered.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(10)
    start = time.monotonic()
    with making("things", "a", patience=0.2):
        waited = time.monotonic() - start
    leave.set()
    holder.join(10)
    assert 0.2 <= waited < 5


def test_where_nothing_is_kept_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    with making("things", "a"), making("things", "a"):
        pass
