"""The cores of a rank: those of its GPU's node, unless somebody has bound it; a stand-in for /sys and /proc."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vpipe.communication.sockets import gloo_on
from vpipe.launch.local import MeetingPlace, _environment
from vpipe.launch.watch import Ranks
from vpipe.system import cores
from vpipe.system.cores import bind_to_gpu, cores_beside, share_compile_threads
from vpipe.system.environment import BIND, COMPILE_THREADS

FIRST, SECOND = "0000:17:00.0", "0000:b3:00.0"
LEFT, RIGHT = {0, 1, 4, 5}, {2, 3, 6, 7}
ALL = LEFT | RIGHT


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Two nodes of four cores, with a card each."""
    write(tmp_path / "sys/devices/system/node/node0/cpulist", "0-1,4-5")
    write(tmp_path / "sys/devices/system/node/node1/cpulist", "2-3,6-7")
    write(tmp_path / "sys/devices/system/cpu/online", "0-7")
    write(tmp_path / "sys/bus/pci/devices" / FIRST / "numa_node", "0")
    write(tmp_path / "sys/bus/pci/devices" / SECOND / "numa_node", "1")
    return tmp_path


def test_each_card_has_its_node(host: Path) -> None:
    assert cores_beside(FIRST, ALL, host) == LEFT
    assert cores_beside(SECOND, ALL, host) == RIGHT


def test_a_process_that_somebody_has_bound_stays(host: Path) -> None:
    assert cores_beside(SECOND, {0, 1}, host) is None
    assert cores_beside(SECOND, {0, 1, 2}, host) is None


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/job", "sys/fs/cgroup/job/cpuset.cpus.effective"),
        ("4:cpuset:/job", "sys/fs/cgroup/cpuset/job/cpuset.effective_cpus"),
    ],
)
def test_the_cores_of_a_cgroup_are_no_binding(host: Path, group: str, file: str) -> None:
    write(host / "proc/self/cgroup", group)
    write(host / file, "1-3")
    assert cores_beside(SECOND, {1, 2, 3}, host) == {2, 3}
    assert cores_beside(SECOND, {1, 2}, host) is None


@pytest.mark.parametrize("node", ["-1", "7", ""])
def test_a_node_that_is_not_known(host: Path, node: str) -> None:
    write(host / "sys/bus/pci/devices" / SECOND / "numa_node", node)
    assert cores_beside(SECOND, ALL, host) is None
    assert cores_beside("0000:00:00.0", ALL, host) is None


def test_a_host_with_one_node(host: Path) -> None:
    write(host / "sys/devices/system/node/node0/cpulist", "0-7")
    write(host / "sys/devices/system/node/node1/cpulist", "")
    assert cores_beside(SECOND, ALL, host) is None


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of the second node, and the calls that bind; all cores are this host's."""
    bound: list[Any] = []
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xB3, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(cores, "cores_beside", lambda address, now: {2, 3} if address == SECOND else None)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, chosen: bound.append((thread, chosen)))
    monkeypatch.delenv(BIND, raising=False)
    return bound


def test_all_threads_of_a_rank_are_bound(card: list[Any]) -> None:
    assert bind_to_gpu(torch.device("cuda:0")) == {2, 3}
    assert sorted(card) == sorted((int(thread), {2, 3}) for thread in os.listdir("/proc/self/task"))


def test_ranks_on_the_cpu_and_users_who_do_not_want_it(
    card: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bind_to_gpu(torch.device("cpu")) is None
    monkeypatch.setenv(BIND, "0")
    assert bind_to_gpu(torch.device("cuda:0")) is None
    assert card == []


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    monkeypatch.setattr("vpipe.launch.local.usable_cores", lambda: 8)
    monkeypatch.setenv(COMPILE_THREADS, "")  # so that it is restored
    monkeypatch.delenv(COMPILE_THREADS)


@pytest.mark.parametrize(("ranks", "share"), [(1, "8"), (3, "2"), (20, "1")])
def test_compilers_of_a_host_share_its_cores(
    eight_cores: None, ranks: int, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    share_compile_threads(ranks)
    assert os.environ[COMPILE_THREADS] == share
    del os.environ[COMPILE_THREADS]
    assert (
        _environment(Ranks([], ranks, Path(), []), MeetingPlace("127.0.0.1", 1, "", None))[COMPILE_THREADS]
        == share
    )


def test_a_compiler_that_is_imported_already(eight_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(compile_threads=8)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", config)
    share_compile_threads(4)
    assert config.compile_threads == 2
    monkeypatch.setenv(COMPILE_THREADS, "7")  # the user's own
    config.compile_threads = 7
    share_compile_threads(4)
    assert config.compile_threads == 7


def test_nccl_follows_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    for name in (gloo, nccl):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with gloo_on("127.0.0.1"):
        assert os.environ[gloo] == "lo"
    assert gloo not in os.environ
    assert os.environ[nccl] == "=lo"  # it is read when the first communicator is made
    monkeypatch.setenv(gloo, "ib0,ib1")
    del os.environ[nccl]
    with gloo_on("127.0.0.1"):
        assert (os.environ[gloo], os.environ[nccl]) == ("ib0,ib1", "=ib0,ib1")
    monkeypatch.setenv(nccl, "eth7")
    with gloo_on("127.0.0.1"):
        assert os.environ[nccl] == "eth7"
