"""The rows of `vpipe converge`: what its runs have come to, as a table, a picture, and factors for plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vpipe.cli.compare_plot import curve_look, draw
from vpipe.cli.loss_cases import Case
from vpipe.cost import KEEP, Plan, Profile, Slowdown
from vpipe.schedule.steady import enough_minibatches

if TYPE_CHECKING:
    from vpipe.config import RunConfig
    from vpipe.train.convergence import LossCurve


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
