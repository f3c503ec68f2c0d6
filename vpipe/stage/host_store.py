"""Host memory for what a stage swaps: tensors of bytes are put there, fetched, and taken.

put ▶ ticket            on a GPU a stream of its own copies, when what was computed before is done
settle                  what was put has left the device
fetch                   a place on the device, and a copy on its way to it
take                    it is there; the host's buffer is free again
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
