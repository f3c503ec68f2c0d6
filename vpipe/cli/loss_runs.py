"""The runs of `vpipe converge`: one after the other, or several at the same time, with a bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vpipe.system.console import PlainConsole, announce, inform

if TYPE_CHECKING:
    from vpipe.config import RunConfig
    from vpipe.train.convergence import LossCurve

LINE_EVERY = 30.0
"""Seconds between two lines about a run where the output is no terminal."""
Report = Callable[[str, int, int, float], None]
"""Takes a run, the updates that it has made and will make, and the last one's loss."""


def train_all(
    rows: Sequence[tuple[str, Sequence[RunConfig]]], jobs: int, device: str | None
) -> Generator[list[LossCurve], None, None]:
    """The curves of each row, one for each configuration: in this process, or of several at the same time.

    No process or thread of it goes on when the generator is closed.
    """

    def say(number: int) -> None:
        announce(f"{number + 1} of {len(rows)}: {rows[number][0]}")

    say(0)
    from vpipe.train.convergence import train_curve  # with torch
    from vpipe.train.loss_processes import LossProcesses

    with _progress(sum(len(configs) for _, configs in rows)) as report:

        def reports(label: str, config: RunConfig) -> Callable[[int, int, float], None]:
            return partial(report, f"{label}, seed {config.seed}")

        if jobs == 1:
            for number, (label, configs) in enumerate(rows):
                if number:
                    say(number)
                yield [train_curve(config, device, reports(label, config)) for config in configs]
            return
        with LossProcesses(jobs, device) as processes:
            begun = [
                [processes.begin(config, reports(label, config)) for config in configs]
                for label, configs in rows
            ]
            for number, runs in enumerate(begun):
                if number:
                    say(number)
                yield [run.result() for run in runs]


@contextmanager
def _progress(runs: int) -> Iterator[Report]:
    """A bar over all runs on a terminal, and lines now and then anywhere else."""
    shares: dict[str, float] = {}
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}", markup=False), BarColumn(None), TimeRemainingColumn())
        with Progress(*columns, console=PlainConsole(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=runs)

            def move(run: str, made: int, of: int, loss: float) -> None:
                shares[run] = made / of
                line = f"{run}: update {made} of {of}, loss {loss:.4f}"
                bar.update(task, completed=sum(shares.values()), description=line)

            yield move
        return
    said = time.monotonic()

    def write(run: str, made: int, of: int, loss: float) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_EVERY:
            said = time.monotonic()
            inform(f"{run}: update {made} of {of}, loss {loss:.4f}")

    yield write
