"""Injected faults: `VPIPE_FAULT="rank=2,step=5,point=fwd_send,minibatch=3,kind=kill"`.

Several are separated by `;`. A fault happens the first time that its rank passes its point; of `step` (an update)
and `minibatch`, one that is not given matches any. At a point outside the steps (a checkpoint, an evaluation) `step` is
the number of updates made. It happens once in a job: not in a run that was restarted, unless `attempt` gives the number
of that restart. `times` lets it happen more often, `seconds` is how long `sleep` and `gil` last.

The points of the program (fwd, bwd, ...) are put into the table of operations when a fault is configured
(`vpipe.runtime.faulty`); the others are calls of `point`, which return at once when none is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache

from vpipe.errors import ConfigError, meant

VARIABLE = "VPIPE_FAULT"
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""The number of restarts of the job before this process: torchrun's variable, and our launcher's."""

POINTS = (
    *("rendezvous", "init", "data", "fwd_recv", "fwd", "fwd_send", "bwd_recv", "bwd", "bwd_send"),
    *("reduce", "step", "ckpt_write", "ckpt_commit", "eval", "shutdown"),
)
TENSOR_POINTS = ("fwd_recv", "fwd", "fwd_send", "bwd_recv", "bwd", "bwd_send", "reduce", "step")
"""Points with a tensor that `nan` can set."""
KINDS = ("kill", "term", "stop", "segv", "raise", "exit", "sleep", "nan", "gil", "descriptors")
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
EXIT_CODE = 70
"""The exit code of `exit`."""


@dataclass
class Fault:
    rank: int
    point: str
    kind: str
    step: int | None = None
    minibatch: int | None = None
    attempt: int = 0
    times: int = 1
    seconds: float = 3600.0
    reached = 0  # updates that this rank has made; the runtime counts them

    def fits(self, point: str, step: int | None, minibatch: int | None) -> bool:
        return (
            self.times > 0
            and self.point == point
            and self.step in (None, step)
            and self.minibatch in (None, minibatch)
        )

    def strike(self) -> None:
        """Inject the fault, and write so to the rank's log; `nan`, which needs a tensor, is left to the caller."""
        self.times -= 1
        print(f"{VARIABLE}: {self.kind} at {self.point}, {time.time():.3f}", file=sys.stderr, flush=True)
        if self.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.kind])
        elif self.kind == "segv":
            ctypes.string_at(0)
        elif self.kind == "raise":
            raise RuntimeError(f"{VARIABLE} asked for this at {self.point}")
        elif self.kind == "exit":
            os._exit(EXIT_CODE)
        elif self.kind == "sleep":
            time.sleep(self.seconds)
        elif self.kind == "gil":
            ctypes.PyDLL(None).usleep(int(self.seconds * 1e6))  # a PyDLL keeps the lock during the call
        elif self.kind == "descriptors":
            with suppress(OSError):  # raised when none is left
                while True:
                    os.dup(2)


def point(name: str, minibatch: int | None = None) -> None:
    """This rank passes a point outside the program; its step is the number of updates that it has made."""
    if VARIABLE in os.environ:
        for fault in wanted(int(os.environ.get("RANK", "0"))):
            if fault.fits(name, fault.reached, minibatch):
                fault.strike()


@cache
def wanted(rank: int) -> list[Fault]:
    """The faults of this rank in this attempt; their `times` count down as they happen."""
    attempt = int(os.environ.get(ATTEMPT, "0"))
    found = read_faults(os.environ.get(VARIABLE, ""))
    return [fault for fault in found if fault.rank == rank and fault.attempt == attempt]


def read_faults(text: str) -> list[Fault]:
    return [_read(part.strip()) for part in text.split(";") if part.strip()]


def _read(text: str) -> Fault:
    known = [field.name for field in fields(Fault)]
    given: dict[str, str | int | float] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            raise ConfigError(
                f"{VARIABLE} is {text!r}: {part.strip()!r} is not key=value: {meant(key, known)}"
            )
        given[key] = value if key in ("point", "kind") else _number(text, key, value)
    for key in ("rank", "point", "kind"):
        if key not in given:
            raise ConfigError(f"{VARIABLE} is {text!r}: {key}= is missing")
    fault = Fault(**given)  # type: ignore[arg-type]
    if fault.point not in POINTS:
        raise ConfigError(f"{VARIABLE} is {text!r}: point is {fault.point!r}: {meant(fault.point, POINTS)}")
    if fault.kind not in KINDS:
        raise ConfigError(f"{VARIABLE} is {text!r}: kind is {fault.kind!r}: {meant(fault.kind, KINDS)}")
    if fault.kind == "nan" and fault.point not in TENSOR_POINTS:
        raise ConfigError(
            f"{VARIABLE} is {text!r}: there is no tensor at {fault.point} that could be nan: "
            f"choose {', '.join(TENSOR_POINTS)}"
        )
    return fault


def _number(text: str, key: str, value: str) -> int | float:
    try:
        number = float(value) if key == "seconds" else int(value)
    except ValueError:
        number = -1
    if not 0 <= number < 1e9:
        raise ConfigError(f"{VARIABLE} is {text!r}: {key} is {value!r}, which is no number from 0 on")
    return number
