"""The clocks of the ranks, compared: how far rank 0's is ahead of this rank's.

Each rank in turn asks rank 0 for its time, several times over. The answer was given somewhere between question and
arrival; the middle is the best guess, and wrong by half a round trip at most:

    this rank   asked ─┐            ┌─▶ answered      offset = told - (asked + answered) / 2
    rank 0             └─▶ told ────┘

On one host `time.perf_counter` reads CLOCK_MONOTONIC, which all processes share. It is measured there too, and an
offset that is smaller than its own uncertainty is taken for what it most likely is: none.
"""

from __future__ import annotations

from time import perf_counter

from vpipe.communication import CommunicationHandler
from vpipe.record.events import SAME_CLOCK, ClockOffset

ROUNDS = 8
"""Questions of each rank; the one with the shortest round trip counts."""
NAME = "clock"


def align_clocks(handler: CommunicationHandler) -> ClockOffset:
    """Measure this rank's clock against rank 0's. Every rank calls it once, at the same place."""
    handler.register_tensor(NAME)
    if handler.rank == 0:
        for peer in handler.everyone():
            for number in range(ROUNDS):
                handler.collect(NAME, number, 1, [peer])
                handler.post(NAME, number, [perf_counter()], [peer])
        return SAME_CLOCK
    return best_offset([_ask(handler, number) for number in range(ROUNDS)])


def best_offset(answers: list[tuple[float, float, float]]) -> ClockOffset:
    """The offset by the quickest of the answers, each of which is (asked, told by rank 0, answered)."""
    asked, told, answered = min(answers, key=lambda answer: answer[2] - answer[0])
    offset, round_trip = told - (asked + answered) / 2, answered - asked
    return ClockOffset(offset if abs(offset) > round_trip / 2 else 0.0, round_trip)


def _ask(handler: CommunicationHandler, number: int) -> tuple[float, float, float]:
    asked = perf_counter()
    handler.post(NAME, number, [asked], [0])
    told = handler.collect(NAME, number, 1, [0])[0][0]
    return asked, told, perf_counter()
