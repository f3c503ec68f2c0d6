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
    """Run `work(world)` on so many ranks that are threads of this process, for notebooks, tests and lessons.

        def work(world):
            with vpipe.Pipeline(model, batch, optimizer=optimizer, world=world) as pipe:
                return [loss for _, loss in pipe.train(batches)]

        losses = vpipe.run_ranks(2, work)[0]

    Build model and batches before: threads share torch's random numbers. `work` may build several pipelines, one after
    the other. The first rank that fails ends all of them.

    Args:
        size: The number of ranks.
        work: A function that is called on each rank, with the `world` that its `Pipeline` is given.
        timeout: The most seconds that one rank waits for another; a rank that computes may take longer.
        hub: What joins the ranks, if not the usual one; for tests.

    Returns:
        What `work` has returned on each rank, in the order of ranks.
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
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not failures:
                thread.join(0.2)
    except KeyboardInterrupt as error:  # a notebook goes on after it: no rank may
        hub.abort("stopped by you")
        failures.insert(0, error)
    if failures:
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join(60.0)  # they were notified, and must end before the caller continues
            if thread.is_alive():
                raise PeerError("a rank that runs as a thread does not end though another one failed")
        # A rank that closes its channels on the way out may be heard of before its own failure is.
        raise next((error for error in failures if not isinstance(error, PeerError)), failures[0])
    return [results[rank] for rank in range(size)]
