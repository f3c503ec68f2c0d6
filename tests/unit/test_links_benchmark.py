"""What `benchmarks/links.py` measures of the cable, here of the loopback interface."""

import socket

import pytest

from benchmarks import links


def test_the_cable_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls what `vpipe doctor --machines` uses, which no type checker sees here."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setattr(links, "PORT", free.getsockname()[1])
    monkeypatch.setattr(links, "SECOND", "127.0.0.1")
    links.listen()
    assert links.measure_cable().bandwidth > 0
