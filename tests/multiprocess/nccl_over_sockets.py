"""NCCL's rules for hosts between processes, over gloo and sockets; `tests/fake_nccl.py` states them.

Each communicator has a thread that runs what was posted, one after the other. A send waits until its peer is at a
receive, and only then gives its bytes away.
"""

import socket
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from vpipe.communication import HOST, Channel, ProcessWorld
from vpipe.communication.nccl import Communicators, NcclChannel, NcclWork, Pair
from vpipe.communication.peers import connect_peers
from vpipe.communication.sockets import receive_exactly
from vpipe.system.network import LOOPBACK

JOIN, READY = b"J", b"R"


class Operation:
    """A transfer or an all-reduce that was posted."""

    def __init__(self, kind: str, tensor: Tensor) -> None:
        self.kind = kind
        self.tensor = tensor
        self.done = threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is None, "a wait with a limit blocks the host"
        return self.done.wait()


class SocketCommunicator:
    """Of this rank with some others: one for a pair; for an all-reduce the first rank adds up what the others send."""

    def __init__(self, links: Sequence[socket.socket], first: bool) -> None:
        self.links = links
        self.first = first
        self.joined = False
        self.posted: SimpleQueue[Operation] = SimpleQueue()
        for link in links:
            link.settimeout(None)

    def post(self, kind: str, tensor: Tensor) -> Operation:
        if not self.joined:
            for link in self.links:
                link.sendall(JOIN)
            for link in self.links:
                assert receive_exactly(link, 1) == JOIN
            self.joined = True
            threading.Thread(target=self._run, daemon=True).start()
        operation = Operation(kind, tensor)
        self.posted.put(operation)
        return operation

    def _run(self) -> None:
        try:
            while True:
                operation = self.posted.get()
                getattr(self, operation.kind)(operation.tensor)
                operation.done.set()
        except OSError:
            return  # the peer has left: what was posted never ends

    def send(self, tensor: Tensor) -> None:
        (link,) = self.links
        assert receive_exactly(link, 1) == READY
        link.sendall(_bytes(tensor))

    def receive(self, tensor: Tensor) -> None:
        (link,) = self.links
        link.sendall(READY)
        _fill(tensor, link)

    def all_reduce(self, tensor: Tensor) -> None:
        if self.first:
            for link in self.links:
                part = torch.empty_like(tensor)
                _fill(part, link)
                tensor += part
            for link in self.links:
                link.sendall(_bytes(tensor))
        else:
            self.links[0].sendall(_bytes(tensor))
            _fill(tensor, self.links[0])


class SocketGroup:
    """A process group of NCCL, whose connections are there: only what is posted on them waits."""

    def __init__(self, world: ProcessWorld, name: str, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = world.rank, tuple(ranks)
        peers = [rank for rank in ranks if rank != world.rank] if world.rank in ranks else []
        with socket.create_server((LOOPBACK, 0), backlog=world.size) as listener:
            self.links = connect_peers(world.rank, peers, listener, name, world.all_gather, 100.0)
        self.pairs = {peer: SocketCommunicator([link], False) for peer, link in self.links.items()}
        first = world.rank == ranks[0]
        everyone = [self.links[peer] for peer in peers] if first else [self.links[p] for p in peers[:1]]
        self.all = SocketCommunicator(everyone, first)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        return self.pairs[peer].post("send", tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        return self.pairs[peer].post("receive", tensors[0])

    def allreduce(self, tensors: list[Tensor]) -> Operation:
        return self.all.post("all_reduce", tensors[0])

    def shutdown(self) -> None:
        for link in self.links.values():
            link.shutdown(socket.SHUT_RDWR)
            link.close()

    abort = shutdown


class SocketWorld(ProcessWorld):
    """Ranks on the CPU whose tensors go over NCCL, and plain numbers over gloo."""

    def __init__(self) -> None:
        super().__init__("gloo", 100.0)

    def channels(self, buffer: int, device: torch.device = HOST) -> dict[int, Channel]:
        hosts = super().channels(buffer, device)
        with socket.create_server((LOOPBACK, 0), backlog=self.size) as listener:
            links = connect_peers(self.rank, list(hosts), listener, "announced", self.all_gather, 100.0)
        self.groups: dict[str, Any] = {}
        self.nccl = Communicators(self.rank, self.size, lambda name, _: self.groups[name], device)
        return {peer: NcclChannel(host, links[peer], self.nccl, buffer) for peer, host in hosts.items()}

    def connect(self, pairs: Iterable[Pair], groups: Iterable[tuple[int, ...]]) -> None:
        groups = sorted(set(groups))
        lists = {f"gradients {number}": ranks for number, ranks in enumerate(groups)}
        for name, ranks in ({"up": tuple(range(self.size)), "down": tuple(range(self.size))} | lists).items():
            self.groups[name] = SocketGroup(self, name, ranks)
        self.nccl.open(pairs, groups)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> NcclWork | None:
        return self.nccl.all_reduce(tensor, ranks)

    def close(self) -> None:
        self.all_gather("all done", None)  # a socket that closes takes with it what is under way
        self.nccl.close(failed=False)
        super().close()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _fill(tensor: Tensor, link: socket.socket) -> None:
    data = receive_exactly(link, tensor.nbytes)
    tensor.view(-1).copy_(torch.frombuffer(bytearray(data), dtype=tensor.dtype))
