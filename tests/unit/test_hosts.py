"""Hosts of a run without a network: names, ssh's command and errors, the wire, files that travel, where ranks are."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from vpipe.communication.choice import RankLocation, choose_kind
from vpipe.config import RunConfig
from vpipe.config.code import find_module
from vpipe.config.file import check_values, read_config
from vpipe.errors import ConfigError
from vpipe.launch import mps
from vpipe.launch.agents import compare_versions
from vpipe.launch.facts import host_facts
from vpipe.launch.hosts import hosts_of
from vpipe.launch.ssh import ssh_command, why_not
from vpipe.launch.wire import Wire
from vpipe.train import same_config
from vpipe.train.carried import carried_files
from vpipe.train.host import HostAgent, LauncherLost
from vpipe.train.same_config import check_hosts


def test_ranks_of_a_host_need_not_stand_together() -> None:
    hosts = hosts_of(["localhost:0", "far.example:0", "localhost:1", "far.example:3"])
    assert [(host.name, host.ranks, host.here) for host in hosts] == [
        ("localhost", (0, 2), True),
        ("far.example", (1, 3), False),
    ]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_ssh_asks_nobody_and_takes_a_host_for_a_host() -> None:
    command = ssh_command("node1", ["/opt/my python/bin/python", "-m", "vpipe.train.host"])
    assert command[-3:-1] == ["--", "node1"]
    assert shlex.split(command[-1]) == ["/opt/my python/bin/python", "-m", "vpipe.train.host"]
    given = set(command[2:-3:2])
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes", "ForwardAgent=no"} <= given


@pytest.mark.parametrize("python", ["-c", "", "a\nb", "$(x)"])
def test_a_python_that_cannot_be_one_is_refused(python: str, tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text(yaml.safe_dump({"python": python}))
    with pytest.raises(ConfigError, match="python"):
        read_config(tmp_path / "run.yml")


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (255, "ssh: connect to host n port 22: Connection refused\n", "no ssh server answers there"),
        (255, "n: Permission denied (publickey).\n", "it does not accept your key"),
        (255, "@ REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "its host key has changed"),
        (255, "ssh: Could not resolve hostname n: Name or service not known", "its name is not known here"),
        (255, "kex_exchange_identification: read: Connection reset", "ssh failed (kex_exchange"),
        (127, "sh: 1: /x/python: not found", "there is no /x/python (sh: 1: /x/python: not found)"),
        (1, "/x/python: No module named vpipe.train.host", "/x/python has no vpipe, or another one ("),
        (1, "Traceback\nModuleNotFoundError: No module named 'pydantic'", "/x/python has no pydantic: install"),
        (-9, "", "its part of the launcher did not begin (exit code -9)"),
    ],
)  # fmt: skip
def test_what_ssh_says_becomes_one_line_with_a_fix(code: int, said: str, expected: str) -> None:
    line = why_not("n", "/x/python", code, said)
    assert line.startswith(expected)
    assert "\n" not in line
    assert ": " in line[len(expected) - 10 :]


def test_versions_are_compared_and_code_only_within_a_version() -> None:
    mine = host_facts()
    assert compare_versions(mine, mine) == []
    assert compare_versions(mine | {"vpipe": "9", "source": "?"}, mine) == [
        f"vpipe 9 and here {mine['vpipe']}: install the same version on both"
    ]
    (line,) = compare_versions(mine | {"source": "?"}, mine)
    assert line.startswith("vpipe of the same version with other code")


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    (a_reads, b_writes), (b_reads, a_writes) = os.pipe(), os.pipe()
    with closing(Wire(a_reads, a_writes)) as a, closing(Wire(b_reads, b_writes)) as b:
        yield a, b


def test_messages_travel_whole_and_what_is_none_is_skipped(wires: tuple[Wire, Wire]) -> None:
    a, b = wires
    os.write(a.writing, b"Welcome to node1!\n")
    a.send(log=[3, "x" * 300_000])  # more than a pipe holds
    a.send(end=True)
    found: list[dict[str, Any]] = []
    while len(found) < 2:
        found += b.receive(5.0)
        a.flush()
    assert found == [{"log": [3, "x" * 300_000]}, {"end": True}]


def test_an_end_that_nobody_reads_does_not_block(wires: tuple[Wire, Wire]) -> None:
    a, _ = wires
    while not a.full:
        a.send(log=[0, "x" * 100_000])
    a.flush()


def test_the_end_of_the_other_side_is_seen_after_its_last_message(wires: tuple[Wire, Wire]) -> None:
    a, b = wires
    a.send(ended={})
    a.close()
    assert b.receive(5.0) == [{"ended": {}}]
    b.receive(5.0)
    assert b.ended


def test_silence_counts_and_our_own_pauses_do_not(
    wires: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b = wires
    now = time.monotonic()
    monkeypatch.setattr("vpipe.launch.wire.time.monotonic", lambda: now)
    b.silence(10.0)
    for _ in range(11):
        now += 1.0
        silent = b.silence(10.0)
    assert silent > 10.0
    now += 60.0  # this process was stopped, and the other one perhaps with it
    assert b.silence(10.0) == 0.0


def test_the_files_of_a_run_travel_with_its_configuration(tmp_path: Path) -> None:
    """On the other host they are read again from where they are then."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    table = "rank 0,rank 1\n0F0,\n,1F0\n,1B0\n0B0,\n0STEP0,1STEP0\n"
    (here / "mine.csv").write_text(table)
    (here / "model.json").write_text('{"model_type": "gpt2"}')
    keys = {"schedule": "mine.csv", "model": "model.json", "machines": ["a:0", "b:0"], "data_dir": "text"}
    (here / "run.yml").write_text(yaml.safe_dump(keys))
    files = carried_files(read_config(here / "run.yml"))
    for name, text in files.items():
        (there / name).write_text(text)
    config = read_config(there / "run.yml")
    assert config.path(config.schedule or "").read_text() == table
    assert config.model == "config.json"
    assert config.data_dir == str(here / "text")  # it is looked for in the same place
    assert config.machines == keys["machines"]


@pytest.mark.parametrize(
    ("machines", "hosts", "problem"),
    [
        (["a:0", "b:0"], ["x", "y"], ""),
        (["a:0", "a:1"], ["x", "x"], ""),
        (["a:0", "b:0"], ["a", "b"], ""),
        (["a:0", "b:0"], ["b", "a"], "'a:0' for rank 0, which was started on b"),
        (["a:0", "b:0"], ["x", "a"], "'b:0' for rank 1, which was started on a"),
        (["a:0", "b:0"], ["x", "x"], "'a:0' for rank 0 and 'b:0' for rank 1, and they were started both on x"),
        (["a:0", "a:1"], ["x", "y"], "'a:0' for rank 0 and 'a:1' for rank 1, and they were started on two hosts"),
    ],
)  # fmt: skip
def test_ranks_of_torchrun_are_where_machines_puts_them(
    machines: list[str], hosts: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x and y have other names than those in `machines`; a and b are called so."""

    class Started:
        rank = 0

        def all_gather(self, name: str, mine: Any) -> list[Any]:
            named = [name.rpartition(":")[0] for name in machines]
            found = []
            for rank, host in enumerate(hosts):
                monkeypatch.setattr(same_config, "is_here", host.__eq__)
                found.append([f"{host}/boot/7", same_config.name_here(named, rank)])
            return found

    world: Any = Started()
    if not problem:
        check_hosts(world, RunConfig(machines=machines))
        return
    with pytest.raises(ConfigError) as error:
        check_hosts(world, RunConfig(machines=machines))
    assert problem in str(error.value)


def test_an_agent_looks_at_the_gpus_of_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VPIPE_DEVICE", raising=False)
    monkeypatch.setattr(mps, "count_gpus", lambda: 2)
    config = RunConfig(machines=["a:0", "b:7", "a:1", "a:1"])
    assert mps.gpus_of(config, [0, 2, 3]) == [0, 1, 1]
    with pytest.raises(ConfigError, match="machines names GPU 7, and this host has 2"):
        mps.gpus_of(config, [1])


def test_gloo_between_hosts_holds_for_gpus_too() -> None:
    """`distributed_backend: gloo`: no rank offers NCCL, so GPUs of two hosts go through the hosts' memory."""
    near, far = RankLocation("x/1/2", "7", "gpu 0", [], False), RankLocation("y/1/2", "7", "gpu 1", [], False)
    beside = near._replace(gpu="gpu 2")
    assert choose_kind("auto", near, far) == "staged"
    assert choose_kind("auto", near, beside) == "cuda_ipc"
    assert choose_kind("auto", near._replace(nccl=True), far._replace(nccl=True)) == "nccl"


def test_a_mistake_of_another_host_names_the_file_of_the_user(
    wires: tuple[Wire, Wire], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the copy that was brought there."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yml").write_text(yaml.safe_dump({"machines": ["a:0", "b:0"], "pretrained": "nowhere"}))
    files = carried_files(read_config(Path("mine.yml")))
    order = {"files": files, "source": "mine.yml", "environment": {}, "cwd": str(tmp_path)}
    agent = HostAgent(wires[0], -1)
    with pytest.raises(LauncherLost):
        agent._answer("ready", lambda: agent._prepare(order, tmp_path))
    expected = f"mine.yml: pretrained is '{tmp_path}/nowhere': there is no {tmp_path}/nowhere"
    assert wires[1].receive(10.0) == [{"mistake": expected}]


def test_an_agent_that_is_left_alone_ends() -> None:
    """Its wire ends before any order has come."""
    agent = subprocess.run(
        [sys.executable, "-m", "vpipe.train.host"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert b'"hello"' in agent.stdout


def test_a_module_is_found_without_being_imported(tmp_path: Path) -> None:
    (tmp_path / "mine" / "parts").mkdir(parents=True)
    for name in ("__init__.py", "nets.py", "parts/__init__.py"):
        (tmp_path / "mine" / name).write_text("raise AssertionError('imported')")
    (tmp_path / "alone.py").write_text("raise AssertionError('imported')")
    (tmp_path / "run.yml").write_text("")
    named = {
        "alone:f": "alone.py", "mine:f": "mine", "mine.nets:f": "mine", "mine.parts:f": "mine",
        "mine.other:f": None, "alone.nets:f": None, "nobody:f": None,
    }  # fmt: skip
    for written, place in named.items():
        config = check_values({"model": written, "data": "alone:f"}, tmp_path / "run.yml")
        assert find_module(config, "model") == (None if place is None else str(tmp_path / place)), written
