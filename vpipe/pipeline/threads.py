"""Ranks as threads of one process: quick to start, the same runtime, another channel."""

import threading
from collections.abc import Callable
from typing import TypeVar

from vpipe.communication import InProcessHub, InProcessWorld
from vpipe.errors import PeerError

T = TypeVar("T")


def run_ranks(
    size: int,
    work: Callable[[InProcessWorld], T],
    timeout: float = 60.0,
    *,
    hub: InProcessHub | None = None,
) -> list[T]:
    """What `work` returns on each rank; the first failure ends all of them and is raised.

    `timeout` is the longest that one rank waits for another; a rank that computes may take longer. `hub` is what
    joins the ranks, if not the usual one.
    """
    hub = hub or InProcessHub(size, timeout)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(hub.join(rank))
        except BaseException as error:
            failures.append(error)
            hub.abort(f"rank {rank} failed: {error}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not failures:
            thread.join(0.2)
    if failures:
        for thread in threads:  # they were notified, and must end before the caller continues
            thread.join(60.0)
            if thread.is_alive():
                raise PeerError("a rank that runs as a thread does not end though another one failed")
        # A rank that closes its channels on the way out may be heard of before its own failure is.
        raise next((error for error in failures if not isinstance(error, PeerError)), failures[0])
    return [results[rank] for rank in range(size)]
