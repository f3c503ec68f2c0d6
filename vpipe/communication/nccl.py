"""NCCL: the communicators of a rank, and the channel that uses them.

NCCL has no tags. What two ranks post on one communicator must match in order, a send there with a receive here; the
host blocks at the first use of a communicator until its peer comes; and a transfer that is posted holds up all that
are behind it on its communicator. So:

1. Each ordered pair of ranks has a communicator of its own. torch gives each pair of a process group one, for both
   directions, so there are two groups: in `up` the lower rank of a pair sends, in `down` the higher one.
2. All of them are made before the first message, in one order on all ranks (`Communicators.open`).
3. The sender announces each message on a socket, and the receiver posts what was announced, in that order. So both
   post in the order of the sends, whatever the schedule, and a receive never waits for a send that is not posted:

       sender     post send 0F3, announce 0F3       post send 1F3, announce 1F3
       receiver                    wants 1F3: posts receive 0F3, posts receive 1F3, waits for 1F3

The receiver posts one message before it is wanted, so that its transfer runs beside what is computed. More would hold
multiprocessors of the GPU, and memory.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.communication.channel import HOST, Channel, Key
from vpipe.errors import PeerError

Pair = tuple[int, int]
"""The sending rank and the receiving one."""
MAX_CTAS = 8
"""Multiprocessors that one communicator may use: enough for a link, few beside what is computed."""
CONNECTIONS = "32"
"""Queues of work that the GPU looks at, the most there are: streams that share one wait for each other."""
ABORT_LIMIT = 5.0
"""Seconds that aborted communicators have to end."""
_abandoned: list[Any] = []  # groups after a failure, which would wait if they were freed
_PAUSE = 1
"""Milliseconds between two looks at a transfer whose end nobody reports."""
_ANNOUNCEMENT = struct.Struct("<iqq")  # stream, number, bytes


class NcclWork(Protocol):
    """A transfer under way: what is used of torch's works."""

    def wait(self) -> Any:
        """Let the current stream wait for it; the host goes on."""

    def is_completed(self) -> bool: ...


class NcclGroup(Protocol):
    """What is used of torch's ProcessGroupNCCL."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> NcclWork: ...
    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> NcclWork: ...
    def allreduce(self, tensors: list[Tensor]) -> NcclWork: ...
    def shutdown(self) -> None: ...
    def abort(self) -> None: ...


MakeGroup = Callable[[str, Sequence[int]], NcclGroup]
"""Makes the process group of this name and these ranks, of which this rank is one. It waits for nobody."""


class Communicators:
    """Those of one rank: one for each ordered pair of ranks that exchange tensors, and one for each group of ranks that
    add up gradients."""

    def __init__(self, rank: int, size: int, make: MakeGroup, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.pairs: frozenset[Pair] = frozenset()
        self._make = make
        self._up: NcclGroup | None = None
        self._down: NcclGroup | None = None
        self._groups: dict[tuple[int, ...], NcclGroup] = {}

    def open(self, pairs: Iterable[Pair], groups: Iterable[tuple[int, ...]]) -> None:
        """Make all communicators. Every rank calls it once, with the pairs and groups of all ranks.

        The host waits for its peer at each of them. As all ranks keep one order, of all that are not made yet the
        first finds both of its ranks waiting for it: no two ranks wait for each other.
        """
        self.pairs = frozenset(pairs)
        if any(self.rank in pair for pair in self.pairs):
            self._up, self._down = self._make("up", range(self.size)), self._make("down", range(self.size))
        one = torch.zeros(1, device=self.device)
        for sender, receiver in sorted(self.pairs):
            if self.rank == sender:
                self.send(one, receiver).wait()
            elif self.rank == receiver:
                self.receive(one, sender).wait()
        for number, ranks in enumerate(sorted(set(groups))):
            if self.rank in ranks:
                self._groups[ranks] = self._make(f"gradients {number}", ranks)
                self.all_reduce(one, ranks).wait()
        one.tolist()  # the connections are there when the messages have passed

    def send(self, tensor: Tensor, peer: int) -> NcclWork:
        group = self._group(self.rank, peer)
        return _posted(lambda: group.send([tensor], peer, 0), f"a message to rank {peer}")

    def receive(self, tensor: Tensor, peer: int) -> NcclWork:
        group = self._group(peer, self.rank)
        return _posted(lambda: group.recv([tensor], peer, 0), f"a message from rank {peer}")

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> NcclWork:
        """Replace the tensor by its sum over the ranks."""
        group = self._groups[ranks]
        return _posted(lambda: group.allreduce([tensor]), f"a sum over ranks {list(ranks)}")

    def reduces(self, ranks: tuple[int, ...]) -> bool:
        return ranks in self._groups

    def close(self, *, failed: bool) -> None:
        """After a failure transfers are under way that never end: they are aborted, and that is not waited for long."""
        groups = [*self._groups.values(), *filter(None, (self._up, self._down))]
        self._groups.clear()
        self._up = self._down = None
        if failed:
            _abandoned.extend(groups)
            aborting = Thread(target=_abort, args=(groups,), daemon=True)
            aborting.start()
            aborting.join(ABORT_LIMIT)
            return
        if groups and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for group in groups:
            group.shutdown()

    def _group(self, sender: int, receiver: int) -> NcclGroup:
        assert (sender, receiver) in self.pairs, f"nothing was to be sent from rank {sender} to {receiver}"
        group = self._up if sender < receiver else self._down
        assert group is not None
        return group


def _abort(groups: Sequence[NcclGroup]) -> None:
    for group in groups:
        group.abort()


def _posted(post: Callable[[], NcclWork], what: str) -> NcclWork:
    try:
        return post()
    except RuntimeError as error:  # what torch raises for NCCL's errors, and for a rank that does not come
        raise PeerError(f"NCCL could not start {what}: {str(error).splitlines()[0]}") from error


class _Sent(NamedTuple):
    stream: int
    work: NcclWork
    tensor: Tensor


class NcclChannel(Channel):
    """Tensors go from card to card, each announced on the socket; what is in host memory has a channel of its own."""

    name = "NCCL"
    takes_expectations = True

    def __init__(self, host: Channel, link: socket.socket, communicators: Communicators, buffer: int) -> None:
        super().__init__(host.peer, buffer, host.timeout)
        self._host = host
        self._link = link
        self._link.setblocking(False)
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._communicators = communicators
        self._sent: deque[_Sent] = deque()  # not known to be done
        self._untaken: Counter[int] = Counter()  # of these, by stream
        self._unread = b""
        self._announced: dict[Key, int] = {}  # bytes of what the peer has posted and we have not, in order
        self._posted: dict[Key, tuple[NcclWork | None, Tensor]] = {}  # not taken yet
        self._lost = False

    @property
    def host(self) -> Channel:
        return self._host

    def send(self, key: Key, tensor: Tensor) -> None:
        self._let_go()
        if self._untaken[key.stream] >= self.buffer:
            self._wait(lambda: self._has_room(key.stream), f"room to send {key}", _PAUSE)
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)  # NCCL does not know all types
        if data.numel():
            self._sent.append(_Sent(key.stream, self._communicators.send(data, self.peer), data))
            self._untaken[key.stream] += 1
        self._announce(_ANNOUNCEMENT.pack(*key, data.numel()))

    def expect(self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> None:
        self._post_ahead()

    def receive(
        self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST
    ) -> Tensor:
        self._let_go()
        if key not in self._posted:
            self._wait(lambda: key in self._announced, f"message {key}")
            while key not in self._posted:
                self._post_next()
        work, data = self._posted.pop(key)
        if work is not None:
            work.wait()
        self._post_ahead()
        return data.view(dtype).view(tuple(shape))

    def confirm(self, key: Key) -> None:
        self._let_go()

    def leftovers(self) -> list[str]:
        self._let_go()
        self._read()
        return [
            *(f"{key} from rank {self.peer} was not taken" for key in (*self._announced, *self._posted)),
            *self._host.leftovers(),
        ]

    def close(self) -> None:
        self._link.close()
        self._sent.clear()
        self._announced.clear()
        self._posted.clear()
        self._host.close()

    def _let_go(self) -> None:
        """Free the tensors that have been sent: they are done in the order in which they were posted."""
        while self._sent and self._sent[0].work.is_completed():
            self._untaken[self._sent.popleft().stream] -= 1

    def _has_room(self, stream: int) -> bool:
        self._let_go()
        return self._untaken[stream] < self.buffer

    def _post_ahead(self) -> None:
        self._read()
        if self._announced and not self._posted:
            self._post_next()

    def _post_next(self) -> None:
        """Post the receive of the first message that was announced."""
        key = next(iter(self._announced))
        count = self._announced.pop(key)
        data = torch.empty(count, dtype=torch.uint8, device=self._communicators.device)
        work = self._communicators.receive(data, self.peer) if count else None
        self._posted[key] = (work, data)

    def _announce(self, message: bytes) -> None:
        while message:
            try:
                message = message[self._link.send(message) :]
            except BlockingIOError:  # as many announcements are unread as a socket holds
                self._wait(self._is_writable, "room in the socket", _PAUSE)
            except OSError as error:
                raise self._peer_is_gone() from error

    def _is_writable(self) -> bool:
        return bool(select.select([], [self._link], [], 0)[1])

    def _wait(self, ready: Callable[[], bool], what: str, pause: int | None = None) -> None:
        """Wait until it is there, reading what arrives; with a pause, nobody reports it and it is looked for."""
        deadline = time.monotonic() + self.timeout
        self._read()
        while not ready():
            if self._lost:
                raise self._peer_is_gone()
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerError(f"waited {self.timeout:g} s for rank {self.peer}: {what}")
            self._poll.poll(left * 1000 if pause is None else pause)
            self._read()

    def _read(self) -> None:
        """Take in the announcements that have arrived."""
        while not self._lost:
            try:
                received = self._link.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                received = b""
            self._lost = not received  # what was announced before may still be received
            self._unread += received
        whole = len(self._unread) // _ANNOUNCEMENT.size * _ANNOUNCEMENT.size
        for stream, number, count in _ANNOUNCEMENT.iter_unpack(self._unread[:whole]):
            self._announced[Key(stream, number)] = count
        self._unread = self._unread[whole:]

    def _peer_is_gone(self) -> PeerError:
        return PeerError(
            f"rank {self.peer} closed its connection: it ended or was killed; see its own output"
        )


def prepare_environment(channel: str) -> None:
    """Set what CUDA reads when it starts, where NCCL is certain to be used. What the user has set is left.

    A kernel of NCCL runs until its peer comes. A kernel that CUDA loads at its first use may have to wait until the GPU
    is idle: then neither goes on. So kernels are loaded at the start.
    """
    several_hosts = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]) != os.environ["WORLD_SIZE"]
    if channel == "nccl" or (several_hosts and channel == "auto"):
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", CONNECTIONS)


def nccl_groups(rank: int, store: dist.Store, timeout: float) -> MakeGroup:
    """Process groups of our own: those of the user, and torch's default group, are not touched."""

    def make(name: str, ranks: Sequence[int]) -> NcclGroup:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        options.is_high_priority_stream = True
        options.config.max_ctas = MAX_CTAS
        options.group_name = f"vpipe {name}"
        options.global_ranks_in_group = list(ranks)
        prefix = dist.PrefixStore(f"nccl/{name}", store)
        group: Any = dist.ProcessGroupNCCL(prefix, list(ranks).index(rank), len(ranks), options)
        return cast(NcclGroup, group)

    return make
