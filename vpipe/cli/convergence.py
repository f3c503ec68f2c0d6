"""`vpipe converge`: the losses of schedules, optimizers and remedies at equal samples, before GPUs are rented."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from math import inf, isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vpipe.cli.compare import split_values
from vpipe.cli.compare_plot import curve_look, draw
from vpipe.cli.loss_runs import train_all
from vpipe.cli.options import print_result
from vpipe.config.file import read_config
from vpipe.config.settings import read_settings
from vpipe.cost import KEEP, Plan, Profile, Slowdown, read_profile, write_convergence
from vpipe.errors import ConfigError, printable
from vpipe.schedule import kind_of
from vpipe.schedule.steady import enough_minibatches
from vpipe.system.console import warn

if TYPE_CHECKING:
    from vpipe.config import RunConfig
    from vpipe.train.convergence import LossCurve

UPDATES = 300
"""If no number of them is asked for, and the file's epochs have as many."""


@dataclass(frozen=True)
class Case:
    """One row: a configuration, trained once for each seed."""

    label: str
    config: RunConfig
    """Its `seed` is that of the first."""
    interval: int
    """Minibatches of an update."""

    def seeded(self, seeds: int) -> list[RunConfig]:
        """One for each run."""
        return [self.config.model_copy(update={"seed": self.config.seed + n}) for n in range(seeds)]

    @property
    def without_rate(self) -> str:
        """Equal for cases that differ in their learning rate only."""
        config = self.config
        return repr((config.chosen_schedule, self.interval, config.chosen_optimizer, config.staleness))


@dataclass(frozen=True)
class Row:
    case: Case
    curves: list[LossCurve]
    seconds: float | None
    """Of an update, as the simulator predicts it."""

    @property
    def optimizer(self) -> str:
        return self.case.config.chosen_optimizer

    @property
    def delay(self) -> float:
        return self.curves[0].delay

    @property
    def finals(self) -> list[float]:
        """Infinite where a run has diverged."""
        return [curve.final if isfinite(curve.final) else inf for curve in self.curves]

    def figures(self, goals: Sequence[float]) -> dict[str, Any]:
        """What `--json` prints. `goals` are the losses of the first row at its end, one for each seed."""
        reached = [curve.samples_to(goal) for curve, goal in zip(self.curves, goals, strict=True)]
        samples = None if None in reached else fmean(n for n in reached if n is not None)
        first, config = self.curves[0], self.case.config
        return {
            "label": self.case.label,
            "schedule": config.chosen_schedule,
            "interval": self.case.interval,
            "optimizer": self.optimizer,
            "predict": config.remedies.predict,
            "learning_rate": config.learning_rate,
            "batch_size": config.batch_size,
            "delay": self.delay,
            "overshoot": _mean([curve.overshoot for curve in self.curves]),
            "updates": len(first.losses),
            "samples": len(first.losses) * first.samples,
            "epochs": first.epochs,
            "staleness": list(first.staleness),
            "partition": list(first.partition),
            "loss": _finite(fmean(self.finals)),
            "spread": stdev(self.finals)
            if len(self.finals) > 1 and all(map(isfinite, self.finals))
            else None,
            "evaluation_loss": _finite(fmean(curve.evaluation_loss for curve in self.curves)),
            "diverged": [curve.diverged for curve in self.curves if curve.diverged],
            "samples_to_goal": samples,
            "seconds_per_update": self.seconds,
            "seconds_to_goal": (
                None if samples is None or self.seconds is None else samples / first.samples * self.seconds
            ),
            "losses": [list(curve.losses) for curve in self.curves],
        }


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
    axes = [_schedules(schedules)]
    axes += [_axis(key, given) for key, given in (("optimizer", optimizers), ("learning_rate", rates))]
    axes.append(_remedies(staleness))
    cases = _cases(path, read_settings(settings), axes, stages, updates)
    costs = None if profile is None else read_profile(profile)
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


Choice = tuple[str, dict[str, Any]]
"""How a row's label names it, and the keys that it sets."""


def _schedules(given: str) -> list[Choice]:
    """`1f1b:8`: the schedule with 8 minibatches an update."""
    found = []
    for text in split_values(given):
        name, colon, count = text.partition(":")
        keys: dict[str, Any] = {"schedule": name}
        synchronous = kind_of(name).synchronous
        if colon:
            if not count.isdigit():
                raise ConfigError(f"--schedules {text!r}: write a number of minibatches behind the colon")
            keys["minibatches" if synchronous else "update_interval"] = int(count)
        found.append((text, keys))
    return found


def _axis(key: str, given: str | None) -> list[Choice]:
    if given is None:
        return [("", {})]
    return [(value, read_settings([f"{key}={value}"])) for value in split_values(given)]


def _remedies(given: str | None) -> list[Choice]:
    """`none,predict,predict+async_after:100`."""
    if given is None:
        return [("", {})]
    found: list[Choice] = []
    for text in split_values(given):
        remedies: list[Any] = []
        for remedy in [] if text == "none" else text.split("+"):
            name, colon, count = remedy.partition(":")
            remedies.append({name: int(count) if count.isdigit() else count} if colon else name)
        found.append((text, {"staleness": remedies}))
    return found


def _cases(
    path: Path, settings: dict[str, Any], axes: list[list[Choice]], stages: int | None, updates: int | None
) -> list[Case]:
    """Every combination, for equal samples; of a synchronous schedule without remedies, which it does not need."""
    from vpipe.config.arguments import build_schedule

    if stages is not None:
        settings = {"partition": None, "policies": None, "recompute_ratio": None} | settings
        settings |= {
            "machines": None,
            "module": None,
            "config_file": None,
            "replicas": None,
            "placement": None,
            "stages": stages,
        }
    read: list[tuple[str, dict[str, Any], int]] = []
    for choices in product(*axes):
        keys = settings | {key: value for _, chosen in choices for key, value in chosen.items()}
        if kind_of(keys["schedule"]).synchronous:  # it has nothing stale: once is enough
            if choices[-1] is not axes[-1][0]:
                continue
            choices, keys = choices[:-1], keys | {"staleness": []}
        label = " ".join(text for text, _ in choices if text)
        config = read_config(path, keys, keys["schedule"])
        read.append((label, keys, build_schedule(config).update_interval))
    minibatches = (updates or UPDATES) * max(interval for _, _, interval in read)
    epochs = {} if updates is None else {"epochs": minibatches}  # a minibatch is an epoch at most
    cases = []
    for label, keys, interval in read:
        length = {**epochs, "max_updates": -(-minibatches // interval)}
        cases.append(Case(label, read_config(path, keys | length, keys["schedule"]), interval))
    return cases


def predicted_seconds(profile: Profile, config: RunConfig, curve: LossCurve) -> float:
    """Of an update of the real pipeline, by the simulator."""
    from vpipe.config.arguments import build_schedule
    from vpipe.simulate import simulate

    policies = config.policies or (KEEP,) * sum(curve.partition)
    plan = Plan(curve.partition, tuple(policies), batch_size=config.batch_size)
    schedule = build_schedule(config)
    endless = schedule.minibatches is None
    enough = enough_minibatches(schedule.filling, schedule.update_interval) if endless else None
    return simulate(profile, plan, schedule, enough).step_time


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def slowdowns(rows: Sequence[Row]) -> list[Slowdown]:
    """What the delay of each stale row costs in samples, compared with a synchronous row of the same optimizer.

    That is the one with as many minibatches an update, if there is one, else the one with the lowest loss. Of rows that
    differ in their learning rate only, the best counts.
    """
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: fmean(row.finals)):
        best.setdefault(row.case.without_rate, row)
    found = []
    for row in best.values():
        fresh = [other for other in best.values() if not other.delay and other.optimizer == row.optimizer]
        if row.delay and fresh:
            other = min(fresh, key=lambda other: other.case.interval != row.case.interval)
            pairs = zip(row.curves, other.curves, strict=True)
            factors = [factor for one, two in pairs if (factor := one.slowdown(two)) is not None]
            source = f"{row.case.label}, compared with {other.case.label}"
            predict = row.case.config.remedies.predict
            found += [Slowdown(row.optimizer, predict, row.delay, fmean(factors), source)] if factors else []
    return found


def table(figures: Sequence[dict[str, Any]], seeds: int) -> Table:
    first = figures[0]
    of = f"{seeds} seed" + ("s" if seeds > 1 else "")
    shown = Table(
        title="Loss at equal samples",
        caption=f"loss: mean of the last tenth of the updates, {of}; to the first row's loss: samples until a mean "
        "as low as that with the same seed, compared with the samples of the run: "
        f"{first['samples']:,}, {first['epochs']:.2f} epochs",
        caption_justify="left",
    )
    shown.add_column("run", overflow="fold")
    timed = first["seconds_per_update"] is not None
    columns = ["updates", "stale by", "loss", "±", "evaluation", "to the first row's loss"]
    for column in [*columns, *(["predicted time to it"] if timed else [])]:
        shown.add_column(column, justify="right")
    lowest = min((row["loss"] for row in figures if row["loss"] is not None), default=None)
    for row in figures:
        reached = row["samples_to_goal"]
        cells = [
            row["label"],
            f"{row['updates']:,}",
            ",".join(map(str, row["staleness"])) if len(row["staleness"]) < 9 else str(max(row["staleness"])),
            _loss(row, "loss") + (" *" if row["loss"] is not None and row["loss"] == lowest else ""),
            "–" if row["spread"] is None else f"{row['spread']:.4f}",
            _loss(row, "evaluation_loss"),
            "not reached" if reached is None else f"{reached / first['samples']:.2f}x",
        ]
        if timed:
            seconds = row["seconds_to_goal"]
            cells.append("–" if seconds is None else f"{seconds:,.1f} s")
        shown.add_row(*cells)
    return shown


def _loss(row: dict[str, Any], name: str) -> str:
    if row[name] is not None:
        return f"{row[name]:.4f}"
    return "diverged" if row["diverged"] else "not finite"


def draw_curves(figures: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss against samples and, where a profile says how long an update takes, against predicted time."""
    timed = figures[0]["seconds_per_update"] is not None
    axes = ["samples seen", *(["predicted seconds"] if timed else [])]
    with draw(path, len(axes)) as parts:
        for part, title in zip(parts, axes, strict=True):
            for number, row in enumerate(figures):
                losses = [fmean(values) for values in zip(*row["losses"], strict=True)]
                width = max(1, len(losses) // 50)
                means = [fmean(losses[at : at + width]) for at in range(0, len(losses), width)]
                per_update = (
                    row["samples"] / row["updates"] if title == axes[0] else row["seconds_per_update"]
                )
                places = [min(at + width, len(losses)) * per_update for at in range(0, len(losses), width)]
                finite = [(x, y) for x, y in zip(places, means, strict=True) if isfinite(y)]
                if finite:
                    part.plot(
                        *zip(*finite, strict=True), label=row["label"], linewidth=1.6, **curve_look(number)
                    )
            part.set_xlabel(title)
            part.set_ylabel("loss")
            part.grid(axis="y", alpha=0.25)
        if parts[0].lines:
            parts[0].legend(frameon=False, fontsize=8)
