"""A rank that follows a script and knows no torch: it starts in a moment, so that supervision can be tested often.

Started by the launcher in place of an interpreter; its arguments say what each rank does, in order of rank. Faults
wait until the others are where they should be, which the launcher's page tells: a clock would not know.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

from vpipe.errors import ConfigError, PeerError
from vpipe.launch import rank as supervised
from vpipe.record.whereabouts import Page, whereabouts
from vpipe.schedule import Action, Op
from vpipe.system.faults import Fault

FAULTS = ("kill", "segv", "exit", "raise", "stop", "gil")
READY, DONE = 3, 4
"""The minibatches whose forward passes a rank is in when it has begun its script, and when it has done it."""


def behave(what: str, rank: int) -> None:
    name, _, number = what.partition(":")
    if name == "parent":
        subprocess.Popen(["sleep", "300"])
    enter(rank, READY)
    if name in FAULTS:
        page = whereabouts(rank).page
        while not others_are_ready(page) or (number and reached(page, int(number)) != DONE):
            sum(range(1000))  # at work, in Python: the lock is passed round
        Fault(rank, "fwd", name).strike()
    elif name == "follow":  # a rank whose neighbour went because of somebody else
        raise PeerError("rank 7 closed its connection: it ended or was killed")
    elif name == "mistake":
        raise ConfigError("batch_size is 0: expected at least 1, such as", "batch_size: 8")
    elif name == "done":  # it has done all when its launcher is signalled
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGINT)
    elif name == "grind":  # in C: the lock is held by somebody who works
        started = time.thread_time()
        sum(range(1_000_000))
        sum(range(int(1_000_000 * float(number) / (time.thread_time() - started))))
        enter(rank, DONE)
        while True:
            sum(range(1000))
    else:
        time.sleep(600)


def enter(rank: int, minibatch: int) -> None:
    whereabouts(rank).enter(Action(rank, Op.F, minibatch), time.monotonic())


def others_are_ready(page: Page) -> bool:
    heard = [rank for rank, what in enumerate(sys.argv[3:]) if what not in ("deaf", "stopped")]
    return all(reached(page, rank) for rank in heard)


def reached(page: Page, rank: int) -> int:
    action = page.place(rank).action
    return action.minibatch if action is not None else 0


def main() -> None:
    rank = int(os.environ["RANK"])
    what = sys.argv[3:][rank]
    # A rank that has lost another one has imported it; here it would import torch.
    sys.modules["vpipe.communication.heartbeat"] = SimpleNamespace(Heartbeat=SimpleNamespace(failure=""))  # type: ignore[assignment]
    supervised.EXIT_WAIT = 0.2
    supervised.REASON_WAIT = 0.0 if what == "follow:nobody" else 600.0
    supervised.end_with_launcher()
    if what == "deaf":  # still importing
        time.sleep(600)
    if what == "stopped":  # while it imports
        os.kill(os.getpid(), signal.SIGSTOP)
    supervised.start_heartbeat()
    with suppress(SystemExit):
        try:
            behave(what, rank)
        except Exception as error:
            supervised.fail(error)


main()
