"""The server that processes are forked from: it has imported what is slow to import."""

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext


@cache
def server_context() -> ForkServerContext:
    """Processes of this context are forked from a server that starts here, without what the test at hand has set for
    its own processes: later ones are forked from it too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    of_a_test = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("VPIPE_")}
    try:
        forkserver.ensure_running()
    finally:
        os.environ.update(of_a_test)
    return context
