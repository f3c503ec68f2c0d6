"""Host memory for the activations that a stage swaps, as tensors of bytes.

put ▶ ticket     start the copy to the host (on a GPU: on a stream of its own, after the computation so far)
settle           wait until all copies to the host are done
fetch            allocate on the device and start the copy back
take             wait for the copy back; the host buffer is free again
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOGETHER = 8
"""Storages that are copied back to a GPU with one event: a backward starts when the first group has arrived."""
LEAST = 2**16
"""Bytes of the smallest storage that leaves a GPU: smaller ones (a norm's means, a seed) are not worth a copy."""


class Arrival:
    """The arrival of a group of storages on the device. The stream that reads them waits for it once."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event: torch.cuda.Event | None = event

    def wait(self, device: torch.device) -> None:
        if self._event is not None:
            torch.cuda.current_stream(device).wait_event(self._event)
            self._event = None


@dataclass(eq=False)
class Ticket:
    """One tensor of bytes in the host store; `coming` is its new memory on the device, once it is fetched.

    On a GPU `left` is the end of the copy to the host, `arrival` that of the copy back.
    """

    buffer: Tensor
    device: torch.device
    coming: Tensor | None = None
    left: torch.cuda.Event | None = None
    arrival: Arrival | None = None


class HostStore:
    """Host memory of a stage. Buffers are reused: a new one costs more than the copy into it.

    Every copy is done when the call returns; on a GPU (`PinnedStore`) it is only started.
    """

    least = 0
    """Bytes of the smallest storage that is worth its copies."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # size ▶ buffers

    def put(self, tensors: Sequence[Tensor]) -> list[Ticket]:
        """Start to copy tensors of bytes to the host."""
        tickets = [Ticket(self._buffer(tensor.numel()), tensor.device) for tensor in tensors]
        for ticket, tensor in zip(tickets, tensors, strict=True):
            ticket.buffer.copy_(tensor)
        return tickets

    def settle(self) -> None:
        """Wait until everything that was put is on the host: its memory on the device is needed."""

    def fetch(self, tickets: Sequence[Ticket]) -> None:
        """Start to copy back, in this order, what is not fetched yet; read it after `take`."""
        for ticket in tickets:
            if ticket.coming is None:
                ticket.coming = torch.empty_like(ticket.buffer, device=ticket.device)
                ticket.coming.copy_(ticket.buffer)

    def take(self, ticket: Ticket) -> Tensor:
        """The tensor on the device, once its copy is done; the ticket is used up."""
        self.fetch([ticket])
        assert ticket.coming is not None
        self._free[ticket.buffer.numel()].append(ticket.buffer)
        return ticket.coming

    def drop(self, ticket: Ticket) -> None:
        """Release a ticket that nobody will read."""
        if ticket.coming is not None:
            self.take(ticket)  # its memory must not be freed while the copy back runs
        else:
            self._free[ticket.buffer.numel()].append(ticket.buffer)

    def _buffer(self, size: int, *, pinned: bool = False) -> Tensor:
        if self._free[size]:
            return self._free[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


class PinnedStore(HostStore):
    """Pinned host memory that a GPU copies to and from beside the computation, on one stream for each direction.

    Storages stay on the device until the stage's next forward, which waits for the copies: so memory is freed in the
    order of the computing stream, and a host that runs ahead does not exceed the plan. Many copies share one stream
    entry and one event, because launching a small copy costs the host about as long as the copy takes.
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
        wanted = [ticket for ticket in tickets if ticket.coming is None]
        if not wanted:
            return
        targets = [torch.empty_like(ticket.buffer, device=self._device) for ticket in wanted]
        self._in.wait_stream(torch.cuda.current_stream(self._device))  # reused memory may still be read there
        for left in dict.fromkeys(ticket.left for ticket in wanted):
            assert left is not None
            self._in.wait_event(left)
        for start in range(0, len(wanted), TOGETHER):
            group, coming = wanted[start : start + TOGETHER], targets[start : start + TOGETHER]
            with torch.cuda.stream(self._in):
                torch._foreach_copy_(coming, [ticket.buffer for ticket in group], non_blocking=True)
            arrival = Arrival(self._in.record_event())
            for ticket, target in zip(group, coming, strict=True):
                ticket.coming, ticket.arrival = target, arrival

    def take(self, ticket: Ticket) -> Tensor:
        tensor = super().take(ticket)
        assert ticket.arrival is not None
        ticket.arrival.wait(self._device)
        return tensor


def make_store(device: torch.device) -> HostStore:
    return PinnedStore(device) if device.type == "cuda" else HostStore()
