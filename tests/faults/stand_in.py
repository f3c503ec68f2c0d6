"""A rank that does as it is told and knows no torch: it starts in a moment, so that supervision can be tested often.

Started by the launcher in place of an interpreter; its arguments say what each rank does, in order of rank.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress

from vpipe.errors import ConfigError, PeerError
from vpipe.faults import Fault
from vpipe.launch.rank import end_with_launcher, fail, start_beating
from vpipe.observe.whereabouts import whereabouts
from vpipe.schedule import Action, Op


def behave(what: str, rank: int) -> None:
    name, _, number = what.partition(":")
    seconds = float(number or 0)
    if name == "done":
        return
    if name == "wait":
        time.sleep(60)
    elif name == "follow":  # a rank whose neighbour went because of somebody else
        time.sleep(seconds)
        raise PeerError("rank 7 closed its connection: it ended or was killed")
    elif name == "mistake":
        raise ConfigError("batch_size is 0: expected at least 1, such as\nbatch_size: 8")
    elif name == "compute":  # in Python: the lock is passed round
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sum(range(1000))
    elif name == "grind":  # in C: the lock is held by somebody who works
        sum(range(int(seconds * 2e7)))
    elif name == "parent":
        subprocess.Popen(["sleep", "300"])
        time.sleep(60)
    else:
        time.sleep(seconds)
        Fault(rank, "fwd", name).strike()


def main() -> None:
    rank = int(os.environ["RANK"])
    what = sys.argv[3:][rank]
    end_with_launcher()
    if what == "deaf":  # still importing
        time.sleep(60)
    start_beating()
    whereabouts(rank).enter(Action(rank, Op.F, 3), time.monotonic())
    with suppress(SystemExit):
        try:
            behave(what, rank)
        except Exception as error:
            fail(error)


main()
