"""How long something takes at its quickest, whatever else the machine and this process have to do."""

from collections.abc import Callable
from time import thread_time
from timeit import repeat


def quickest(work: Callable[[], object], times: int = 3) -> float:
    """Processor seconds of this thread, without the garbage of other tests (`timeit` collects none)."""
    return min(repeat(work, number=1, repeat=times, timer=thread_time))
