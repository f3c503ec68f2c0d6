"""The server that processes are forked from: it has imported what is slow to import."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def server_context() -> ForkServerContext:
    """Processes of this context are forked; the server starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context
