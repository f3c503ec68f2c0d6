"""The ranks of a job as one of them sees it: its own rank, agreements with the others, channels to them."""

import json
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import permutations
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.communication.channel import HOST, Channel
from vpipe.communication.choice import (
    CUDA_IPC,
    GLOO,
    NCCL,
    NEAR,
    SHARED_MEMORY,
    STAGED,
    WANTED,
    RankLocation,
    choose_kind,
    location_of,
)
from vpipe.communication.cuda_ipc import CudaIpcChannel
from vpipe.communication.distributed import DistributedChannel, StagedChannel, gloo_group
from vpipe.communication.heartbeat import Heartbeat, connect_heartbeat
from vpipe.communication.nccl import (
    Communicators,
    NcclChannel,
    NcclWork,
    Pair,
    nccl_groups,
    prepare_environment,
)
from vpipe.communication.peers import connect_peers
from vpipe.communication.rendezvous.job import Job, join
from vpipe.communication.shared_memory import SharedMemoryChannel, connect_all
from vpipe.communication.sockets import gloo_on
from vpipe.errors import PeerError, VPipeError
from vpipe.system import faults
from vpipe.system.device import local_rank
from vpipe.system.environment import IDLE
from vpipe.system.network import LOOPBACK, own_address

T = TypeVar("T")

Gather = Callable[[str, Any], list[Any]]

ANYONE = -1
"""In place of a peer: the rank waits for whoever is missing."""


class World(ABC):
    """The ranks of a job, seen by one of them."""

    def __init__(
        self, rank: int, size: int, local_rank: int | None, exclusive: AbstractContextManager[Any]
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        """Among the ranks of its host; None: its launcher does not say."""
        self.exclusive = exclusive
        self.gathering: tuple[str, int, float] | None = None
        """The gather in which this rank waits: its name, the rank that it waits for or ANYONE, and since when."""
        self._gathers: Counter[str] = Counter()
        self.thread_channels: dict[int, Channel] = {}
        """To all others, for threads beside the rank's own; empty if there are none for this device."""

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Everybody's value, in order of rank. For agreements at the start, not for the steady state."""
        self._gathers[name] += 1
        self.gathering = (name, ANYONE, perf_counter())
        gathered = self._gather(name, self._gathers[name], value)
        self.gathering = None
        return gathered

    def once(self, name: str, of: Any, make: Callable[[], T]) -> T:
        """What `make` returns; ranks that are threads share it where `of` is equal. Every rank calls it as often."""
        return make()

    @abstractmethod
    def _gather(self, name: str, number: int, value: Any) -> list[Any]:
        """Everybody's value of the gather with this name and number."""

    @abstractmethod
    def publish(self, name: str, value: Any) -> None:
        """Let the others read this rank's value. Like `published`, it waits for nobody, and may be called by another
        thread while this rank waits in `all_gather`."""

    @abstractmethod
    def published(self, name: str, rank: int) -> Any:
        """The value that a rank has published, or None as long as it has not."""

    @abstractmethod
    def channels(self, buffer: int, device: torch.device = HOST) -> dict[int, Channel]:
        """One channel to each other rank, for tensors of this device and of the host."""

    def connect(self, pairs: Iterable[Pair], groups: Iterable[tuple[int, ...]]) -> None:  # noqa: B027
        """Connect these (sending, receiving) ranks, and these groups of ranks that add up tensors; every rank calls it
        once, after `channels`, with the pairs and groups of all ranks."""

    def connect_streams(self, name: str, peers: Collection[int], gather: Gather) -> dict[int, socket.socket]:
        """A connection to each of these peers, for files. `gather` is called once by every rank, with this name."""
        raise AssertionError("these ranks are on one host")

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> NcclWork | None:
        """Begin to replace the tensor by its sum over the ranks; None if only the channels can do it."""
        return None

    def ranks_here(self) -> list[int]:
        """The ranks on this rank's host; known once there are channels."""
        return list(range(self.size))

    def hosts(self) -> list[Hashable]:
        """The host of each rank, as far as messages between hosts are treated in another way; known once there are
        channels."""
        return [None] * self.size

    def close(self) -> None:  # noqa: B027
        """End the connections."""


def agree(world: World, name: str, make: Callable[[], T]) -> T:
    """What `make` returns, unless it fails anywhere: then every rank raises and none is left waiting."""
    mistake: Exception | None = None
    try:
        made = make()
    except Exception as error:
        mistake = error
    mistakes = world.all_gather(name, None if mistake is None else f"{type(mistake).__name__}: {mistake}")
    if mistake is not None:
        raise mistake
    for rank, message in enumerate(mistakes):
        if message is not None:
            raise PeerError(*f"stopped because rank {rank} failed: {message}".split("\n", 1))
    return made


def agree_on(world: World, name: str, mine: Any, fix: str) -> None:
    """Every rank must have the same value; the error names the first that differs from rank 0."""
    values = world.all_gather(name, mine)
    for rank, value in enumerate(values):
        if value != values[0]:
            raise PeerError(f"rank {rank} has another {name} than rank 0: {value} and {values[0]}; {fix}")


class ProcessWorld(World):
    """Processes started by torchrun (or by anything that sets its environment); alone without it."""

    def __init__(
        self,
        channel: str = "auto",
        timeout: float = 600.0,
        *,
        nccl: bool = True,
        rendezvous_limit: float | None = None,
        heartbeat_limit: float | None = None,
    ) -> None:
        """Without `nccl`, GPUs that cannot read each other's memory exchange tensors over gloo. With a rendezvous
        limit, all ranks must join within it. With a heartbeat limit, the process ends when a peer sends no heartbeat
        for so long (`heartbeat.py`)."""
        if channel not in WANTED:
            raise VPipeError(f"unknown channel {channel!r}: choose from {', '.join(WANTED)}")
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        super().__init__(rank, size, local_rank(), nullcontext())
        self._kind = channel
        self._nccl = nccl
        self._timeout = timeout
        self._gloo: dist.ProcessGroupGloo | None = None
        self._heartbeat_limit = heartbeat_limit
        self._heartbeat: Heartbeat | None = None
        self._places: list[RankLocation] = []
        self._nccl_pairs: set[Pair] = set()  # of all ranks
        self._communicators: Communicators | None = None
        self._job: Job | None = None
        self._store: dist.Store = dist.HashStore()
        faults.point("rendezvous")
        idle = int(os.environ.get(IDLE, "0"))
        if self.size > 1 or idle:
            prepare_environment(channel)
            self._job = join(self.rank, self.size, rendezvous_limit or timeout, idle)
            # Each world of a job gathers under names of its own: a script may build several pipelines.
            self._name = f"world {self._job.store.add(f'worlds of rank {self.rank}', 1)}"
            self._store = dist.PrefixStore(self._name, self._job.store)
            if rendezvous_limit is not None:
                self._job.client.gather(f"{self._name}/start", None, "the rendezvous", rendezvous_limit)
                for idle_rank in range(self.size, self.size + idle):
                    self._job.client.wait_for_idle(idle_rank, rendezvous_limit)

    def _gather(self, name: str, number: int, value: Any) -> list[Any]:
        if self._job is None:
            return [json.loads(json.dumps(value))]
        return self._job.client.gather(f"{self._name}/{name}#{number}", value, name, self._timeout)

    def publish(self, name: str, value: Any) -> None:
        self._store.set(f"published/{name}/{self.rank}", json.dumps(value))

    def published(self, name: str, rank: int) -> Any:
        key = f"published/{name}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def channels(self, buffer: int, device: torch.device = HOST) -> dict[int, Channel]:
        if self.size == 1:
            return {}
        location = location_of(device)
        location = location._replace(nccl=location.nccl and self._nccl)
        places = [RankLocation(*place) for place in self.all_gather("location", list(location))]
        self._places = places
        mine = places[self.rank]
        others = [peer for peer in range(self.size) if peer != self.rank]
        kinds = {peer: choose_kind(self._kind, mine, places[peer]) for peer in others}
        near = [peer for peer, kind in kinds.items() if kind in NEAR]
        links = connect_all(self.rank, near, self.all_gather, self._timeout)
        made: dict[int, Channel] = {}
        for peer in near:  # in order of the ranks on all of them: a trial copy waits for the other end
            if kinds[peer] == CUDA_IPC:
                across = places[peer].gpu != mine.gpu
                ipc = CudaIpcChannel(peer, buffer, self._timeout, links[peer], device, across=across)
                if ipc.try_out():
                    made[peer] = ipc
                else:
                    ipc.close()
                    kinds[peer] = choose_kind(self._kind, mine, places[peer], failed=True)
        towards = _rendezvous()
        # Every rank must take part in making a process group, also one that needs none.
        if any(self.all_gather("gloo", any(kind not in NEAR for kind in kinds.values()))):
            together = len({place.host for place in places}) == 1
            with gloo_on(LOOPBACK if together else own_address(towards)):
                store = dist.PrefixStore("gloo", self._store)
                self._gloo = gloo_group(store, self.rank, self.size, self._timeout)
            if device.type == "cpu":
                self.thread_channels = {
                    peer: DistributedChannel(peer, buffer, self._timeout, self._gloo) for peer in others
                }
        if self._heartbeat_limit is not None:
            hosts = [place.host.partition("/")[0] for place in places]
            self._heartbeat = connect_heartbeat(
                self.rank, hosts, towards, self.all_gather, self._heartbeat_limit
            )
        announcing = self._prepare_nccl(
            [peer for peer, kind in kinds.items() if kind == NCCL], towards, device
        )

        def nccl(peer: int) -> Channel:
            assert self._communicators is not None
            host = DistributedChannel(peer, buffer, self._timeout, self._gloo)
            return NcclChannel(host, announcing[peer], self._communicators, buffer)

        make: dict[str, Callable[[int], Channel]] = {
            SHARED_MEMORY: lambda peer: SharedMemoryChannel(peer, buffer, self._timeout, links[peer]),
            GLOO: lambda peer: DistributedChannel(peer, buffer, self._timeout, self._gloo),
            STAGED: lambda peer: StagedChannel(peer, buffer, self._timeout, self._gloo, device),
            NCCL: nccl,
        }
        return {peer: made[peer] if peer in made else make[kind](peer) for peer, kind in kinds.items()}

    def _prepare_nccl(
        self, peers: list[int], towards: tuple[str, int], device: torch.device
    ) -> dict[int, socket.socket]:
        """The sockets on which messages over NCCL are announced to these peers and by them."""
        rows = self.all_gather("nccl", peers)
        self._nccl_pairs = {(rank, peer) for rank, row in enumerate(rows) for peer in row}
        if not self._nccl_pairs:
            return {}
        make = nccl_groups(self.rank, self._store, self._timeout)
        self._communicators = Communicators(self.rank, self.size, make, device)
        with socket.create_server((own_address(towards), 0), backlog=self.size) as listener:
            links = connect_peers(self.rank, peers, listener, "announcements", self.all_gather, self._timeout)
        for link in links.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or small messages wait for more
        return links

    def connect_streams(self, name: str, peers: Collection[int], gather: Gather) -> dict[int, socket.socket]:
        with socket.create_server((own_address(_rendezvous()), 0), backlog=self.size) as listener:
            links = connect_peers(self.rank, peers, listener, name, gather, self._timeout)
        for link in links.values():
            link.settimeout(self._timeout)
        return links

    def ranks_here(self) -> list[int]:
        hosts = self.hosts()
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    def hosts(self) -> list[Hashable]:
        return [place.host for place in self._places] or [None] * self.size

    def connect(self, pairs: Iterable[Pair], groups: Iterable[tuple[int, ...]]) -> None:
        if self._communicators is not None:
            groups = set(groups)
            native = set(filter(self._reduces_by_nccl, groups))
            exchanging = {pair for ranks in groups - native for pair in permutations(ranks, 2)}
            self._communicators.open({*pairs, *exchanging} & self._nccl_pairs, native)

    def _reduces_by_nccl(self, ranks: tuple[int, ...]) -> bool:
        """Whether NCCL connects some of these ranks and can connect all: it refuses two ranks on one GPU."""
        places = [self._places[rank] for rank in ranks]
        apart = len({place.gpu for place in places}) == len(ranks)
        return apart and not self._nccl_pairs.isdisjoint(permutations(ranks, 2))

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> NcclWork | None:
        if self._communicators is None or not self._communicators.reduces(ranks):
            return None
        return self._communicators.all_reduce(tensor, ranks)

    def close(self) -> None:
        """Heartbeats end last: as long as anything here may wait, the others see that this process is alive."""
        if self._communicators is not None:
            self._communicators.close(failed=sys.exc_info()[1] is not None)
            self._communicators = None
        self._gloo = None
        self.thread_channels.clear()
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None


def _rendezvous() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
