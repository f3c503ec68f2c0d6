"""The record of what a rank has done: each action's time, added to its figures, and the action as an event.

On a CPU an action is over when its method returns. On a GPU it has only been launched then: an event is recorded behind
it, and read once the GPU has passed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

import torch

from vpipe.record.events import Events
from vpipe.schedule import Action, Op

RECEIVES = (Op.RECV_F, Op.RECV_B)
SENDS = (Op.SEND_F, Op.SEND_B, Op.REDUCE)


T = TypeVar("T")
REBASE = 4096
"""Events after which times are counted from a later one: CUDA gives them as float32."""


@dataclass
class RuntimeStats:
    """Seconds spent computing, waiting for tensors and sending, and actions, in one direction."""

    compute: float = 0.0
    wait: float = 0.0
    send: float = 0.0
    actions: int = 0


class Done(NamedTuple):
    """An action that was launched, and what is known of it before its time is."""

    action: Action
    sent: int
    received: int
    version: int
    evaluation: bool


class Recording:
    def __init__(self, rank: int, edges: Iterable[tuple[int, int]], device: torch.device) -> None:
        self.forward = RuntimeStats()
        self.backward = RuntimeStats()
        self.update = RuntimeStats()
        self.events = Events(rank, edges)
        self._by_op = dict.fromkeys(Op, self.backward) | {
            **dict.fromkeys((Op.RECV_F, Op.F, Op.SEND_F), self.forward),
            **dict.fromkeys((Op.REDUCE, Op.STEP), self.update),
        }
        self._clock: DeviceClock[Done | None] | None = DeviceClock(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """A program starts: what came before, a save perhaps, is not its first action's time."""
        if self._clock is not None:
            self._clock.mark(None)

    def done(self, done: Done, start: float, waited: float) -> None:
        """The action was issued at `start`, and the host has waited so long for messages meanwhile."""
        if self._clock is None:
            self._add(done, start, perf_counter(), waited)
        else:
            self._clock.mark(done)
            self.read_clock()

    def read_clock(self, *, wait: bool = False) -> None:
        """Take in what the GPU has done meanwhile; all that it was given, if `wait`."""
        if self._clock is not None:
            for done, start, end in self._clock.passed(wait=wait):
                if done is not None:
                    self._add(done, start, end, end - start if done.action.op in RECEIVES else 0.0)

    @property
    def waited_on_device(self) -> float | None:
        """Seconds in which the GPU had nothing to do because a message had not come; None without one."""
        return None if self._clock is None else self.forward.wait + self.backward.wait + self.update.wait

    def _add(self, done: Done, start: float, end: float, waited: float) -> None:
        op = done.action.op
        stats = self._by_op[op]
        if op in RECEIVES:
            stats.wait += end - start
        elif op in SENDS:
            stats.send += end - start
        else:
            stats.wait += waited
            stats.compute += end - start - waited
        self.events.add(
            done.action, start, end, waited, done.sent, done.received, done.version, done.evaluation
        )


class DeviceClock(Generic[T]):
    """Times of a GPU's work, without waiting for it: marks of type T on its current stream, in the time of
    `time.perf_counter`.

    The host launches actions ahead of the GPU, so its own clock says nothing. On one stream an action begins where the
    one before it ended: a receive lasts as long as the stream waited for the tensor, a forward as long as it computed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: deque[tuple[T, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._base = self._event()
        self._base.record()
        self._base.synchronize()
        self._base_time = perf_counter()
        self._last_time = self._base_time
        self._since_base = 0

    def mark(self, what: T) -> None:
        """Everything launched since the last mark belongs to this one."""
        event = self._event()
        event.record()
        self._pending.append((what, event))

    def passed(self, *, wait: bool = False) -> Iterator[tuple[T, float, float]]:
        """Marks that the GPU has passed, with their start and end; all of them if `wait`."""
        while self._pending and (wait or self._pending[0][1].query()):
            what, event = self._pending.popleft()
            if wait:
                event.synchronize()
            start, self._last_time = self._last_time, self._base_time + self._base.elapsed_time(event) / 1000
            self._since_base += 1
            if self._since_base >= REBASE:
                self._spare.append(self._base)
                self._base, self._base_time, self._since_base = event, self._last_time, 0
            else:
                self._spare.append(event)
            yield what, start, self._last_time

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
