"""NCCL's rules for hosts, kept without a GPU: a stand-in for process groups of NCCL whose ranks are threads.

- The first use of a communicator joins the hosts of its ranks: each blocks until the others come.
- A communicator is one queue for each rank, over both directions. A transfer ends when the head of one queue is a send
  and the head of the other a receive of as many elements; an all-reduce when it is the head of every queue.
- Nothing is buffered: a send reads its tensor when it meets its receive.
- A wait with a limit blocks the host in NCCL; it is recorded.

A wait without a limit blocks here, where NCCL lets the stream wait. What follows on a stream, sends and receives
included, comes behind that wait, so the order of all transfers is the same.

A deadlock is found without a clock: every rank waits, and nothing that any of them waits for is there.
"""

from __future__ import annotations

import select
import socket
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import combinations, product
from typing import Any, TypeVar

import torch
from torch import Tensor

from vpipe.communication import HOST, Channel, InProcessHub, InProcessWorld, Key
from vpipe.communication.in_process import InProcessChannel, _Mailbox
from vpipe.communication.nccl import Communicators, NcclChannel, NcclWork
from vpipe.errors import PeerError
from vpipe.pipeline.threads import run_ranks

T = TypeVar("T")
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"minibatches": 4},
    "1f1b": {"minibatches": 4},
    "interleaved": {"minibatches": 4, "chunks": 2},
    "zb-h1": {"minibatches": 4},
    "zb-v": {"minibatches": 4},
    "pipedream": {},
    "2bw": {},
}
"""All of them, with what they need."""
STREAMS = 64
"""More than a small model has."""
LOOK = 0.02
"""Seconds after which a rank that waits looks again whether anybody can go on."""


class DeadlockError(AssertionError):
    pass


class Waits:
    """What each rank waits for, and whether any of it is there."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ended: set[int] = set()
        self.found = ""
        self.lock = threading.Lock()
        """Held while anybody looks; whoever makes something not there any more holds it too."""
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}

    @contextmanager
    def of(self, rank: int, ready: Callable[[], bool], what: str) -> Iterator[Callable[[], None]]:
        """Yields a function that raises if nobody can go on."""
        with self.lock:
            self._waiting[rank] = (ready, what)
        try:
            yield self._look
        finally:
            with self.lock:
                self._waiting.pop(rank, None)

    def end(self, rank: int) -> None:
        with self.lock:
            self.ended.add(rank)

    def _look(self) -> None:
        with self.lock:
            stuck = len(self._waiting) + len(self.ended) == self.size
            if not self.found and stuck and not any(ready() for ready, _ in self._waiting.values()):
                whats = (f"rank {rank} waits for {what}" for rank, (_, what) in sorted(self._waiting.items()))
                self.found = "; ".join(whats)
            if self.found:
                raise DeadlockError(self.found)


class Operation:
    """A transfer or an all-reduce that was posted: torch calls it a work."""

    def __init__(self, communicator: _Communicator, rank: int, kind: str, tensor: Tensor) -> None:
        self.communicator = communicator
        self.rank = rank
        self.kind = kind
        self.tensor = tensor
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        nccl = self.communicator.nccl
        if timeout is not None:
            nccl.host_waits += 1
        nccl.wait(self.rank, lambda: self.done, f"the {self.kind} on {self.communicator.name}")
        return True


class _Communicator:
    """Between some ranks of a group."""

    def __init__(self, nccl: FakeNccl, name: str, ranks: Sequence[int]) -> None:
        self.nccl = nccl
        self.name = name
        self.ranks = tuple(ranks)
        self.joined: set[int] = set()
        self.queues: dict[int, deque[Operation]] = {rank: deque() for rank in ranks}
        self.posted: dict[int, list[str]] = {rank: [] for rank in ranks}
        """The kinds of all operations, in order."""

    def post(self, rank: int, kind: str, tensor: Tensor) -> Operation:
        nccl = self.nccl
        with nccl.changed:
            if rank not in self.joined:
                self.joined.add(rank)
                nccl.joins.append((rank, self.name))
                nccl.changed.notify_all()
        nccl.wait(rank, lambda: len(self.joined) == len(self.ranks), f"the others to join {self.name}")
        with nccl.changed:
            operation = Operation(self, rank, kind, tensor)
            self.queues[rank].append(operation)
            self.posted[rank].append(kind)
            while self._run_heads():
                nccl.changed.notify_all()
        return operation

    def _run_heads(self) -> bool:
        if not all(self.queues.values()):
            return False
        heads = [queue[0] for queue in self.queues.values()]
        kinds = sorted(head.kind for head in heads)
        if kinds != ["receive", "send"] and kinds != ["all-reduce"] * len(heads):
            return False  # for ever
        same = {(head.tensor.numel(), head.tensor.dtype) for head in heads}
        assert len(same) == 1, f"{self.name}: {kinds} of different sizes: {same}"
        if kinds[0] == "all-reduce":
            total = torch.stack([head.tensor for head in heads]).sum(0)
            for head in heads:
                head.tensor.copy_(total)
        else:
            source, target = sorted(heads, key=lambda head: head.kind, reverse=True)
            target.tensor.copy_(source.tensor.reshape(target.tensor.shape))
        for queue in self.queues.values():
            queue.popleft().done = True
        return True


class FakeNccl:
    """All communicators of a job."""

    def __init__(self, size: int) -> None:
        self.waits = Waits(size)
        self.changed = threading.Condition()
        self.communicators: dict[tuple[str, tuple[int, ...]], _Communicator] = {}
        self.joins: list[tuple[int, str]] = []
        """Who joined which communicator, in order."""
        self.host_waits = 0
        """Waits that would have blocked a host."""
        self.closed: dict[tuple[int, str], str] = {}
        self.broken = False

    def group(self, name: str, ranks: Sequence[int], rank: int) -> FakeGroup:
        return FakeGroup(self, name, ranks, rank)

    def communicator(self, name: str, ranks: Sequence[int]) -> _Communicator:
        key = (name, tuple(ranks))
        with self.changed:
            if key not in self.communicators:
                self.communicators[key] = _Communicator(self, f"{name} {key[1]}", ranks)
            return self.communicators[key]

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        with self.waits.of(rank, ready, what) as look, self.changed:
            while not ready():
                if self.broken:
                    raise PeerError(f"rank {rank} waited for {what} and another rank failed")
                look()
                self.changed.wait(LOOK)

    def abort(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class FakeGroup:
    """One rank's process group of NCCL. As there, each pair of its ranks has a communicator for both directions."""

    def __init__(self, nccl: FakeNccl, name: str, ranks: Sequence[int], rank: int) -> None:
        self.nccl, self.name, self.ranks, self.rank = nccl, name, tuple(ranks), rank

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        return self._pair(peer).post(self.rank, "send", tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        return self._pair(peer).post(self.rank, "receive", tensors[0])

    def allreduce(self, tensors: list[Tensor]) -> Operation:
        return self.nccl.communicator(self.name, self.ranks).post(self.rank, "all-reduce", tensors[0])

    def shutdown(self) -> None:
        self.nccl.closed[self.rank, self.name] = "shut down"

    def abort(self) -> None:
        self.nccl.closed[self.rank, self.name] = "aborted"

    def _pair(self, peer: int) -> _Communicator:
        return self.nccl.communicator(self.name, sorted((self.rank, self.ranks[peer])))


class FakeHostChannel(InProcessChannel):
    """Plain numbers of threads; its waits count."""

    def __init__(self, waits: Waits, rank: int, channel: InProcessChannel) -> None:
        super().__init__(
            channel.peer, channel.buffer, channel.timeout, outbox=channel._outbox, inbox=channel._inbox
        )
        self._waits, self._rank = waits, rank

    def _wait(self, box: _Mailbox, ready: Callable[[], bool], what: str) -> None:
        with self._waits.of(self._rank, ready, f"{what}, rank {self.peer}") as look:
            while not ready() and not box.closed:
                look()
                box.changed.wait(LOOK)
        if not ready():
            raise PeerError(f"rank {self.peer} left while this rank waited for {what}")


class FakeHub(InProcessHub):
    """Threads that are joined by NCCL."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.nccl = FakeNccl(size)
        self.worlds: dict[int, FakeWorld] = {}
        self._links: dict[tuple[int, int], socket.socket] = {}
        for low, high in combinations(range(size), 2):
            self._links[low, high], self._links[high, low] = socket.socketpair()

    def join(self, rank: int) -> InProcessWorld:
        self.worlds[rank] = FakeWorld(self, rank)
        return self.worlds[rank]

    def link(self, rank: int, peer: int) -> socket.socket:
        return self._links[rank, peer]

    def abort(self, reason: str) -> None:
        self.nccl.abort()
        super().abort(reason)
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def gather(self, rank: int, name: str, value: Any) -> list[Any]:
        with self._changed:
            values = self._gathered[name]
            values[rank] = value
            self._changed.notify_all()

            def there() -> bool:
                return len(values) == self.size

            with self.nccl.waits.of(rank, there, f"the others at {name!r}") as look:
                while not there() and not self.broken:
                    look()
                    self._changed.wait(LOOK)
            if not there():
                raise PeerError(self.broken)
            return [values[r] for r in range(self.size)]


class FakeWorld(InProcessWorld):
    """A rank whose tensors go over NCCL. `made` counts the communicators that it joined before its first message."""

    hub: FakeHub
    made = 0

    def channels(self, buffer: int, device: torch.device = HOST) -> dict[int, Channel]:
        self.communicators = Communicators(self.rank, self.size, self._make_group, device)
        self.nccl_channels = {
            peer: FakeNcclChannel(
                self.hub.nccl.waits,
                self.rank,
                FakeHostChannel(self.hub.nccl.waits, self.rank, channel),
                self.hub.link(self.rank, peer),
                self.communicators,
                buffer,
            )
            for peer, channel in super().channels(buffer, device).items()
            if isinstance(channel, InProcessChannel)
        }
        return dict(self.nccl_channels)

    def connect(self, pairs: Iterable[tuple[int, int]], groups: Iterable[tuple[int, ...]]) -> None:
        self.communicators.open(pairs, groups)
        self.made = len(self.joined)

    @property
    def joined(self) -> list[str]:
        return [name for rank, name in self.hub.nccl.joins if rank == self.rank]

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> NcclWork | None:
        return self.communicators.all_reduce(tensor, ranks)

    def close(self) -> None:
        self.communicators.close(failed=sys.exc_info()[1] is not None)

    def _make_group(self, name: str, ranks: Sequence[int]) -> FakeGroup:
        return self.hub.nccl.group(name, ranks, self.rank)


class FakeNcclChannel(NcclChannel):
    """Its waits count, and it notes what it posts."""

    def __init__(self, waits: Waits, rank: int, *rest: Any) -> None:
        super().__init__(*rest)
        self._waits, self._rank = waits, rank
        self.sends: list[Key] = []
        self.receives: list[Key] = []

    def send(self, key: Key, tensor: Tensor) -> None:
        super().send(key, tensor)
        self.sends.append(key)

    def _post_next(self) -> None:
        self.receives.append(next(iter(self._announced)))
        super()._post_next()

    def _wait(self, ready: Callable[[], bool], what: str, pause: int | None = None) -> None:
        def there() -> bool:
            return ready() or self._lost or bool(select.select([self._link], [], [], 0)[0])

        with self._waits.of(self._rank, there, f"{what}, rank {self.peer}") as look:
            while not ready():
                if self._lost:
                    raise self._peer_is_gone()
                if not there():
                    look()
                    select.select([self._link], [], [], LOOK if pause is None else pause / 1000)
                with self._waits.lock:
                    self._read()


def joined_pair(buffer: int, timeout: float) -> tuple[NcclChannel, NcclChannel]:
    """Two ends in one thread, whose communicators are made."""
    nccl, hub = FakeNccl(2), InProcessHub(2, timeout)
    ends = []
    for rank, link in enumerate(socket.socketpair()):
        host = hub.join(rank).channels(buffer)[1 - rank]
        made = Communicators(rank, 2, partial(nccl.group, rank=rank), HOST)
        made.pairs = frozenset({(0, 1), (1, 0)})
        made._up, made._down = nccl.group("up", range(2), rank), nccl.group("down", range(2), rank)
        ends.append(NcclChannel(host, link, made, buffer))
    for name in ("up", "down"):
        nccl.communicator(name, (0, 1)).joined.update((0, 1))
    return ends[0], ends[1]


def run_on(hub: FakeHub, work: Callable[[Any], T]) -> list[T]:
    """What `work` returns on each rank. Raises `DeadlockError` if no rank could go on."""

    def until_end(world: InProcessWorld) -> T:
        try:
            return work(world)
        finally:
            hub.nccl.waits.end(world.rank)

    return run_ranks(hub.size, until_end, hub=hub)


# The rules that this project had for NCCL once, which no two cards could have run.


class ChannelWithCommunicatorPerStream(Channel):
    """A communicator for each stream, joined at its first message, both directions on it; receives posted as asked;
    sent tensors kept until the stream's buffer is full."""

    name = "old NCCL"
    takes_expectations = True

    def __init__(self, host: Channel, buffer: int, groups: Callable[[int], FakeGroup], numbers: bool) -> None:
        super().__init__(host.peer, buffer, host.timeout)
        self._host = self if numbers else host
        self._groups = groups
        self._sent: dict[int, deque[Operation]] = defaultdict(deque)
        self._posted: dict[Key, Operation] = {}

    @property
    def host(self) -> Channel:
        return self._host

    def send(self, key: Key, tensor: Tensor) -> None:
        under_way = self._sent[key.stream]
        while len(under_way) >= self.buffer:
            under_way.popleft().wait(timedelta(seconds=self.timeout))
        under_way.append(self._groups(key.stream).send([tensor.detach().contiguous()], self.peer, 0))

    def expect(self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> None:
        if key not in self._posted:
            tensor = torch.empty(tuple(shape), dtype=dtype)
            self._posted[key] = self._groups(key.stream).recv([tensor], self.peer, 0)

    def receive(
        self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST
    ) -> Tensor:
        self.expect(key, shape, dtype, device)
        operation = self._posted.pop(key)
        operation.wait(timedelta(seconds=self.timeout))
        return operation.tensor

    def leftovers(self) -> list[str]:
        return []

    def close(self) -> None:
        self._sent.clear()


class OldWorld(InProcessWorld):
    hub: OldHub

    def channels(self, buffer: int, device: torch.device = HOST) -> dict[int, Channel]:
        nccl, ranks = self.hub.nccl, range(self.size)
        if self.hub.warm:
            for stream, pair in product(range(STREAMS), combinations(ranks, 2)):
                nccl.communicator(f"stream {stream}", pair).joined.update(pair)
        return {
            peer: ChannelWithCommunicatorPerStream(
                FakeHostChannel(nccl.waits, self.rank, channel),
                buffer,
                lambda stream: nccl.group(f"stream {stream}", ranks, self.rank),
                self.hub.numbers,
            )
            for peer, channel in super().channels(buffer, device).items()
            if isinstance(channel, InProcessChannel)
        }


class OldHub(FakeHub):
    def __init__(self, size: int, *, warm: bool = False, numbers: bool = False) -> None:
        """`warm`: all hosts have joined all communicators; `numbers`: losses too go from card to card."""
        super().__init__(size)
        self.warm = warm
        self.numbers = numbers

    def join(self, rank: int) -> InProcessWorld:
        return OldWorld(self, rank)
