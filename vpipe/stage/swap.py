"""Swapping: activations that autograd saves for a block are kept in host memory until their backward.

    end of forward       every saved storage is copied to the host, once, and freed on the device
    one backward before  `fetch` starts to copy the minibatch's storages back
    backward             reads them on the device and drops them one by one

Parameters, buffers, batch fields and the stage's inputs stay: they are on the device anyway. The weight gradients of a
split backward read the fetched storages, so these stay on the device until that work is done.
"""

from __future__ import annotations

from collections.abc import Container
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from vpipe.stage.held import HeldSaver, Hold, address, unpack
from vpipe.stage.host_store import HostStore, Ticket


class _Storage:
    """The storage of one or more saved tensors: on the device while there is a `hold`, else in the host store."""

    __slots__ = ("__weakref__", "_saver", "_store", "hold", "ticket")

    def __init__(self, tensor: Tensor, store: HostStore, saver: HeldSaver) -> None:
        self._store = store
        self._saver = saver
        self.ticket: Ticket | None = None
        self.hold: Hold | None = saver.keep(_bytes_of(tensor))

    def __del__(self) -> None:
        if self.ticket is not None:
            self._store.drop(self.ticket)

    def fetched(self) -> None:
        """It is (or will be) on the device again."""
        assert self.ticket is not None
        assert self.ticket.coming is not None
        self.hold = self._saver.keep(self.ticket.coming)

    def bytes(self) -> Tensor:
        if self.ticket is not None:
            self._store.take(self.ticket)
            if self.hold is None:
                self.fetched()
            self.ticket = None
        assert self.hold is not None
        return self.hold.tensor


class _View:
    """A saved tensor as a view of its storage, on the device or in the host store."""

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
    """The storages of one minibatch of one stage that are swapped."""

    def __init__(self, store: HostStore) -> None:
        self._store = store
        self._leaving: dict[int, _Storage] = {}  # by address, unique while they are held
        self._away: list[ref[_Storage]] = []

    def saving(self, saver: HeldSaver, inputs: Container[int]) -> saved_tensors_hooks:
        """Hooks for the forward of swapped blocks; `inputs` are addresses of storages that stay on the device."""

        def pack(tensor: Tensor) -> Hold | _View:
            where = address(tensor)
            if (
                not where
                or where in inputs
                or where in saver.permanent
                or tensor.is_conj()
                or tensor.is_neg()
            ):
                return saver.keep(tensor)
            if where not in self._leaving:
                if tensor.untyped_storage().nbytes() < self._store.least:
                    return saver.keep(tensor)
                self._leaving[where] = _Storage(tensor, self._store, saver)
            return _View(tensor, self._leaving[where])

        return saved_tensors_hooks(pack, unpack)

    def leave(self) -> None:
        """At the end of the forward: copy everything to the host."""
        storages = list(self._leaving.values())
        self._leaving.clear()
        if storages:
            tickets = self._store.put([storage.hold.tensor for storage in storages if storage.hold])
            for storage, ticket in zip(storages, tickets, strict=True):
                storage.hold, storage.ticket = None, ticket
                self._away.append(ref(storage))

    def fetch(self) -> None:
        """Before the backward: start to copy everything back, in the order in which backward reads it."""
        found = (away() for away in reversed(self._away))
        storages = [storage for storage in found if storage is not None and storage.hold is None]
        self._away.clear()
        self._store.fetch([storage.ticket for storage in storages if storage.ticket])
        for storage in storages:
            storage.fetched()


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
