"""Warning about a rank that is much slower than the others, while the run goes on.

Every rank sends rank 0 its computing time for a minibatch now and then. Rank 0 makes its update last, so it does not
wait for these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vpipe.pipeline import Pipeline

WINDOW = 10
"""Updates over which ranks are compared; the first ones warm up and do not count."""
FACTOR = 4.0
"""From here on a rank is slow; partitions are rarely so uneven."""


class Pace:
    """Call `update` on every rank after each update. Rank 0 warns with `say`."""

    def __init__(self, pipe: Pipeline, say: Callable[[str], None]) -> None:
        pipe.handler.register_tensor("pace")
        self._pipe = pipe
        self._say = say
        self._made = 0
        self._before = self._so_far()
        self._warned: dict[int, float] = {}  # rank ▶ the factor of its last warning

    def update(self) -> None:
        self._made += 1
        if self._made % WINDOW or self._pipe.world.size == 1:
            return
        before, self._before = self._before, self._so_far()
        if self._made == WINDOW:
            return
        seconds, minibatches = (now - then for now, then in zip(self._before, before, strict=True))
        pace = seconds / minibatches if minibatches else 0.0
        handler = self._pipe.handler
        if handler.rank:
            handler.post("pace", self._made, [pace], [0])
            return
        others = handler.collect("pace", self._made, 1, handler.everyone())
        self._compare([pace, *(others[rank][0] for rank in sorted(others))])

    def _so_far(self) -> tuple[float, int]:
        """Seconds of computing, and minibatches that went through."""
        runtime = self._pipe.runtime
        ways = (runtime.forward_stats, runtime.backward_stats, runtime.update_stats)
        return sum(way.compute for way in ways), runtime.forwards

    def _compare(self, paces: list[float]) -> None:
        for rank, pace in enumerate(paces):
            usual = median(paces[:rank] + paces[rank + 1 :])
            factor = pace / usual if usual else 0.0
            if factor > FACTOR and factor > 2 * self._warned.get(rank, 0.0):
                self._warned[rank] = factor
                stages = ", ".join(map(str, self._pipe.schedule.stages_of(rank)))
                self._say(
                    f"warning: rank {rank} (stage {stages}) is {factor:.1f} times as slow as the others: it computes "
                    f"{1000 * pace:.1f} ms for a minibatch, they {1000 * usual:.1f} ms; its host is busy or slow, or "
                    "its stage has too many blocks"
                )
