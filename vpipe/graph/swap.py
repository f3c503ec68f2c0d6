"""Swapping: what autograd saves for a block waits for its backward in host memory.

    forward ends       every saved storage is copied to the host, once, and leaves the device
    a backward before  `fetch` starts to bring the minibatch's storages back
    backward           reads them where they then lie, and drops them one by one

Parameters, buffers, fields of the batch and the stage's inputs stay: they are on the device anyway. The weight
gradients of a split backward read what has come back, so it stays on the device until they are done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from vpipe.graph.held import Hold, Packed, Saver, address, unpack


@dataclass(eq=False)
class Ticket:
    """One tensor of bytes in the host store; `coming` is its new place on the device, once it is on its way."""

    buffer: Tensor
    device: torch.device
    coming: Tensor | None = None


class HostStore:
    """Host memory of a stage. Buffers are used again: a fresh one costs more than the copy into it.

    Here every copy is done when the call returns; on a GPU (`PinnedStore`) it is only begun.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # size ▶ buffers

    def put(self, tensor: Tensor) -> Ticket:
        """Start to copy a tensor of bytes to the host."""
        buffer = self._buffer(tensor.numel())
        buffer.copy_(tensor)
        return Ticket(buffer, tensor.device)

    def settle(self) -> None:
        """What has left the device is needed there: wait until it has."""

    def fetch(self, ticket: Ticket) -> Tensor:
        """Start to bring it back; the tensor returned may be read after `take`."""
        if ticket.coming is None:
            ticket.coming = torch.empty_like(ticket.buffer, device=ticket.device)
            ticket.coming.copy_(ticket.buffer)
        return ticket.coming

    def take(self, ticket: Ticket) -> Tensor:
        """Wait until it is back; the ticket is used up."""
        tensor = self.fetch(ticket)
        self._free[ticket.buffer.numel()].append(ticket.buffer)
        return tensor

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
    back in the order of the computing stream, and no plan is upset by a host that runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._leaving: list[Tensor] = []
        self._arrivals: dict[int, torch.cuda.Event] = {}  # ticket ▶ it is back

    def put(self, tensor: Tensor) -> Ticket:
        if not self._leaving:
            self._out.wait_stream(torch.cuda.current_stream(self._device))
        buffer = self._buffer(tensor.numel(), pinned=True)
        with torch.cuda.stream(self._out):
            buffer.copy_(tensor, non_blocking=True)
        self._leaving.append(tensor)
        return Ticket(buffer, tensor.device)

    def settle(self) -> None:
        if self._leaving:
            torch.cuda.current_stream(self._device).wait_stream(self._out)
            self._leaving.clear()

    def fetch(self, ticket: Ticket) -> Tensor:
        if ticket.coming is None:
            ticket.coming = torch.empty_like(ticket.buffer, device=ticket.device)
            self._in.wait_stream(torch.cuda.current_stream(self._device))  # its memory may still be read
            self._in.wait_stream(self._out)
            with torch.cuda.stream(self._in):
                ticket.coming.copy_(ticket.buffer, non_blocking=True)
            self._arrivals[id(ticket)] = self._in.record_event()
        return ticket.coming

    def take(self, ticket: Ticket) -> Tensor:
        tensor = super().take(ticket)
        torch.cuda.current_stream(self._device).wait_event(self._arrivals.pop(id(ticket)))
        return tensor


def make_store(device: torch.device) -> HostStore:
    return PinnedStore(device) if device.type == "cuda" else HostStore()


class _Storage:
    """The bytes behind one or more saved tensors: on the device while there is a hold, else in the store."""

    __slots__ = ("__weakref__", "_hold", "_saver", "_store", "_ticket")

    def __init__(self, tensor: Tensor, store: HostStore, saver: Saver) -> None:
        self._store = store
        self._saver = saver
        self._ticket: Ticket | None = None
        self._hold: Hold | None = saver.keep(_bytes_of(tensor))

    def __del__(self) -> None:
        if self._ticket is not None:
            self._store.drop(self._ticket)

    def leave(self) -> None:
        assert self._hold is not None
        self._ticket = self._store.put(self._hold.tensor)
        self._hold = None

    def fetch(self) -> None:
        if self._hold is None:
            assert self._ticket is not None
            self._hold = self._saver.keep(self._store.fetch(self._ticket))

    def bytes(self) -> Tensor:
        self.fetch()
        assert self._hold is not None
        if self._ticket is not None:
            self._store.take(self._ticket)
            self._ticket = None
        return self._hold.tensor


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
                self._leaving[where] = _Storage(tensor, self._store, saver)
            return _View(tensor, self._leaving[where])

        return saved_tensors_hooks(pack, unpack)

    def leave(self) -> None:
        """The forward is over: everything goes to the host."""
        for storage in self._leaving.values():
            storage.leave()
            self._away.append(ref(storage))
        self._leaving.clear()

    def fetch(self) -> None:
        """The backward is near: start to bring everything back."""
        for away in self._away:
            storage = away()
            if storage is not None:
                storage.fetch()
        self._away.clear()


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
