"""The channel between processes of one host: shared memory that has no name.

Each message is written once, by its sender, into a *slot*: anonymous memory (memfd) whose descriptor
goes over a Unix socket the first time the slot is used. The receiver maps it and reads it where it lies:

    sender                                   receiver
    copy tensor ▶ slot 3 ── DATA 3 ────────▶ a tensor over slot 3     (no copy)
                          ◀──── TAKEN ────── it was received          (back-pressure counts these)
    slot 3 is free again  ◀──── FREE 3 ───── backward is done with it

Nothing has a name in the file system, so nothing can be left behind, however a process dies; and the
end of the socket shows the peer that it died. Small messages travel inside the socket message itself.
A system call costs as much as the rest of a message, so notices (TAKEN, FREE) ride in front of the next
message or wait until there are a few, and the socket is read only when something is missing.
"""

import array
import ctypes
import mmap
import os
import secrets
import select
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from vpipe.communication.channel import HOST, Channel, Key
from vpipe.communication.peers import connect_peers
from vpipe.errors import PeerError
from vpipe.system.deadline import Deadline

HEADER = struct.Struct("<Bxxxiqqq")  # kind, stream, number, slot, bytes of the tensor
DATA, _TAKEN, _FREE = range(3)
_INLINE = -1  # in place of a slot: the bytes follow
_INLINE_BYTES = 1024
_NOTICES = 4  # that may wait together
_ANCILLARY_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)  # one descriptor
_MESSAGE_BYTES = HEADER.size * (_NOTICES + 1) + 2 * _INLINE_BYTES


class SharedMemoryChannel(Channel):
    name = "shared memory"

    def __init__(self, peer: int, buffer: int, timeout: float, link: socket.socket) -> None:
        super().__init__(peer, buffer, timeout)
        self._link = link
        self._link.setblocking(False)
        self._poll = select.poll()
        self._untaken: Counter[int] = Counter()  # sent and not yet received, by stream
        self._slots: list[mmap.mmap] = []  # ours, written here
        self._free: dict[int, list[int]] = defaultdict(list)  # size ▶ our slots of that size
        self._peer_slots: dict[int, mmap.mmap] = {}  # theirs, read here
        self._arrived: dict[Key, tuple[Tensor, int]] = {}  # bytes, and the slot that they are in
        self._held: dict[Key, int] = {}  # received and not yet released: their slots
        self._notices: list[bytes] = []  # not sent yet
        self._patience = max(1, min(_NOTICES, buffer // 2))
        self._lost = False

    def send(self, key: Key, tensor: Tensor) -> None:
        self._wait_for_room(key)
        tensor = tensor.detach()
        size = tensor.nbytes
        if size <= _INLINE_BYTES:
            whole = tensor.contiguous()
            header = HEADER.pack(DATA, *key, _INLINE, size)
            self._transmit(header + ctypes.string_at(whole.data_ptr(), size))
            return
        slot, descriptor = self._slot_of(size)
        target = torch.frombuffer(self._slots[slot], dtype=tensor.dtype, count=tensor.numel())
        target.view(tensor.shape).copy_(tensor)
        self._transmit(HEADER.pack(DATA, *key, slot, size), descriptor)

    def receive(
        self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST
    ) -> Tensor:
        if key not in self._arrived:
            self._wait(lambda: key in self._arrived, f"message {key}")
        data, slot = self._arrived.pop(key)
        if slot != _INLINE:
            self._held[key] = slot
        self._notify(HEADER.pack(_TAKEN, *key, 0, 0))
        return data.view(dtype).view(tuple(shape))

    def release(self, key: Key) -> None:
        slot = self._held.pop(key, None)
        if slot is not None:
            self._notify(HEADER.pack(_FREE, 0, 0, slot, 0))

    def leftovers(self) -> list[str]:
        self._send_notices()
        self._pump()
        return [
            *(f"{key} from rank {self.peer} was not taken" for key in self._arrived),
            *(f"{key} from rank {self.peer} was not released" for key in self._held),
        ]

    def close(self) -> None:
        self._link.close()
        self._arrived.clear()
        self._slots.clear()
        self._peer_slots.clear()

    def _wait_for_room(self, key: Key) -> None:
        most = self.buffer + self._patience - 1  # that many may have been taken without our knowing
        if self._untaken[key.stream] >= most:
            self._wait(lambda: self._untaken[key.stream] < most, f"room to send {key}")
        self._untaken[key.stream] += 1

    def _slot_of(self, size: int) -> tuple[int, int | None]:
        """A free slot of this size, or a new one with its descriptor."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if not self._free[size]:
            self._pump()
        if self._free[size]:
            return self._free[size].pop(), None
        descriptor = os.memfd_create("vpipe", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        self._slots.append(mmap.mmap(descriptor, size))
        return len(self._slots) - 1, descriptor

    def _notify(self, notice: bytes) -> None:
        self._notices.append(notice)
        if len(self._notices) >= self._patience:
            self._send_notices()

    def _send_notices(self) -> None:
        """Send the notices. They only serve the peer, so its end is no error here; reading will find it."""
        if self._notices and not self._lost:
            with suppress(PeerError):
                self._transmit(b"")

    def _transmit(self, message: bytes, descriptor: int | None = None) -> None:
        """Send a message, the notices in front of it."""
        if self._notices:
            message = b"".join((*self._notices, message))
            self._notices.clear()
        deadline: Deadline | None = None
        try:
            while True:
                try:
                    if descriptor is None:
                        self._link.send(message)
                    else:
                        socket.send_fds(self._link, [message], [descriptor])
                    return
                except BlockingIOError:
                    # The socket is full: take in what the peer sends meanwhile, or both would wait for ever.
                    deadline = deadline or Deadline(self.timeout)
                    self._wait_for(select.POLLOUT | select.POLLIN, deadline, "room in the socket")
                    self._pump()
                except OSError as error:
                    raise self._peer_is_gone() from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        deadline = Deadline(self.timeout)
        while not ready():
            if self._take_next():
                continue
            if self._lost:
                raise self._peer_is_gone()
            self._send_notices()  # or both would wait for ever
            self._wait_for(select.POLLIN, deadline, what)

    def _wait_for(self, events: int, deadline: Deadline, what: str) -> None:
        self._poll.register(self._link, events)
        while not self._poll.poll(deadline.slice() * 1000):
            if not deadline.left():
                raise PeerError(f"waited {self.timeout:g} s for rank {self.peer}: {what}")

    def _pump(self) -> None:
        """Take in every message that has arrived."""
        while self._take_next():
            pass

    def _take_next(self) -> bool:
        """Take in one message, if one has arrived."""
        if self._lost:
            return False
        try:
            message, ancillary, _, _ = self._link.recvmsg(_MESSAGE_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # raised once if the peer closed without reading all: what it sent is still there
        except OSError:
            message, ancillary = b"", []
        if not message:
            self._lost = True  # what had arrived before may still be received
            return False
        self._take_in(message, array.array("i", ancillary[0][2]).tolist() if ancillary else [])
        return True

    def _take_in(self, message: bytes, descriptors: list[int]) -> None:
        start = 0
        while start < len(message):
            kind, stream, number, slot, size = HEADER.unpack_from(message, start)
            start += HEADER.size
            if kind == _TAKEN:
                self._untaken[stream] -= 1
            elif kind == _FREE:
                self._take_back(slot)
            else:
                data = self._data(slot, size, message[start:], descriptors)
                self._arrived[Key(stream, number)] = (data, slot)
                return

    def _take_back(self, slot: int) -> None:
        """The peer is done with one of our slots."""
        self._free[len(self._slots[slot])].append(slot)

    def _data(self, slot: int, size: int, payload: bytes, descriptors: list[int]) -> Tensor:
        """The bytes of a message: its payload, or those in the slot, whose descriptor comes the first time."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        if slot == _INLINE:
            return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if descriptors:
            pages = os.fstat(descriptors[0]).st_size
            self._peer_slots[slot] = mmap.mmap(descriptors[0], pages)
            os.close(descriptors[0])
        return torch.frombuffer(self._peer_slots[slot], dtype=torch.uint8, count=size)

    def _peer_is_gone(self) -> PeerError:
        return PeerError(
            f"rank {self.peer} closed its connection: it ended or was killed; see its own output"
        )


def connect_all(
    rank: int, peers: Sequence[int], gather: Callable[[str, Any], list[Any]], timeout: float
) -> dict[int, socket.socket]:
    """A socket to each of this host's ranks; `gather` is called once by every rank of the world."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # An abstract address, which vanishes with the socket. The kernel has few of its own, which others could use up.
        listener.bind(f"\0vpipe-{secrets.token_hex(16)}")
        listener.listen(socket.SOMAXCONN)
        return connect_peers(rank, peers, listener, "shared memory", gather, timeout)
