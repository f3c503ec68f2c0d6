"""The sum of a tensor over some ranks, begun at one time and finished at another.

Over NCCL it is one all-reduce. Over any other channel, with H hosts of n ranks each, the tensor has n H shares:

    inside a host     each rank sends a share to the rank of its host that adds it up       (n - 1) / n of the tensor
    between hosts     that rank sends the sum to the rank that adds up the hosts' sums,
                      and gets the whole sum back                                   2 (H - 1) / (H n) of the tensor
    inside a host     and gives it to the others of its host                                (n - 1) / n of the tensor

Together a rank sends 2 (R - 1) / R of the tensor to R - 1 others, as in a ring, and a host sends 2 (H - 1) / H of it,
however many ranks it has. On one host, or with one rank on each, there are two hops only. As each share is added up
once, in an order that the list of ranks gives, all ranks have equal sums to the last bit, in every run.

With `compress: {replicas: ...}` what goes between hosts is compressed, each share once, so that all get equal numbers.
`finish` waits until all ranks have come to it. Between hosts a thread makes all steps, beside the rank's computing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import lcm
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from vpipe.communication.channel import Channel, Key
from vpipe.communication.error_feedback import ErrorFeedback

if TYPE_CHECKING:
    from vpipe.communication.nccl import NcclWork

Hosts = tuple[tuple[int, ...], ...]
"""The ranks that take part, by host."""
Note = Callable[[int | None], object]
LOOK = 0.1
"""Seconds between two looks at what a thread waits for."""


class AllReduce(Protocol):
    def finish(self) -> Tensor:
        """The sum, in memory of its own."""


class NativeAllReduce:
    def __init__(self, work: NcclWork, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def finish(self) -> Tensor:
        self._work.wait()
        return self._tensor


class Share(NamedTuple):
    """A range of the tensor, the rank of each host that adds it up there, and the one that adds up their sums."""

    begin: int
    end: int
    by_host: tuple[int, ...]
    at: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def make_shares(size: int, hosts: Hosts) -> list[Share]:
    """As many for each rank of a host, also if hosts have different numbers of ranks."""
    rows, columns = lcm(*map(len, hosts)), len(hosts)
    bounds = [size * number // (rows * columns) for number in range(rows * columns + 1)]
    shares = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        row, column = divmod(number, columns)
        by_host = tuple(ranks[row * len(ranks) // rows] for ranks in hosts)
        shares.append(Share(begin, end, by_host, by_host[column]))
    return shares


class Messages:
    """The messages of one sum. Parts go by the stream `there`, sums by the stream `back`."""

    def __init__(self, channels: Mapping[int, Channel], there: Key, back: Key, device: torch.device) -> None:
        self.sent = 0
        self.received = 0
        self.note: Note = lambda peer: None
        """Called with the rank that is waited for, and with None when it has answered."""
        self._channels = channels
        self._keys = (there, back)
        self._device = device
        self._taken: list[tuple[Channel, Key]] = []

    def send(self, peer: int, part: Tensor, *, back: bool = False) -> None:
        if part.numel():
            self.sent += part.nbytes
            self._channels[peer].send(self._keys[back], part)

    def expect(self, peer: int, count: int, dtype: torch.dtype, *, back: bool = False) -> None:
        if count:
            self._channels[peer].expect(self._keys[back], (count,), dtype, self._device)

    def receive(self, peer: int, count: int, dtype: torch.dtype, *, back: bool = False) -> Tensor:
        """To be read until `release`."""
        if not count:
            return torch.empty(0, dtype=dtype, device=self._device)
        channel, key = self._channels[peer], self._keys[back]
        self.note(peer)
        tensor = channel.receive(key, (count,), dtype, self._device)
        self.note(None)
        self._taken.append((channel, key))
        self.received += tensor.nbytes
        return tensor

    def confirm(self, peer: int) -> None:
        self._channels[peer].confirm(self._keys[False])

    def release(self) -> None:
        for channel, key in self._taken:
            channel.release(key)


Count = Callable[[Messages], object]
"""Called when a sum is finished, by the rank's own thread."""


class _Paths(NamedTuple):
    """The shares that a rank exchanges with others, of tensors of one size."""

    shares: list[Share]
    here: Sequence[int]
    """The ranks of its host, itself included."""
    mine: list[Share]
    """Those that it adds up for its host: neighbours in the tensor."""
    whole: list[Share]
    """And of these, the ones that it adds up for all hosts."""
    near: dict[int, list[Share]]
    """Another rank of its host ▶ the shares that this one adds up there."""
    given: dict[int, list[Share]]
    """A rank of another host ▶ those of `mine` that this one adds up for all hosts."""
    taken: dict[int, list[Share]]
    """A rank of another host ▶ those of `whole` that this one adds up for its host."""


@cache
def _paths(size: int, hosts: Hosts, rank: int) -> _Paths:
    shares = make_shares(size, hosts)
    here = next(ranks for ranks in hosts if rank in ranks)
    by_rank: dict[int, list[Share]] = {other: [] for other in here}
    given: dict[int, list[Share]] = defaultdict(list)
    taken: dict[int, list[Share]] = defaultdict(list)
    for share in shares:
        by_rank[next(other for other in share.by_host if other in by_rank)].append(share)
    mine = by_rank.pop(rank)
    for share in mine:
        if share.at != rank:
            given[share.at].append(share)
        else:
            for other in share.by_host:
                if other != rank:
                    taken[other].append(share)
    whole = [share for share in mine if share.at == rank]
    return _Paths(shares, here, mine, whole, by_rank, dict(given), dict(taken))


class _Exchange:
    """The steps of one sum, on the thread that calls them."""

    def __init__(
        self, messages: Messages, tensor: Tensor, hosts: Hosts, rank: int, feedback: ErrorFeedback | None
    ) -> None:
        self._messages = messages
        self._tensor = tensor
        self._rank = rank
        self._feedback = feedback
        self._paths = paths = _paths(tensor.numel(), hosts, rank)
        for other, shares in paths.near.items():
            messages.expect(other, _size(paths.mine), tensor.dtype)
            messages.expect(other, _size(shares), tensor.dtype, back=True)
        for other, shares in paths.taken.items():
            messages.expect(other, *self._wire_form(shares))
        for other, shares in paths.given.items():
            messages.expect(other, *self._wire_form(shares), back=True)
        for other, shares in paths.near.items():
            messages.send(other, self._part(shares))

    def finish(self) -> Tensor:
        messages, paths, rank = self._messages, self._paths, self._rank
        # Inside this host.
        received = {other: self._receive(other, paths.mine) for other in paths.near}
        received[rank] = _split(self._part(paths.mine), paths.mine)
        totals = {share: _sum(received[other][share] for other in paths.here) for share in paths.mine}
        # Between hosts.
        for other, shares in paths.given.items():
            messages.send(other, self._packed(totals, shares))
        received = {other: self._receive_packed(other, shares) for other, shares in paths.taken.items()}
        received[rank] = dict(totals)
        for share in paths.whole:
            totals[share] = _sum(received[other][share] for other in share.by_host)
        sent = self._packed_once(totals, paths.whole)
        for other, shares in paths.taken.items():
            messages.send(other, _joined(sent, shares), back=True)
        for other, shares in paths.given.items():
            totals |= self._receive_packed(other, shares, back=True)
            messages.confirm(other)  # our part is in that sum
        # Inside this host.
        for other in paths.near:
            messages.send(other, _joined(totals, paths.mine), back=True)
        for other, shares in paths.near.items():
            totals |= self._receive(other, shares, back=True)
            messages.confirm(other)
        whole = torch.cat([totals[share] for share in paths.shares])
        messages.release()
        return whole

    def _part(self, shares: Sequence[Share]) -> Tensor:
        return self._tensor[shares[0].begin : shares[-1].end]

    def _receive(self, other: int, shares: Sequence[Share], *, back: bool = False) -> dict[Share, Tensor]:
        received = self._messages.receive(other, _size(shares), self._tensor.dtype, back=back)
        return _split(received, shares)

    def _wire_form(self, shares: Iterable[Share]) -> tuple[int, torch.dtype]:
        """Length and type of a message between hosts."""
        dtype, feedback = self._tensor.dtype, self._feedback
        if feedback is None:
            return _size(shares), dtype
        return sum(feedback.wire_bytes(share.size, dtype) for share in shares), torch.uint8

    def _packed(self, totals: Mapping[Share, Tensor], shares: Sequence[Share]) -> Tensor:
        return _joined(self._packed_once(dict(totals), shares), shares)

    def _packed_once(self, totals: dict[Share, Tensor], shares: Sequence[Share]) -> dict[Share, Tensor]:
        """What is sent of these to other hosts; the totals become what these get."""
        if self._feedback is None:
            return totals
        sent = {}
        for share in shares:
            sent[share], totals[share] = self._feedback.pack(share, totals[share])
        return sent

    def _receive_packed(
        self, other: int, shares: Sequence[Share], *, back: bool = False
    ) -> dict[Share, Tensor]:
        dtype, feedback = self._tensor.dtype, self._feedback
        if feedback is None:
            return self._receive(other, shares, back=back)
        received = self._messages.receive(other, *self._wire_form(shares), back=back)
        parts = received.split([feedback.wire_bytes(share.size, dtype) for share in shares])
        return {
            share: feedback.unpack(part, share.size, dtype) for share, part in zip(shares, parts, strict=True)
        }


Make = Callable[[], _Exchange]


def exchange(
    messages: Messages,
    tensor: Tensor,
    hosts: Hosts,
    rank: int,
    feedback: ErrorFeedback | None = None,
    scale: float = 1.0,
) -> _Exchange:
    """Begin a sum. With error feedback it is compressed between hosts; the numbers are multiplied by `scale`."""
    if feedback is not None:
        feedback.begin(scale)
    return _Exchange(messages, tensor, hosts, rank, feedback)


class ExchangedAllReduce:
    """Begun and finished by the rank's own thread."""

    def __init__(self, messages: Messages, make: Make, note: Note, count: Count) -> None:
        messages.note = note
        self._messages = messages
        self._count = count
        self._exchange = make()

    def finish(self) -> Tensor:
        total = self._exchange.finish()
        self._count(self._messages)
        return total


class BackgroundAllReduce:
    """Begun and finished by a thread of its own, over channels that only such threads use."""

    def __init__(
        self, messages: Messages, make: Make, note: Note, count: Count, before: BackgroundAllReduce | None
    ) -> None:
        """Sums of one name use the same streams: one `before` the other."""
        messages.note = self._note_awaited
        self._messages = messages
        self._note = note
        self._count = count
        self._awaited: int | None = None
        self._total: Tensor | None = None
        self._error: BaseException | None = None
        self._before = None if before is None else before._thread

        def run() -> None:
            if self._before is not None:
                self._before.join()
                self._before = None
            try:
                self._total = make().finish()
            except BaseException as error:  # raised where the rank finishes it
                self._error = error

        # A daemon: if a peer is lost, the process can end without it.
        self._thread: Thread = Thread(target=run, name="all-reduce", daemon=True)
        self._thread.start()

    def finish(self) -> Tensor:
        while self._thread.is_alive():
            if self._awaited is not None:
                self._note(self._awaited)
            self._thread.join(LOOK)
        self._note(None)
        if self._error is not None:
            raise self._error
        assert self._total is not None
        self._count(self._messages)
        return self._total

    def _note_awaited(self, peer: int | None) -> None:
        if peer is not None:
            self._awaited = peer


def _size(shares: Iterable[Share]) -> int:
    return sum(share.size for share in shares)


def _split(tensor: Tensor, shares: Sequence[Share]) -> dict[Share, Tensor]:
    return dict(zip(shares, tensor.split([share.size for share in shares]), strict=True))


def _joined(parts: Mapping[Share, Tensor], shares: Sequence[Share]) -> Tensor:
    return torch.cat([parts[share] for share in shares])


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """In their order."""
    first, *others = parts
    total = first
    for part in others:
        total = total + part if total is first else total.add_(part)
    return total
