"""Checkpoints of hosts that share no folder: files come to rank 0's, and copies go to those that lack them."""

import hashlib
import socket
from collections.abc import Collection
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from vpipe.checkpoint.apart import gather_files, local_copy, ranks_apart
from vpipe.checkpoint.manifest import MANIFEST
from vpipe.errors import VPipeError
from vpipe.pipeline.threads import run_ranks


class Hosts:
    """Ranks that are threads, with a connection between each two, as processes of several hosts have."""

    def __init__(self, size: int) -> None:
        pairs = {pair: socket.socketpair() for pair in combinations(range(size), 2)}
        self._ends = {pair: ends[0] for pair, ends in pairs.items()}
        self._ends |= {(b, a): ends[1] for (a, b), ends in pairs.items()}

    def world(self, world: Any) -> Any:
        def connect(name: str, peers: Collection[int], gather: Any) -> dict[int, socket.socket]:
            gather(name, None if name.startswith("checkpoint") else world.rank)
            return {peer: self._ends[world.rank, peer] for peer in peers}

        world.connect_streams = connect
        return world


def written(folder: Path, files: dict[str, bytes]) -> dict[str, tuple[int, str]]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}


def test_files_of_other_hosts_come_to_rank_0(tmp_path: Path) -> None:
    hosts = Hosts(3)
    own = [{"a": b"x" * 3_000_000}, {"b": b"yy", "c": b""}, {"d": b"z" * 70_000}]

    def work(world: Any) -> None:
        folders = [tmp_path / str(rank) for rank in range(3)]
        parts = [written(folder, files) for folder, files in zip(folders, own, strict=True)]
        gather_files(
            hosts.world(world), "files", frozenset({1, 2}), folders[world.rank], lambda rank: parts[rank]
        )

    run_ranks(3, work)
    assert {path.name: path.read_bytes() for path in (tmp_path / "0").iterdir()} == own[0] | own[1] | own[2]


def test_a_file_that_is_damaged_on_the_way_is_found(tmp_path: Path) -> None:
    hosts, said = Hosts(2), []

    def work(world: Any) -> None:
        folder = tmp_path / str(world.rank)
        files = {} if world.rank == 0 else {"b": b"yy"}
        written(folder, files)
        try:
            gather_files(
                hosts.world(world), "files", frozenset({1}), folder, lambda rank: {"b": (2, "another hash")}
            )
        except VPipeError as error:
            said.append(str(error))

    run_ranks(2, work)
    assert said == ["b of rank 1 was damaged on the way"]


def test_ranks_without_the_checkpoint_read_a_copy(tmp_path: Path) -> None:
    """Of two ranks of a host one fetches it; it is deleted when both have read."""
    hosts = Hosts(3)
    files = {MANIFEST: b"{}", "stage-000.safetensors": b"s" * 2_000_000}
    written(tmp_path / "0", files)
    copies: dict[int, Path] = {}

    def work(world: Any) -> None:
        with local_copy(hosts.world(world), tmp_path / str(world.rank)) as path:
            copies[world.rank] = path
            assert {file.name: file.read_bytes() for file in path.iterdir()} == files
            world.all_gather("read", None)

    run_ranks(3, work)
    assert copies[0] == tmp_path / "0"
    assert copies[1] == copies[2]
    assert not copies[1].exists()


def test_where_all_see_it_nothing_travels(tmp_path: Path) -> None:
    written(tmp_path / "one", {MANIFEST: b"{}"})

    def work(world: Any) -> None:
        with local_copy(world, tmp_path / "one") as path:
            assert path == tmp_path / "one"
        assert ranks_apart(world, tmp_path) == frozenset()

    run_ranks(2, work)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_hosts_find_out_whether_they_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter("abc")
    monkeypatch.setattr("vpipe.checkpoint.apart.host_identity", lambda: next(names))

    def work(world: Any) -> None:
        folder = tmp_path / ("shared" if world.rank < 2 else "own")
        assert ranks_apart(world, folder) == {2}

    run_ranks(3, work)
    assert not list((tmp_path / "shared").iterdir())
