"""Who takes part: this process's rank, the others, and how it reaches them."""

import json
import os
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from vpipe.communication.channel import Channel
from vpipe.communication.distributed import DistributedChannel
from vpipe.communication.shared_memory import connect_all
from vpipe.errors import PeerError, VPipeError

T = TypeVar("T")


class World(Protocol):
    rank: int
    size: int
    local_rank: int
    exclusive: AbstractContextManager[Any]

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Everybody's value, in order of rank. For agreements at the start, not for the steady state."""

    def channels(self, buffer: int) -> dict[int, Channel]:
        """One channel to each other rank."""

    def close(self) -> None: ...


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
            raise PeerError(f"stopped because rank {rank} failed: {message}")
    return made


def agree_on(world: World, name: str, mine: Any, fix: str) -> None:
    """Every rank must have the same value; the error names the first that differs from rank 0."""
    values = world.all_gather(name, mine)
    for rank, value in enumerate(values):
        if value != values[0]:
            raise PeerError(f"rank {rank} has another {name} than rank 0: {value} and {values[0]}; {fix}")


class ProcessWorld:
    """Processes started by torchrun (or by anything that sets its environment); alone without it."""

    def __init__(self, channel: str = "auto", timeout: float = 600.0) -> None:
        if channel not in ("auto", "gloo", "shared_memory"):
            raise VPipeError(f"unknown channel {channel!r}: choose auto, gloo or shared_memory")
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.exclusive: AbstractContextManager[Any] = nullcontext()
        self._kind = channel
        self._timeout = timeout
        self._meetings: Counter[str] = Counter()
        self._owns_group = False
        self._store = self._open_store()

    def _open_store(self) -> dist.Store:
        if self.size == 1:
            return dist.HashStore()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = _job_store(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), self.rank, self.size, attempt
        )
        store.set_timeout(timedelta(seconds=self._timeout))
        # Each world of a job meets under names of its own: a script may build several pipelines.
        nth = store.add(f"vpipe/worlds/{self.rank}", 1)
        return dist.PrefixStore(f"vpipe/{attempt}/{nth}", store)

    def all_gather(self, name: str, value: Any) -> list[Any]:
        self._meetings[name] += 1
        place = f"{name}#{self._meetings[name]}"
        self._store.set(f"{place}/{self.rank}", json.dumps(value))
        values = []
        for rank in range(self.size):
            try:
                values.append(json.loads(self._store.get(f"{place}/{rank}")))
            except (RuntimeError, dist.DistStoreError) as error:
                raise PeerError(f"rank {rank} did not come to {name!r} within {self._timeout:g} s") from error
        return values

    def channels(self, buffer: int) -> dict[int, Channel]:
        if self.size == 1:
            return {}
        hosts = self.all_gather("host", _host())
        here = [r for r in range(self.size) if r != self.rank and hosts[r] == hosts[self.rank]]
        if self._kind == "gloo":
            here = []
        elif self._kind == "shared_memory" and len(here) < self.size - 1:
            raise PeerError("channel shared_memory needs all ranks on one host: use channel='auto' or 'gloo'")
        near = connect_all(self.rank, here, self.all_gather, buffer, self._timeout)
        far = [r for r in range(self.size) if r != self.rank and r not in near]
        # Every rank must take part in making a process group, also one that needs none.
        if any(self.all_gather("gloo", bool(far))) and not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("gloo", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self._timeout),
            )
            self._owns_group = True
        return {**near, **{peer: DistributedChannel(peer, buffer, self._timeout) for peer in far}}

    def close(self) -> None:
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False


@lru_cache(maxsize=1)
def _job_store(address: str, port: int, rank: int, size: int, attempt: str) -> dist.TCPStore:
    """The store of the job. It lives as long as the process: a world that ends may be followed by another,
    and a rank that is early must not meet the others at a store that is about to close.
    """
    served = dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(address, port, size, is_master=rank == 0 and not served, multi_tenant=True)


def _host() -> str:
    """Equal for ranks that can share memory: the same kernel and the same network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        boot, namespace = "", ""
    return f"{socket.gethostname()}/{boot}/{namespace}"
