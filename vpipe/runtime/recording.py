"""The record of what a rank has done: each action's time, added to its figures, and the action as an event.

On a CPU an action is over when its method returns. On a GPU it has only been launched then: an event is recorded behind
it, and read once the GPU has passed it. There an action lasts from the end of the action before it, or from when the
host began to launch it if that was later, to its own end. In between the GPU is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, TypeVar

import torch

from vpipe.record.events import Events, Recorded
from vpipe.schedule import Op

RECEIVES = (Op.RECV_F, Op.RECV_B)
SENDS = (Op.SEND_F, Op.SEND_B, Op.REDUCE)


T = TypeVar("T")
REBASE = 4096
"""Events after which times are counted from a later one: CUDA gives them as float32."""


@dataclass
class RuntimeStats:
    """Seconds spent computing, waiting for tensors and sending, in one direction."""

    compute: float = 0.0
    wait: float = 0.0
    send: float = 0.0


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
        self._clock: DeviceClock[Recorded | None] | None = None
        if device.type == "cuda":
            self._clock = DeviceClock(device)

    def begin(self) -> None:
        """A program starts: what came before, a save perhaps, is not its first action's time."""
        if self._clock is not None:
            self._clock.mark(None)

    def add(self, launched: Recorded) -> None:
        """An action with the host's times: when it was launched, and how long the host waited for messages."""
        if self._clock is None:
            self._add(launched)
        else:
            self._clock.mark(launched)
            self.read_clock()

    def read_clock(self, *, wait: bool = False) -> None:
        """Take in what the GPU has done meanwhile; all that it was given, if `wait`."""
        if self._clock is not None:
            for launched, earliest, end in self._clock.passed(wait=wait):
                if launched is None:
                    continue
                start = min(end, max(earliest, launched.start))
                waited = end - start
                if launched.action.op not in RECEIVES:
                    # The GPU is idle while the host waits, unless it is still busy with earlier actions.
                    waited = min(launched.wait, waited, max(0.0, launched.end - start))
                self._add(launched._replace(start=start, end=end, wait=waited))

    @property
    def clock(self) -> float:
        """The time up to which actions are recorded: now or, on a GPU, the end of the last one that was read."""
        return perf_counter() if self._clock is None else self._clock.reached

    @property
    def waited_on_device(self) -> float | None:
        """Seconds in which the GPU had nothing to do because a message had not come; None without one."""
        return None if self._clock is None else self.forward.wait + self.backward.wait + self.update.wait

    def _add(self, done: Recorded) -> None:
        op = done.action.op
        stats = self._by_op[op]
        if op in RECEIVES:
            stats.wait += done.duration
        elif op in SENDS:
            stats.send += done.duration
        else:
            stats.wait += done.wait
            stats.compute += done.duration - done.wait
        self.events.add(*done)


class DeviceClock(Generic[T]):
    """Times of a GPU's work, without waiting for it: marks of type T on its current stream, in the time of
    `time.perf_counter`.

    The host launches actions ahead of the GPU, so its own clock says nothing. On one stream an action begins where the
    one before it ended: a receive lasts as long as the stream waited for the tensor, a forward as long as it computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._pending: deque[tuple[T, torch.cuda.Event, float]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._base = self._event()
        self._base.record()
        self._base.synchronize()
        self._base_time = perf_counter()
        self.reached = self._base_time  # the end of the last mark that was read
        self._since_base = 0

    def mark(self, what: T) -> None:
        """Everything launched since the last mark belongs to this one."""
        event, now = self._event(), perf_counter()
        event.record()
        self._pending.append((what, event, now))

    def passed(self, *, wait: bool = False) -> Iterator[tuple[T, float, float]]:
        """Marks that the GPU has passed, with their start and end; all of them if `wait`."""
        while self._pending and (wait or self._pending[0][1].query()):
            what, event, launched = self._pending.popleft()
            if wait:
                event.synchronize()
            end = self._base_time + self._base.elapsed_time(event) / 1000
            # The clocks of host and GPU drift apart. The GPU passes a mark after its launch and before it is read.
            right = min(max(end, launched), perf_counter())
            self._base_time += right - end
            start, self.reached = self.reached, max(self.reached, right)
            self._since_base += 1
            if self._since_base >= REBASE:
                self._spare.append(self._base)
                self._base, self._base_time, self._since_base = event, right, 0
            else:
                self._spare.append(event)
            yield what, start, self.reached

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
