"""The channel between threads of one process: a dictionary behind a condition. For tests and lessons."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from vpipe.communication.channel import HOST, Channel, Key
from vpipe.communication.world import World
from vpipe.errors import PeerError

T = TypeVar("T")


class _Mailbox:
    """Messages under way in one direction between two threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: dict[Key, Tensor] = {}
        self.waiting: Counter[int] = Counter()  # messages not yet taken, by stream
        self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class InProcessChannel(Channel):
    name = "in process"

    def __init__(self, peer: int, buffer: int, timeout: float, outbox: _Mailbox, inbox: _Mailbox) -> None:
        super().__init__(peer, buffer, timeout)
        self._outbox = outbox
        self._inbox = inbox

    def _wait(self, box: _Mailbox, ready: Callable[[], bool], what: str) -> None:
        if not box.changed.wait_for(lambda: ready() or box.closed, self.timeout):
            raise PeerError(f"waited {self.timeout:g} s for rank {self.peer}: {what}")
        if not ready():
            raise PeerError(f"rank {self.peer} left while this rank waited for {what}")

    def send(self, key: Key, tensor: Tensor) -> None:
        box = self._outbox
        with box.changed:
            self._wait(box, lambda: box.waiting[key.stream] < self.buffer, f"room to send {key}")
            box.messages[key] = tensor.detach()
            box.waiting[key.stream] += 1
            box.changed.notify_all()

    def receive(
        self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST
    ) -> Tensor:
        box = self._inbox
        with box.changed:
            self._wait(box, lambda: key in box.messages, f"message {key}")
            box.waiting[key.stream] -= 1
            box.changed.notify_all()
            return box.messages.pop(key)

    def leftovers(self) -> list[str]:
        return [f"{key} from rank {self.peer} was not taken" for key in self._inbox.messages]

    def close(self) -> None:
        self._outbox.close()
        self._inbox.close()


class InProcessHub:
    """What `size` threads share, each of which is a rank."""

    def __init__(self, size: int, timeout: float = 60.0, hosts: Sequence[Hashable] | None = None) -> None:
        """`hosts`: the host that each rank stands for."""
        self.hosts = hosts
        self.size = size
        self.timeout = timeout
        self.exclusive = threading.RLock()
        # Sender, receiver, number ▶ box. Threads may build several pipelines, one after the other.
        self._boxes: defaultdict[tuple[int, int, int], _Mailbox] = defaultdict(_Mailbox)
        self._gathered: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self.published: dict[tuple[str, int, int], Any] = {}
        self.taken: defaultdict[tuple[str, int], list[tuple[Any, Any]]] = defaultdict(list)
        """What each rank had of a call of `once`, and what for."""
        self.broken = ""  # the reason, once one of the threads has failed
        self._changed = threading.Condition()

    def join(self, rank: int) -> "InProcessWorld":
        return InProcessWorld(self, rank)

    def abort(self, reason: str) -> None:
        """Wake every waiting thread with an error: one of them failed."""
        with self._changed:
            self.broken = reason
            self._changed.notify_all()
            boxes = list(self._boxes.values())
        for box in boxes:
            box.close()

    def box(self, sender: int, receiver: int, number: int) -> _Mailbox:
        """Of the pipeline with this number."""
        with self._changed:
            box = self._boxes[sender, receiver, number]
            if self.broken:
                box.close()
            return box

    def gather(self, rank: int, name: str, value: Any) -> list[Any]:
        with self._changed:
            values = self._gathered[name]
            values[rank] = value
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(values) == self.size or self.broken, self.timeout):
                missing = sorted(set(range(self.size)) - set(values))
                raise PeerError(f"waited {self.timeout:g} s at {name!r} for ranks {missing}")
            if len(values) < self.size:
                raise PeerError(self.broken)
            return [values[r] for r in range(self.size)]


class InProcessWorld(World):
    """One thread's view of the hub."""

    def __init__(self, hub: InProcessHub, rank: int) -> None:
        # Threads share torch's random generator and its exporter: one at a time.
        super().__init__(rank, hub.size, rank, hub.exclusive)
        self.hub = hub
        self._onces: Counter[str] = Counter()
        self._pipelines = 0  # that have channels

    def once(self, name: str, of: Any, make: Callable[[], T]) -> T:
        self._onces[name] += 1
        call = (name, self._onces[name])
        with self.exclusive:
            taken = self.hub.taken[call]
            same = [value for other, value in taken if other == of]
            value: T = same[0] if same else make()
            taken.append((of, value))
            if len(taken) == self.size:
                del self.hub.taken[call]
        return value

    def _gather(self, name: str, number: int, value: Any) -> list[Any]:
        return self.hub.gather(self.rank, f"{name}#{number}", value)

    def publish(self, name: str, value: Any) -> None:
        self.hub.published[name, self.rank, self._pipelines] = value

    def published(self, name: str, rank: int) -> Any:
        if self.hub.broken:
            raise PeerError(self.hub.broken)
        return self.hub.published.get((name, rank, self._pipelines))

    def hosts(self) -> list[Hashable]:
        """Each on its own, unless the hub says otherwise: threads have no links, they stand for ranks on any hosts."""
        return list(range(self.size)) if self.hub.hosts is None else list(self.hub.hosts)

    def channels(self, buffer: int, device: torch.device = HOST) -> dict[int, Channel]:
        self._pipelines += 1
        box, rank, number = self.hub.box, self.rank, self._pipelines
        made: dict[int, Channel] = {
            peer: InProcessChannel(
                peer, buffer, self.hub.timeout, box(rank, peer, number), box(peer, rank, number)
            )
            for peer in range(self.size)
            if peer != rank
        }
        if self.hub.hosts is not None:
            self.thread_channels = made
        return made
