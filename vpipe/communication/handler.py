"""The rank's communication: named tensors, tagged by minibatch, over one channel to each peer."""

from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import partial
from itertools import permutations
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vpipe.communication.all_reduce import (
    AllReduce,
    BackgroundAllReduce,
    ExchangedAllReduce,
    Messages,
    NativeAllReduce,
    exchange,
)
from vpipe.communication.channel import HOST, Channel, Key
from vpipe.communication.compression import (
    NONE,
    UNCOMPRESSED,
    Compression,
    LinkCompression,
    pack,
    unpack,
    wire_form,
)
from vpipe.communication.error_feedback import ErrorFeedback
from vpipe.communication.world import World

BUFFERED_MESSAGES = 8
"""Messages of one tensor that may be sent before the first is received."""

Waiting = tuple[str, str, int, int, float]
"""A wait of the rank: for a MESSAGE or for ROOM to send, the tensor's name, its number, the peer, the start time."""
MESSAGE, ROOM = "message", "room"


class CommunicationHandler:
    """Sends and receives tensors by name. Names are registered on every rank in the same order.

    Each name has two streams, forward (activations) and backward (gradients), numbered by minibatch.
    Values of the model and their gradients are compressed on the way to other hosts, if that is wanted.
    """

    def __init__(
        self,
        world: World,
        buffer: int = BUFFERED_MESSAGES,
        device: torch.device = HOST,
        compression: LinkCompression = LinkCompression(),  # noqa: B008 - it cannot change
    ) -> None:
        self.world = world
        self.device = device
        self.rank = world.rank
        self.world_size = world.size
        self.local_rank = world.local_rank
        self.tensor_tags: dict[str, int] = {}
        self.bytes_sent = 0
        self.bytes_received = 0
        self.waited = 0.0  # seconds spent in waiting for messages
        self.waiting: Waiting | None = (
            None  # read by the rank's watch; after a failure, the operation that failed
        )
        self._channels: dict[int, Channel] = world.channels(buffer, device)
        self._hosts = world.hosts()
        self._apart = {rank for rank, host in enumerate(self._hosts) if host != self._hosts[self.rank]}
        self._modes = {peer: compression.between(self.rank, peer) for peer in self._apart}
        self._replicas_mode = compression.default.replicas
        self._compressible: set[str] = set()
        self.takes_expectations = any(channel.takes_expectations for channel in self._channels.values())
        self._in_threads: dict[str, BackgroundAllReduce] = {}  # the newest sum of each name
        self._unreleased: dict[Hashable, list[tuple[Channel, Key]]] = {}

    def open(self, pairs: Iterable[tuple[int, int]], groups: Collection[tuple[int, ...]] = ()) -> None:
        """Connect what has to be connected before the first message. Called once, by every rank.

        `pairs` are the (sending, receiving) ranks between which tensors of the device go, `groups` the lists of ranks
        that add up tensors: those of all ranks, the same on each.
        """
        exchanging = {ranks for ranks in groups if self.error_feedback(ranks) is not None}
        between = {pair for ranks in exchanging for pair in permutations(ranks, 2)}
        self.world.connect({*pairs, *between}, set(groups) - exchanging)

    def register_tensor(self, name: str, *, compressible: bool = False) -> None:
        self.tensor_tags.setdefault(name, len(self.tensor_tags))
        if compressible:
            self._compressible.add(name)

    def send(
        self,
        tensor_name: str,
        tensor: Tensor,
        minibatch: int,
        to: int,
        *,
        backward: bool = False,
        host: bool = False,
    ) -> None:
        """Send a tensor that lies on this rank's device, or in host memory."""
        mode, _, _ = self._wire_form(tensor_name, to, backward, tensor.shape, tensor.dtype)
        if mode != NONE:
            tensor = pack(tensor, mode)
        self.bytes_sent += tensor.nbytes
        self.waiting = (ROOM, tensor_name, minibatch, to, perf_counter())
        self._channel(to, host).send(self._key(tensor_name, minibatch, backward), tensor)
        self.waiting = None

    def expect(
        self,
        tensor_name: str,
        minibatch: int,
        source: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        backward: bool = False,
    ) -> None:
        """Post a receive ahead of need."""
        _, shape, dtype = self._wire_form(tensor_name, source, backward, shape, dtype)
        self._channels[source].expect(self._key(tensor_name, minibatch, backward), shape, dtype, self.device)

    def recv(
        self,
        tensor_name: str,
        minibatch: int,
        source: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        owner: Hashable,
        backward: bool = False,
        host: bool = False,
    ) -> Tensor:
        """Wait for a tensor, which was sent with the same `host`; it may be read until `release(owner)`."""
        channel, key = self._channel(source, host), self._key(tensor_name, minibatch, backward)
        mode, sent_shape, sent_dtype = self._wire_form(tensor_name, source, backward, shape, dtype)
        started = perf_counter()
        self.waiting = (MESSAGE, tensor_name, minibatch, source, started)
        tensor = channel.receive(key, sent_shape, sent_dtype, HOST if host else self.device)
        self.waiting = None
        self.waited += perf_counter() - started
        self.bytes_received += tensor.nbytes
        self._unreleased.setdefault(owner, []).append((channel, key))
        return tensor if mode == NONE else unpack(tensor, mode, shape, dtype)

    def release(self, owner: Hashable) -> None:
        """Give back the memory of what was received for this owner: it is not read any more."""
        for channel, key in self._unreleased.pop(owner, ()):
            channel.release(key)

    def confirm(self, tensor_name: str, minibatch: int, to: int) -> None:
        """What was sent has been used there: its answer, such as its gradient, came back."""
        self._channels[to].confirm(self._key(tensor_name, minibatch, False))

    def all_reduce(
        self,
        name: str,
        number: int,
        tensor: Tensor,
        ranks: tuple[int, ...],
        feedback: ErrorFeedback | None = None,
        scale: float = 1.0,
    ) -> AllReduce:
        """Begin to add up a tensor of one dimension over the ranks; it must not be changed any more.

        With error feedback it is compressed between hosts; `scale` is what gradients are multiplied by.
        """
        work = None if feedback is not None else self.world.all_reduce(tensor, ranks)
        if work is not None:
            count = 2 * (len(ranks) - 1) * tensor.nbytes // len(ranks)
            self.bytes_sent += count
            self.bytes_received += count
            return NativeAllReduce(work, tensor)
        by_host: dict[Hashable, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._hosts[rank], []).append(rank)
        hosts = tuple(tuple(here) for here in by_host.values())
        note = partial(self._note_wait, name, number)
        there, back = self._key(name, number, False), self._key(name, number, True)
        threaded = self.world.thread_channels if len(hosts) > 1 else {}
        messages = Messages(threaded or self._channels, there, back, self.device)
        make = partial(exchange, messages, tensor, hosts, self.rank, feedback, scale)
        if not threaded:
            return ExchangedAllReduce(messages, make, note, self._count)
        found = BackgroundAllReduce(messages, make, note, self._count, self._in_threads.get(name))
        self._in_threads[name] = found
        return found

    def error_feedback(self, ranks: Iterable[int]) -> ErrorFeedback | None:
        """For the gradients that these ranks add up, if they are compressed between hosts."""
        apart = len({self._hosts[rank] for rank in ranks}) > 1
        return ErrorFeedback(self._replicas_mode) if apart and self._replicas_mode != NONE else None

    def post(self, name: str, number: int, values: Sequence[float], peers: Iterable[int]) -> None:
        """Send some plain numbers to the peers."""
        tensor = torch.tensor(values, dtype=torch.float64)
        for peer in peers:
            self._channels[peer].host.send(self._key(name, number, False), tensor)

    def expect_numbers(self, name: str, number: int, count: int, peers: Iterable[int]) -> None:
        """Post the receives of what `collect` will read: else they would wait for large messages in between."""
        for peer in peers:
            self._channels[peer].host.expect(self._key(name, number, False), (count,), torch.float64, HOST)

    def collect(self, name: str, number: int, count: int, peers: Iterable[int]) -> dict[int, list[float]]:
        """The numbers that each of the peers posted."""
        key = self._key(name, number, False)
        started = perf_counter()
        found = {}
        for peer in peers:
            self.waiting = (MESSAGE, name, number, peer, started)
            received = self._channels[peer].host.receive(key, (count,), torch.float64, HOST)
            found[peer] = received.tolist()
        self.waiting = None
        self.waited += perf_counter() - started
        return found

    @property
    def ranks_in_server(self) -> list[int]:
        """The ranks on this rank's host, itself included."""
        return self.world.ranks_here()

    @property
    def num_ranks_in_server(self) -> int:
        return len(self.ranks_in_server)

    @property
    def channel_names(self) -> dict[int, str]:
        """The transport to each of the others."""
        return {peer: channel.name for peer, channel in self._channels.items()}

    def compressions(self) -> list[Compression]:
        """Those of the links from this rank to other hosts."""
        return sorted(set(self._modes.values()) - {UNCOMPRESSED})

    def everyone(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def all_gather(self, name: str, number: int, values: Sequence[float]) -> list[list[float]]:
        """Everybody's numbers, in order of rank."""
        self.post(name, number, values, self.everyone())
        gathered: dict[int, Any] = self.collect(name, number, len(values), self.everyone())
        gathered[self.rank] = list(values)
        return [gathered[rank] for rank in range(self.world_size)]

    def leftovers(self) -> list[str]:
        """Messages and tensors that a finished run has left over: empty if the program was right."""
        held = [f"tensors received for {owner} were not released" for owner in self._unreleased]
        return held + [line for channel in self._all_channels() for line in channel.leftovers()]

    def close(self) -> None:
        for channel in self._all_channels():
            channel.close()
        self.world.close()

    def _all_channels(self) -> list[Channel]:
        return [*self._channels.values(), *self.world.thread_channels.values()]

    def _note_wait(self, name: str, number: int, peer: int | None) -> None:
        """This rank waits for a message from a peer; None: it waits no longer."""
        now = perf_counter()
        since = now if self.waiting is None else self.waiting[-1]
        self.waiting = None if peer is None else (MESSAGE, name, number, peer, since)
        if peer is None:
            self.waited += now - since

    def _count(self, messages: Messages) -> None:
        self.bytes_sent += messages.sent
        self.bytes_received += messages.received

    def _channel(self, peer: int, host: bool) -> Channel:
        channel = self._channels[peer]
        return channel.host if host else channel

    def _wire_form(
        self, tensor_name: str, peer: int, backward: bool, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[str, Sequence[int], torch.dtype]:
        modes = self._modes.get(peer, UNCOMPRESSED) if tensor_name in self._compressible else UNCOMPRESSED
        return wire_form(modes.backward if backward else modes.forward, shape, dtype)

    def _key(self, tensor_name: str, minibatch: int, backward: bool) -> Key:
        return Key(2 * self.tensor_tags[tensor_name] + backward, minibatch)
