"""The predicted side of a report: one stretch of the simulated schedule, which the page repeats, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vpipe.observe.prediction import Prediction
from vpipe.observe.report.lanes import OPS, micro
from vpipe.record.events import RankEvents


def predicted(prediction: Prediction | None, ranks: Sequence[RankEvents]) -> dict[str, Any] | None:
    """A lane a rank; minibatches and times are counted from the beginning of the stretch."""
    if prediction is None or not ranks:
        return None
    simulation = prediction.simulation
    assert simulation.timeline is not None
    stretch = range(prediction.first, prediction.first + prediction.minibatches)
    events = [event for event in simulation.timeline.events if event.action.minibatch in stretch]
    began = min(event.start for event in events)
    lanes = []
    for figures in simulation.ranks:
        own = [event for event in events if event.rank == figures.rank]
        lanes.append(
            {
                "rank": figures.rank,
                "op": [OPS.index(event.action.op) for event in own],
                "stage": [event.action.stage for event in own],
                "minibatch": [event.action.minibatch - prediction.first for event in own],
                "start": [micro(event.start - began) for event in own],
                "duration": [micro(event.end - event.start) for event in own],
                "bubble": figures.bubble,
                "peak_memory": figures.memory.total,
            }
        )
    return {
        "source": prediction.source,
        "minibatches": prediction.minibatches,
        "period": micro(prediction.seconds),
        "lanes": lanes,
        "seconds_per_update": simulation.step_time,
        "samples_per_s": simulation.samples_per_second,
        "bubble_share": simulation.bubble,
    }
