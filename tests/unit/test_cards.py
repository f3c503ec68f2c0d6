"""The card of each rank: by its number on its host, by CUDA_VISIBLE_DEVICES, and never one for two by accident.

Hosts and cards are stand-ins; ranks are threads that take themselves for processes.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vpipe.communication import devices
from vpipe.communication.devices import number_on_host, take_device
from vpipe.config import RunConfig
from vpipe.errors import ConfigError, PeerError
from vpipe.launch import mps
from vpipe.pipeline.threads import run_ranks
from vpipe.system.device import LOCAL_RANK, card_identity, is_named, local_rank
from vpipe.system.environment import DEVICE
from vpipe.train import trainer


@dataclass
class Rank:
    """What a process finds."""

    host: str = "a"
    local: int | None = None
    cards: Sequence[str] = ("GPU-0", "GPU-1")
    """That it sees, which it numbers from 0."""
    wanted: str | None = None


@dataclass
class Machine:
    ranks: Sequence[Rank] = ()
    here: Any = field(default_factory=threading.local)
    sharing: list[int] = field(default_factory=list)
    """How many ranks share the cores of its host, of each rank."""

    def take(self, *ranks: Rank) -> list[str]:
        """The cards that the ranks take."""

        def work(world: Any) -> str:
            self.here.rank = rank = ranks[world.rank]
            world.local_rank = rank.local
            return rank.cards[take_device(world, rank.wanted).index]

        return run_ranks(len(ranks), work)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()

    def choose(wanted: str | None, number: int) -> torch.device:
        given = None if wanted is None else torch.device(wanted).index
        return torch.device("cuda", number % len(made.here.rank.cards) if given is None else given)

    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.setattr(devices, "host_identity", lambda: made.here.rank.host + "/boot")
    monkeypatch.setattr(devices, "choose_device", choose)
    monkeypatch.setattr(devices, "card_identity", lambda device: made.here.rank.cards[device.index])
    monkeypatch.setattr(devices, "os", SimpleNamespace(getpid=lambda: id(made.here.rank)))
    monkeypatch.setattr(devices, "bind_to_gpu", lambda device: None)
    monkeypatch.setattr(devices, "share_compile_threads", lambda ranks: made.sharing.append(ranks))
    return made


def test_ranks_without_a_local_rank_are_numbered_on_their_host(machine: Machine) -> None:
    """Placed in turn on two hosts: by their global numbers 0 and 2 would both take card 0 of the first."""
    a, b = Rank("a", cards=("A0", "A1")), Rank("b", cards=("B0", "B1"))
    assert machine.take(Rank("a", cards=a.cards), b, a, Rank("b", cards=b.cards)) == ["A0", "B0", "A1", "B1"]
    assert machine.sharing == [2] * 4


def test_every_rank_sees_one_card_which_is_number_0(machine: Machine) -> None:
    assert machine.take(*(Rank(local=n, cards=(f"GPU-{n}",)) for n in range(3))) == [
        "GPU-0",
        "GPU-1",
        "GPU-2",
    ]


def test_two_ranks_that_took_one_card_are_both_named(machine: Machine) -> None:
    ranks = [Rank(local=n) for n in range(3)]
    with pytest.raises(
        PeerError,
        match=r"ranks 0 and 2 both took the GPU GPU-0 \(cuda:0 and cuda:0\) of host a: .* `machines`",
    ):
        machine.take(*ranks)


def test_one_card_under_two_numbers(machine: Machine) -> None:
    with pytest.raises(
        PeerError, match=r"ranks 0 and 1 both took the GPU GPU-7 \(cuda:0 and cuda:1\) of host a"
    ):
        machine.take(Rank(cards=("GPU-7",), local=0), Rank(cards=("GPU-6", "GPU-7"), local=1))


def test_a_card_that_was_named_for_both_is_shared(machine: Machine) -> None:
    assert machine.take(*(Rank(wanted="cuda:1") for _ in range(2))) == ["GPU-1", "GPU-1"]
    with pytest.raises(PeerError, match="ranks 0 and 1 both took"):  # for one of them only
        machine.take(Rank(wanted="cuda:1"), Rank())


def test_threads_share_their_card(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "os", SimpleNamespace(getpid=lambda: 7))
    assert machine.take(*(Rank(cards=("GPU-0",)) for _ in range(2))) == ["GPU-0", "GPU-0"]
    assert machine.sharing == []  # and their cores: they are one process


@pytest.mark.parametrize("name", LOCAL_RANK)
def test_launchers_number_the_ranks_of_a_host(name: str) -> None:
    assert local_rank({name: "3", "RANK": "9"}) == 3
    assert local_rank({"LOCAL_RANK": "1", name: "1", "SLURM_LOCALID": "0"}) == 1  # torchrun within a task
    assert local_rank({"RANK": "9"}) is None


@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [
        ([("a", 1), ("a", 0), ("b", 0)], [1, 0, 0]),
        ([("a", None), ("b", None), ("a", None)], [0, 0, 1]),
        ([("a", 0), ("a", 0)], [0, 1]),  # two processes of one task
        ([("a", 1), ("a", None)], [0, 1]),
    ],
)
def test_the_number_of_a_rank_on_its_host(ranks: list[tuple[str, int | None]], numbers: list[int]) -> None:
    assert [number_on_host(rank, ranks) for rank in range(len(ranks))] == numbers


@pytest.fixture
def devices_folder(tmp_path: Path) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2", ["2"]),
        (" 3, 1", ["3", "1"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,-1,2", ["1"]),  # CUDA ends at the first that names no GPU
        ("1,7,2", ["1"]),
        ("GPU-8932f937,GPU-1", ["GPU-8932f937", "GPU-1"]),
        ("MIG-51f2,MIG-GPU-8932f937/1/0", ["MIG-51f2", "MIG-GPU-8932f937/1/0"]),
    ],
)
def test_the_launcher_counts_the_gpus_that_ranks_will_see(
    written: str | None, seen: list[str], devices_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(mps.VISIBLE, raising=False)
    if written is not None:
        monkeypatch.setenv(mps.VISIBLE, written)
    assert mps.visible_gpus(devices_folder) == seen
    assert mps.count_gpus(devices_folder) == len(seen)


def test_a_host_without_cards_has_none_whatever_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mps.VISIBLE, "GPU-8932f937")
    assert mps.visible_gpus(tmp_path) == []


def test_machines_numbers_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mps.VISIBLE, "5,GPU-1")
    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.setattr(mps, "count_gpus", lambda: 2)
    assert mps.gpus_of(RunConfig(machines=["localhost:1", "localhost:0"])) == [1, 0]
    with pytest.raises(
        ConfigError,
        match=r"names GPU 5, and this host has 2 \(CUDA_VISIBLE_DEVICES is '5,GPU-1'\): name 0 to 1",
    ):
        mps.gpus_of(RunConfig(machines=["localhost:5", "localhost:0"]))


@pytest.mark.parametrize(
    ("written", "renumbered"),
    [("6", "0"), ("6,2", "0,1"), ("GPU-8932f937", "GPU-8932f937"), ("3, GPU-1", "0,GPU-1")],
)
def test_clients_of_the_daemon_name_gpus_as_it_numbers_them(written: str, renumbered: str) -> None:
    assert mps._renumbered({mps.VISIBLE: written}) == {mps.VISIBLE: renumbered}
    assert mps._renumbered({}) == {}


@pytest.mark.parametrize(
    ("count", "gpu", "found"),
    [
        (0, 0, None),  # no GPU: `machines` only counts the ranks
        (2, 1, "cuda:1"),
        (1, 3, None),  # one visible card for each rank, whatever its number is on the host
    ],
)
def test_machines_names_the_card_of_a_rank_of_torchrun(
    count: int, gpu: int, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    config = RunConfig(machines=["localhost:0", f"localhost:{gpu}"])
    assert trainer.named_gpu(config, 1) == found
    assert trainer.named_gpu(RunConfig(stages=2), 1) is None


def test_machines_names_a_card_that_a_rank_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="machines names GPU 4 for rank 0, which sees 2: name 0 to 1"):
        trainer.named_gpu(RunConfig(machines=["localhost:4"]), 0)


@pytest.mark.parametrize(("wanted", "named"), [("cuda:1", True), ("cuda", False), (None, False)])
def test_a_card_is_named_by_its_number(
    wanted: str | None, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    assert is_named(wanted) == named
    monkeypatch.setenv(DEVICE, "cuda:0")  # by the launcher
    assert is_named(None)


def test_instances_of_one_card_are_different_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    properties: Callable[..., Any] = lambda device: SimpleNamespace(uuid="8932f937")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-51f2")
    assert card_identity(torch.device("cuda:0")) == "MIG-51f2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert card_identity(torch.device("cuda:0")) == "8932f937"
    assert card_identity(torch.device("cpu")) == ""
