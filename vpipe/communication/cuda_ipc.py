"""The channel between processes of one host whose tensors lie on GPUs: memory and events of CUDA IPC.

It is the shared-memory channel with another kind of slot, which is not read where it lies: what a stage holds until
its backward belongs into its own memory, where it is planned, and not into that of the rank before it. The sender
copies a tensor into a slot of its own GPU memory and records the slot's event. The receiver learns of it over the
socket, lets its stream wait for that event, copies the tensor out and records the event again, for which the sender's
next copy into the slot waits:

    sender's stream     copy ▶ slot 3, record e3 ................... wait e3, copy ▶ slot 3   (or a free one)
    socket                              DATA 3 ▶       ◀ FREE 3
    receiver's stream                   wait e3, copy out, record e3

The hosts only exchange notices: neither waits for a GPU. Out of a slot on another GPU the receiver copies on a stream
of its own.

The receiver opens a slot as memory that its own GPU reads, wherever the slot lies: CUDA can open memory of a GPU that
the process does not even see, and makes no context there, which would cost hundreds of megabytes. Numbers of GPUs mean
nothing between processes (CUDA_VISIBLE_DEVICES), so none is sent. Whether two GPUs reach each other is tried
(`try_out`).
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vpipe.communication.channel import HOST, Key
from vpipe.communication.shared_memory import DATA, HEADER, SharedMemoryChannel
from vpipe.system.environment import ALLOCATOR

_SEGMENTS = re.compile(r"(?<![^,])expandable_segments:(True|False)(?![^,])")
FIRST = 1 << 40
"""Slots of device memory are numbered from here, those of host memory from 0."""
GRAIN = 512
SPARE = 64 * 2**20
"""Bytes of slots that may be on their way back while a further one is made."""


_TRIAL = -1
"""The stream of the first trial copy; what follows has those below, each its own: nothing waits for room."""
TRIALS, TRIAL_SIZE = 2, 2048
"""Copies, and their elements."""


class _Slot(NamedTuple):
    """Device memory that both processes see, and the event that orders access to it."""

    buffer: Tensor  # of bytes
    event: torch.cuda.Event


class CudaIpcChannel(SharedMemoryChannel):
    name = "CUDA IPC"

    def __init__(
        self, peer: int, buffer: int, timeout: float, link: Any, device: torch.device, *, across: bool = False
    ) -> None:
        """`across`: the peer's memory is another GPU's."""
        super().__init__(peer, buffer, timeout, link)
        torch.cuda.ipc_collect()  # slots of earlier channels that their readers released later
        self.device = device
        self.across = across
        self._device_slots: list[_Slot] = []  # ours, written here
        self._device_free: dict[int, list[int]] = defaultdict(list)  # size ▶ our slots of that size
        self._peer_device_slots: dict[int, _Slot] = {}  # theirs, copied from here
        self._fetching: torch.cuda.Stream | None = None  # from another GPU

    def try_out(self) -> bool:
        """Whether tensors arrive in both directions: both ends call it before anything else, and learn the same.

        Each copies a pattern to the other, twice, so that the slot is used again after the other's event.
        """
        trials = [self._try_once(number) for number in range(TRIALS)]
        return all(trials)

    def _try_once(self, number: int) -> bool:
        key, verdict = Key(_TRIAL - 2 * number, 0), Key(_TRIAL - 2 * number - 1, 0)
        pattern = torch.arange(number, TRIAL_SIZE + number)
        try:
            self.send(key, pattern.to(self.device))
        except (RuntimeError, OSError):
            self._untaken.clear()  # it was not sent
            self.send(key, torch.zeros_like(pattern))  # so that the peer does not wait, and finds it wrong
        arrived = False
        with suppress(RuntimeError, OSError):  # the peer's memory cannot be opened, or our GPU cannot read it
            found = self.receive(key, pattern.shape, pattern.dtype, self.device)
            arrived = torch.equal(found.cpu(), pattern)
            self.release(key)
        self.send(verdict, torch.tensor(arrived))
        return bool(self.receive(verdict, (), torch.bool)) and arrived

    def send(self, key: Key, tensor: Tensor) -> None:
        if not tensor.is_cuda:
            super().send(key, tensor)
            return
        self._wait_for_room(key)
        tensor = tensor.detach()
        size = tensor.nbytes
        number, handles = self._device_slot_of(size)
        slot = self._device_slots[number]
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(slot.event)
        slot.buffer[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        slot.event.record(stream)
        self._transmit(HEADER.pack(DATA, *key, FIRST + number, size) + handles)

    def receive(
        self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST
    ) -> Tensor:
        tensor = super().receive(key, shape, dtype, device)
        number = self._held.get(key, 0)
        if number < FIRST:
            return tensor
        if number not in self._peer_device_slots:
            raise RuntimeError(f"memory of rank {self.peer} cannot be opened")
        return self._copy_out(key, tensor, self._peer_device_slots[number])

    def close(self) -> None:
        super().close()
        self._device_slots.clear()
        self._peer_device_slots.clear()
        torch.cuda.ipc_collect()

    def _copy_out(self, key: Key, tensor: Tensor, slot: _Slot) -> Tensor:
        """The tensor in memory of our own; the peer's slot is free when the copy is made."""
        here = torch.empty_like(tensor, device=self.device)
        current = stream = torch.cuda.current_stream(self.device)
        if self.across:
            stream = self._fetching = self._fetching or torch.cuda.Stream(self.device)
            stream.wait_stream(current)  # the memory may still be read by what was there before
        stream.wait_event(slot.event)
        with torch.cuda.stream(stream):
            here.copy_(tensor, non_blocking=True)
        slot.event.record(stream)
        if stream is not current:
            current.wait_stream(stream)
        self.release(key)
        return here

    def _device_slot_of(self, size: int) -> tuple[int, bytes]:
        """A free slot of this size, or a new one with the handles by which the peer opens it."""
        size = -(-max(size, 1) // GRAIN) * GRAIN
        free = self._device_free[size]
        self._pump()
        number = choose_slot(free, size, lambda slot: self._device_slots[slot].event.query())
        if number is not None:
            free.remove(number)
            return number, b""
        with ordinary_memory():
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        slot = _Slot(buffer, torch.cuda.Event(interprocess=True))
        slot.event.record(torch.cuda.current_stream(self.device))
        self._device_slots.append(slot)
        _, *memory = slot.buffer.untyped_storage()._share_cuda_()  # the GPU's number here
        handles = [*memory, slot.event.ipc_handle()]
        return len(self._device_slots) - 1, json.dumps(handles, default=bytes.hex).encode()

    def _take_back(self, slot: int) -> None:
        if slot < FIRST:
            super()._take_back(slot)
        else:
            self._device_free[self._device_slots[slot - FIRST].buffer.numel()].append(slot - FIRST)

    def _data(self, slot: int, size: int, payload: bytes, descriptors: list[int]) -> Tensor:
        """On a GPU: the bytes in the peer's slot, whose handles come the first time."""
        if slot < FIRST:
            return super()._data(slot, size, payload, descriptors)
        if payload:
            try:
                self._peer_device_slots[slot] = self._open(payload)
            except RuntimeError:  # raised where this message is received: here, any other may be waited for
                return torch.zeros(size, dtype=torch.uint8)
        return self._peer_device_slots[slot].buffer[:size]

    def _open(self, handles: bytes) -> _Slot:
        parts = json.loads(handles)
        *memory, event = (bytes.fromhex(part) if isinstance(part, str) else part for part in parts)
        storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *memory)
        buffer = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return _Slot(buffer, torch.cuda.Event.from_ipc_handle(self.device, event))


def choose_slot(free: Sequence[int], size: int, is_done: Callable[[int], bool]) -> int | None:
    """Of the slots that the receiver's host has given back one that its GPU is done with; None: a new one is better.

    Its host may be several actions ahead of its GPU. To wait for that slot would hold up our own GPU, unless so
    many are on their way back that one more would cost too much memory.
    """
    done = next((slot for slot in free if is_done(slot)), None)
    if done is None and len(free) * size >= SPARE:
        return free[0]  # given back first
    return done


@contextmanager
def ordinary_memory() -> Iterator[None]:
    """What is allocated on a GPU here lies in ordinary segments of memory, which another process may open.

    Expandable segments leave fewer gaps, so the launcher asks for them (`launch/mps.py`). But memory of such a segment
    is opened by taking a descriptor out of the process that owns it (pidfd_getfd), which many hosts forbid between
    siblings; memory of an ordinary segment is opened by a handle. So what is shared is allocated while the setting
    is off: then torch's allocator leaves expandable segments alone.
    """
    settings = allocator_settings(os.environ)
    if not has_expandable_segments(settings):
        yield
        return
    _set(_SEGMENTS.sub("expandable_segments:False", settings))
    try:
        yield
    finally:
        _set(settings)


def allocator_settings(environment: Mapping[str, str]) -> str:
    """As torch reads them: the first of the variables that is there, blanks left out."""
    written = next((environment[name] for name in ALLOCATOR if name in environment), "")
    return "".join(written.split())


def has_expandable_segments(settings: str) -> bool:
    """Whether they are on: of several mentions the last holds."""
    return _SEGMENTS.findall(settings)[-1:] == ["True"]


def _set(settings: str) -> None:
    """All of them: some that are not mentioned would fall back to their defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its successor is not in every torch
        torch.cuda.memory._set_allocator_settings(settings)
