"""Swapping: what autograd saves for a block waits for its backward in host memory.

    forward ends       every saved storage is copied to the host, once, and leaves the device
    a backward before  `fetch` starts to bring the minibatch's storages back
    backward           reads them where they then lie, and drops them one by one

Parameters, buffers, fields of the batch and the stage's inputs stay: they are on the device anyway. The weight
gradients of a split backward read what has come back, so it stays on the device until they are done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from vpipe.graph.held import Hold, Packed, Saver, address, unpack

TOGETHER = 8
"""Storages that come back to a GPU in one go: a backward begins when the first of them are there."""
LEAST = 2**16
"""Bytes of a storage that leaves a GPU: to move smaller ones (a norm's means, a seed) takes longer than it is worth."""


class Arrival:
    """Some storages are back, all at once. They are read by one stream, which waits for them once."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event: torch.cuda.Event | None = event

    def wait(self, device: torch.device) -> None:
        if self._event is not None:
            torch.cuda.current_stream(device).wait_event(self._event)
            self._event = None


@dataclass(eq=False)
class Ticket:
    """One tensor of bytes in the host store; `coming` is its new place on the device, once it is on its way."""

    buffer: Tensor
    device: torch.device
    coming: Tensor | None = None
    left: torch.cuda.Event | None = None
    """On a GPU: it lies on the host."""
    arrival: Arrival | None = None
    """On a GPU: it is back."""


class HostStore:
    """Host memory of a stage. Buffers are used again: a fresh one costs more than the copy into it.

    Here every copy is done when the call returns; on a GPU (`PinnedStore`) it is only begun.
    """

    least = 0
    """Bytes of a storage that is worth its copies."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # size ▶ buffers

    def put(self, tensors: Sequence[Tensor]) -> list[Ticket]:
        """Start to copy tensors of bytes to the host."""
        tickets = [Ticket(self._buffer(tensor.numel()), tensor.device) for tensor in tensors]
        for ticket, tensor in zip(tickets, tensors, strict=True):
            ticket.buffer.copy_(tensor)
        return tickets

    def settle(self) -> None:
        """What has left the device is needed there: wait until it has."""

    def fetch(self, tickets: Sequence[Ticket]) -> None:
        """Start to bring back what is not yet on its way, the first ones first; it may be read after `take`."""
        for ticket in tickets:
            if ticket.coming is None:
                ticket.coming = torch.empty_like(ticket.buffer, device=ticket.device)
                ticket.coming.copy_(ticket.buffer)

    def take(self, ticket: Ticket) -> Tensor:
        """Wait until it is back; the ticket is used up."""
        self.fetch([ticket])
        assert ticket.coming is not None
        self._free[ticket.buffer.numel()].append(ticket.buffer)
        return ticket.coming

    def drop(self, ticket: Ticket) -> None:
        """Nobody will read it."""
        if ticket.coming is not None:
            self.take(ticket)  # its new place must not be given to others while it is on its way
        else:
            self._free[ticket.buffer.numel()].append(ticket.buffer)

    def _buffer(self, size: int, *, pinned: bool = False) -> Tensor:
        if self._free[size]:
            return self._free[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


class PinnedStore(HostStore):
    """Host memory that a GPU reads and writes by itself, on a stream for each way, beside the computation.

    What leaves stays in place until the stage's next forward, which waits for the copies: so the memory is given
    back in the order of the computing stream, and no plan is upset by a host that runs ahead. Streams are entered and
    waited for once for many copies: to ask for a copy costs the host about as long as small ones take.
    """

    least = LEAST

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._leaving: list[Tensor] = []

    def put(self, tensors: Sequence[Tensor]) -> list[Ticket]:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        buffers = [self._buffer(tensor.numel(), pinned=True) for tensor in tensors]
        with torch.cuda.stream(self._out):
            torch._foreach_copy_(buffers, list(tensors), non_blocking=True)
        left = self._out.record_event()
        self._leaving += tensors
        return [Ticket(buffer, self._device, left=left) for buffer in buffers]

    def settle(self) -> None:
        if self._leaving:
            torch.cuda.current_stream(self._device).wait_stream(self._out)
            self._leaving.clear()

    def fetch(self, tickets: Sequence[Ticket]) -> None:
        asked = [ticket for ticket in tickets if ticket.coming is None]
        if not asked:
            return
        places = [torch.empty_like(ticket.buffer, device=self._device) for ticket in asked]
        self._in.wait_stream(torch.cuda.current_stream(self._device))  # their memory may still be read
        for left in dict.fromkeys(ticket.left for ticket in asked):
            assert left is not None
            self._in.wait_event(left)
        for start in range(0, len(asked), TOGETHER):
            some, coming = asked[start : start + TOGETHER], places[start : start + TOGETHER]
            with torch.cuda.stream(self._in):
                torch._foreach_copy_(coming, [ticket.buffer for ticket in some], non_blocking=True)
            arrival = Arrival(self._in.record_event())
            for ticket, place in zip(some, coming, strict=True):
                ticket.coming, ticket.arrival = place, arrival

    def take(self, ticket: Ticket) -> Tensor:
        tensor = super().take(ticket)
        assert ticket.arrival is not None
        ticket.arrival.wait(self._device)
        return tensor


def make_store(device: torch.device) -> HostStore:
    return PinnedStore(device) if device.type == "cuda" else HostStore()


class _Storage:
    """The bytes behind one or more saved tensors: on the device while there is a hold, else in the store."""

    __slots__ = ("__weakref__", "_saver", "_store", "hold", "ticket")

    def __init__(self, tensor: Tensor, store: HostStore, saver: Saver) -> None:
        self._store = store
        self._saver = saver
        self.ticket: Ticket | None = None
        self.hold: Hold | None = saver.keep(_bytes_of(tensor))

    def __del__(self) -> None:
        if self.ticket is not None:
            self._store.drop(self.ticket)

    def leave(self, ticket: Ticket) -> None:
        self.hold, self.ticket = None, ticket

    def come(self) -> None:
        """It has been fetched: from now on it has a place on the device."""
        assert self.ticket is not None
        assert self.ticket.coming is not None
        self.hold = self._saver.keep(self.ticket.coming)

    def bytes(self) -> Tensor:
        if self.ticket is not None:
            self._store.take(self.ticket)
            if self.hold is None:
                self.come()
            self.ticket = None
        assert self.hold is not None
        return self.hold.tensor


class _View:
    """A saved tensor as a view of its storage, wherever that lies."""

    __slots__ = ("_dtype", "_offset", "_size", "_storage", "_stride")

    def __init__(self, tensor: Tensor, storage: _Storage) -> None:
        self._storage = storage
        self._dtype = tensor.dtype
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    @property
    def tensor(self) -> Tensor:
        content = self._storage.bytes()
        blank = torch.empty(0, dtype=self._dtype, device=content.device)
        return blank.set_(content.untyped_storage(), self._offset, self._size, self._stride)


class Swap:
    """What one minibatch of one stage has in host memory, or will have when its forward ends."""

    def __init__(self, store: HostStore) -> None:
        self._store = store
        self._leaving: dict[int, _Storage] = {}  # by address, which is theirs as long as they are held
        self._away: list[ref[_Storage]] = []

    def saving(self, saver: Saver, inputs: Container[int]) -> saved_tensors_hooks:
        """Around the forward of blocks that are swapped; `inputs` are addresses of storages that stay."""

        def pack(tensor: Tensor) -> Packed:
            where = address(tensor)
            if not where or where in inputs or where in saver.outside or tensor.is_conj() or tensor.is_neg():
                return saver.keep(tensor)
            if where not in self._leaving:
                if tensor.untyped_storage().nbytes() < self._store.least:
                    return saver.keep(tensor)
                self._leaving[where] = _Storage(tensor, self._store, saver)
            return _View(tensor, self._leaving[where])

        return saved_tensors_hooks(pack, unpack)

    def leave(self) -> None:
        """The forward is over: everything goes to the host."""
        storages = list(self._leaving.values())
        self._leaving.clear()
        if storages:
            tickets = self._store.put([storage.hold.tensor for storage in storages if storage.hold])
            for storage, ticket in zip(storages, tickets, strict=True):
                storage.leave(ticket)
                self._away.append(ref(storage))

    def fetch(self) -> None:
        """The backward is near: start to bring everything back, what was saved last first, as it is read."""
        found = (away() for away in reversed(self._away))
        storages = [storage for storage in found if storage is not None and storage.hold is None]
        self._away.clear()
        self._store.fetch([storage.ticket for storage in storages if storage.ticket])
        for storage in storages:
            storage.come()


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
