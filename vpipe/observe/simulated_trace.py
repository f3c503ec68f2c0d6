"""The simulated timeline as a Chrome trace: open it in Perfetto or chrome://tracing.

One track a rank, an arrow for each message from the action that made it to the one that reads it, and each rank's
memory as a counter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vpipe.observe.chrome import Entry, arrow, counter, piece, process, track, write_entries
from vpipe.schedule import Action, Event, Op
from vpipe.simulate.simulation import Simulation, Timeline


def write_trace(simulation: Simulation, path: Path) -> None:
    write_entries(trace_events(simulation), path)


def trace_events(simulation: Simulation) -> Iterator[Entry]:
    assert simulation.timeline is not None, "simulate with timeline=True"
    yield process(f"simulated {simulation.schedule}")
    for rank in simulation.ranks:
        yield from track(rank.rank, rank.stages)
    yield from (piece(*event) for event in simulation.timeline.events)
    yield from _arrows(simulation.timeline)
    for rank, samples in zip(simulation.ranks, simulation.timeline.memory, strict=True):
        fixed = rank.memory.total - max((held for _, held in samples), default=0)
        for time, held in ((0.0, 0), *samples):
            yield counter(f"memory of rank {rank.rank}", time, bytes=fixed + held)


def _arrows(timeline: Timeline) -> Iterator[Entry]:
    """From F to the F of each reader, and from I or B to that of each producer, where those sit on other ranks."""
    found: dict[Action, Event] = {}
    minibatches = set()
    for event in timeline.events:
        stage, op, minibatch = event.action
        if op in (Op.F, Op.I, Op.B):
            found[Action(stage, Op.F if op is Op.F else Op.I, minibatch)] = event
            minibatches.add(minibatch)
    number = 0
    for minibatch in sorted(minibatches):
        for producer, reader in timeline.edges:
            for op, source, target in ((Op.F, producer, reader), (Op.I, reader, producer)):
                made, read = found[Action(source, op, minibatch)], found[Action(target, op, minibatch)]
                if made.rank != read.rank:
                    yield from arrow(number, made.rank, made.end, read.rank, read.start)
                    number += 1
