"""A rank that never starts: those that did say at the rendezvous limit who is missing."""

import socket
from pathlib import Path

import pytest

from tests.end_to_end.command import vpipe
from tests.faults.runs import write_config


@pytest.mark.parametrize(
    ("rank", "missing"),
    [
        (0, "ranks 1, 2 did not come to 'the rendezvous' within 0.2 s"),
        (1, "rank 0 did not open the rendezvous at 127.0.0.1:"),
    ],
)
def test_who_is_missing_is_reported(
    rank: int, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, 3, rendezvous_limit=0.2)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))  # from now on nobody else has the port
        port = place.getsockname()[1]
        if rank == 0:
            place.listen()
        set_up = {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in set_up.items():
            monkeypatch.setenv(name, str(value))
        ended = vpipe("train", "run.yml", cwd=tmp_path, listener=place if rank == 0 else None)
    assert ended.code == 3, ended.said
    (line,) = ended.err.splitlines()
    assert line.startswith(f"error: {missing}")
