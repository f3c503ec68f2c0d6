"""The offset between the clock of this rank and rank 0's.

Each rank in turn asks rank 0 for its time, several times. Rank 0 answered at some time between question and arrival;
the middle is the best estimate, wrong by half a round trip at most:

    this rank   asked ─┐            ┌─▶ answered      offset = time - (asked + answered) / 2
    rank 0             └─▶ time ────┘

On one host `time.perf_counter` reads CLOCK_MONOTONIC, which all processes share. It is measured there too; an offset
smaller than its uncertainty is taken as zero.
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
    """The offset by the quickest of the answers, each of which is (asked, rank 0's time, answered)."""
    asked, time_there, answered = min(answers, key=lambda answer: answer[2] - answer[0])
    offset, round_trip = time_there - (asked + answered) / 2, answered - asked
    return ClockOffset(offset if abs(offset) > round_trip / 2 else 0.0, round_trip)


def _ask(handler: CommunicationHandler, number: int) -> tuple[float, float, float]:
    asked = perf_counter()
    handler.post(NAME, number, [asked], [0])
    time_there = handler.collect(NAME, number, 1, [0])[0][0]
    return asked, time_there, perf_counter()
