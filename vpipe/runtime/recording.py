"""What a rank has done: each action's time added to its figures, and the action to the events.

On a CPU an action is over when its method returns. On a GPU it is issued then, and recorded once the GPU has passed it:
it lasts from the end of the action before it, or from when the host began to issue it if that was later, to its own
end. In between the GPU has nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple

import torch

from vpipe.record.events import Events
from vpipe.runtime.device_clock import DeviceClock
from vpipe.runtime.stats import RuntimeStats
from vpipe.schedule import Action, Op

RECEIVES = (Op.RECV_F, Op.RECV_B)
SENDS = (Op.SEND_F, Op.SEND_B, Op.REDUCE)


class Done(NamedTuple):
    """An action that was issued, and what is known of it before its time is."""

    action: Action
    sent: int
    received: int
    version: int
    evaluation: bool


class Issued(NamedTuple):
    """The host's times of an action: when it began and ended to issue it, and waited for messages meanwhile."""

    done: Done
    start: float
    end: float
    waited: float


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
        self._clock: DeviceClock[Issued | None] | None = (
            DeviceClock(device) if device.type == "cuda" else None
        )

    def begin(self) -> None:
        """A program starts: what came before, a save perhaps, is not its first action's time."""
        if self._clock is not None:
            self._clock.mark(None)

    def done(self, done: Done, start: float, waited: float) -> None:
        """The action was issued at `start`, and the host has waited so long for messages meanwhile."""
        issued = Issued(done, start, perf_counter(), waited)
        if self._clock is None:
            self._add(*issued)
        else:
            self._clock.mark(issued)
            self.read_clock()

    def read_clock(self, *, wait: bool = False) -> None:
        """Take in what the GPU has done meanwhile; all that it was given, if `wait`."""
        if self._clock is not None:
            for issued, earliest, end in self._clock.passed(wait=wait):
                if issued is None:
                    continue
                start = min(end, max(earliest, issued.start))
                waited = end - start
                if issued.done.action.op not in RECEIVES:
                    # The GPU is idle while the host waits, unless it is still busy with earlier actions.
                    waited = min(issued.waited, waited, max(0.0, issued.end - start))
                self._add(issued.done, start, end, waited)

    @property
    def clock(self) -> float:
        """The time up to which actions are recorded: now or, on a GPU, the end of the last one that was read."""
        return perf_counter() if self._clock is None else self._clock.reached

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
