"""The rows of `benchmarks/staleness.py`: their settings, their files, and the table of their losses."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from small_gpt import Sizes

from vpipe.cost import Slowdown

Found = list[tuple["Row", list[float]]]
"""Rows with the losses of their updates."""


@dataclass(frozen=True)
class Row:
    """A run."""

    model: str = "gpt"
    """gpt, bert."""
    stages: int = 8
    interval: int = 1
    """Minibatches of an update; `stages` or more: as `schedule: 2bw` has it."""
    optimizer: str = "muon"
    """muon, adamw, soap: of the matrices between embedding and head; the rest has AdamW."""
    rate: float = 1e-3
    warmup: int = 100
    momentum: float = 0.95
    momentum_from: float = 0.0
    """Muon's momentum at first; it rises to `momentum` over `momentum_rise` updates. 0: it stays the same."""
    momentum_rise: int = 300
    nesterov: float = 1.0
    """Muon's update is made of m + nesterov * (1 - momentum) * (g - m)."""
    lead: float = 0.0
    """So much more of `nesterov` for each update of delay: a gradient extrapolated in time."""
    beta1: float = 0.0
    beta2: float = 0.0
    """Of AdamW; 0: as vpipe has them, 0.97 and 0.99 beside a Muon with a mean delay of 1 or more, else 0.9 and 0.95."""
    predict: str = "none"
    """Of the matrices: none, last (update), momentum (orthogonalised), mean (of the updates)."""
    reach: float = 1.0
    """Share of the delay that is predicted, of the matrices."""
    adam_reach: float = 1.0
    """The same of the other parameters; 0: they are not predicted."""
    adam_lead: float = 0.0
    """As `lead`, of the other parameters."""
    adam_rate: float = 0.0
    """The rate of the other parameters is divided by 1 + adam_rate * delay."""
    vector_rate: float = 1.0
    """The rate of biases, norms and positions is so much of the rate, at a delay of 1 or more."""
    delay_rate: float = 0.0
    """The rate of all is divided by 1 + delay_rate * delay, which fades out over the first half of the run."""
    compensate: float = 0.0
    """DC-ASGD: g + compensate * g * g / sqrt(v) * (weights now - weights read); v: the mean square of g."""
    feedback: float = 0.0
    """Error feedback, for a delay of 1: the gradient that comes now is of the weights to which the last update was
    applied. So much of what that update would have added with this gradient, less what it added, is added now."""
    async_after: int = 0
    fresh: str = ""
    """Parameters without delay, to see where the loss comes from: hidden, tokens, vectors, or several of them."""
    embedding: str = "adamw"
    """The optimizer of the embedding of tokens: adamw, muon, soap."""
    tied: str = "late"
    """late: the head's copy of the embedding is as old as the first stage's; split: it is the newest one, and the
    first stage's gradient is added to it as many updates later; no: the head has weights of its own."""
    decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if self.feedback and "soap" in (self.optimizer, self.embedding):
            raise ValueError(f"feedback={self.feedback} goes with muon and adamw, not with soap")

    @property
    def mean_delay(self) -> float:
        """Over stages and the minibatches of an update, as `vpipe.schedule.facts` counts it."""
        late = product(range(self.stages), range(self.interval))
        return fmean(-min(0, (number - stage) // self.interval) for stage, number in late)

    @property
    def betas(self) -> tuple[float, float]:
        slow = self.mean_delay >= 1 and self.optimizer == "muon"
        return self.beta1 or (0.97 if slow else 0.9), self.beta2 or (0.99 if slow else 0.95)


def read_row(text: str) -> Row:
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(Row)}
    pairs = (pair.split("=") for pair in text.split())
    return Row(**{name: kinds[name](value) for name, value in pairs})


def settings_of(row: Row) -> str:
    """What differs from the defaults, without the seed."""
    named = ((f.name, getattr(row, f.name), f.default) for f in fields(Row) if f.name != "seed")
    return " ".join(
        f"{name}={value}" for name, value, default in named if value != default or name == "stages"
    )


def report(found: Found) -> list[Slowdown]:
    """A line for each group of rows that differ in their seed only; what a delay costs, of the best rates."""
    slowdowns = []
    groups: dict[Row, list[list[float]]] = defaultdict(list)
    for row, losses in found:
        groups[replace(row, seed=0)].append(losses)
    ends = {row: [last(losses) for losses in runs] for row, runs in groups.items()}
    print(
        "\nloss: mean of the last fifth of the updates, at most 100; *: at the best of its rates; +-: over seeds;"
    )
    print(
        "to equal loss: updates of this row, as a multiple of those that the synchronous rows needed for its loss"
    )
    print("   loss      +-   behind  to equal loss  seeds  row")
    for row, values in ends.items():
        rates = [fmean(ends[other]) for other in ends if replace(other, rate=row.rate) == row]
        fresh = [r for r in ends if r.stages == 1 and (r.model, r.optimizer) == (row.model, row.optimizer)]
        mean, behind, slower = fmean(values), "", ""
        star = "*" if mean == min(rates) else " "
        if row.stages > 1 and fresh:
            best = min(fresh, key=lambda r: fmean(ends[r]))
            behind = f"{mean - fmean(ends[best]):+.4f}"
            curve = [fmean(at) for at in zip(*groups[best], strict=True)]
            factor = round(len(curve) / updates_to(curve, mean), 2)
            slower = f"{factor:.2f}"
            if star == "*":
                known = (row.optimizer, row.predict != "none", row.mean_delay, factor)
                slowdowns.append(Slowdown(*known, f"{settings_of(row)}, {len(curve)} updates, emulated"))
        spread = f"{stdev(values):.4f}" if len(values) > 1 else ""
        print(f"{mean:.4f}{star} {spread:>7} {behind:>8} {slower:>14} {len(values):6}  {settings_of(row)}")
    return slowdowns


def last(losses: list[float]) -> float:
    return fmean(losses[-window(losses) :])


def window(losses: list[float]) -> int:
    """Updates of which a mean is shown."""
    return min(100, -(-len(losses) // 5))


def updates_to(losses: list[float], goal: float) -> int:
    """The end of the first window with a mean as low as this; all updates if there is none."""
    width = window(losses)
    ends = range(width, len(losses) + 1)
    return next((end for end in ends if fmean(losses[end - width : end]) <= goal), len(losses))


def write_rows(found: Found, sizes: Sizes, path: Path) -> None:
    entries = [{**asdict(row), "losses": losses, "sizes": asdict(sizes)} for row, losses in found]
    path.write_text(json.dumps(entries))


def read_rows(paths: list[Path], sizes: Sizes, updates: int) -> Found:
    """Those of earlier calls; each row once, the last one of several."""
    found = {}
    for path in paths:
        for entry in json.loads(path.read_text()):
            losses, had = entry.pop("losses"), entry.pop("sizes", asdict(sizes))
            row = Row(**entry)
            if had != asdict(sizes) or len(losses) != updates:
                raise SystemExit(
                    f"{path}: {settings_of(row)} has {len(losses)} updates of {Sizes(**had)}, where this call has "
                    f"{updates} of {sizes}: give the same --updates and sizes"
                )
            found[row] = losses
    return list(found.items())
