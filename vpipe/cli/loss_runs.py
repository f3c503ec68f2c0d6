"""The runs of `vpipe converge`: one after the other, or several at the same time, with a bar."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vpipe.system.console import announce, progress

if TYPE_CHECKING:
    from vpipe.config import RunConfig
    from vpipe.train.convergence import LossCurve, OnUpdate


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

    number_of_runs, done = sum(len(configs) for _, configs in rows), dict[str, float]()
    with progress() as report:

        def moved(run: str, made: int, of: int, loss: float) -> None:
            done[run] = made / of
            report(sum(done.values()) / number_of_runs, f"{run}: update {made} of {of}, loss {loss:.4f}")

        def reports(label: str, config: RunConfig) -> OnUpdate:
            return partial(moved, f"{label}, seed {config.seed}")

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
