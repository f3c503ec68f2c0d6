"""`vpipe converge`: the losses of schedules, optimizers and remedies at equal samples, before GPUs are rented."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path

from vpipe.cli.loss_cases import Case, make_cases, remedy_choices, schedule_choices, value_choices
from vpipe.cli.loss_rows import Row, draw_curves, predicted_seconds, slowdowns, table
from vpipe.cli.loss_runs import train_all
from vpipe.cli.options import print_result
from vpipe.config.settings import read_settings
from vpipe.cost import Profile, read_profile, write_convergence
from vpipe.errors import printable
from vpipe.system.console import warn


def converge(
    path: Path,
    settings: Sequence[str],
    *,
    schedules: str,
    stages: int | None,
    optimizers: str | None,
    staleness: str | None,
    rates: str | None,
    updates: int | None,
    seeds: int,
    jobs: int,
    device: str | None,
    profile: Path | None,
    picture: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    axes = [
        schedule_choices(schedules),
        value_choices("optimizer", optimizers),
        value_choices("learning_rate", rates),
        remedy_choices(staleness),
    ]
    cases = make_cases(path, read_settings(settings), axes, stages, updates)
    costs = None if profile is None else read_profile(profile)
    if costs is not None and costs.optimizer:
        others = {case.config.chosen_optimizer for case in cases} - {costs.optimizer}
        if others:
            warn(
                f"{profile} has the updates of {costs.optimizer}: times of rows with {', '.join(sorted(others))} are "
                "predicted as if their updates took as long"
            )
    rows: list[Row] = []
    stopped: KeyboardInterrupt | None = None
    try:
        _train(cases, seeds, jobs, device, costs, rows)
    except KeyboardInterrupt as error:
        if not rows:
            raise
        stopped = error
        warn(f"stopped by you when {len(rows)} of {len(cases)} rows were trained")
    figures = [row.figures(rows[0].finals) for row in rows]
    if output is not None:
        found = slowdowns(rows)
        write_convergence(figures, found, output)
        if not found:
            warn(
                f"{output} has no slowdowns: no stale row has a synchronous one with its optimizer (--optimizers)"
            )
    print_result(figures, table(figures, seeds), as_json)
    if picture is not None or find_spec("matplotlib") is not None:
        folder = Path(cases[0].config.log_directory)
        with suppress(OSError):  # drawing says it if there is no folder
            folder.mkdir(parents=True, exist_ok=True)
        file = picture or folder / f"converge-{path.stem}.png"
        draw_curves(figures, file)
        print(printable(f"picture {file}"), file=sys.stderr)
    if stopped is not None:
        raise stopped


def _train(
    cases: Sequence[Case], seeds: int, jobs: int, device: str | None, costs: Profile | None, rows: list[Row]
) -> None:
    """Train them all; each is added to `rows` when its curves are there."""
    runs = [(case.label, case.seeded(seeds)) for case in cases]
    with closing(train_all(runs, jobs, device)) as trained:
        for case, curves in zip(cases, trained, strict=True):
            rows.append(
                Row(case, curves, None if costs is None else predicted_seconds(costs, case.config, curves[0]))
            )
            for number, curve in enumerate(curves):
                if curve.diverged:
                    warn(f"{case.label}, seed {case.config.seed + number}: {curve.diverged}")
