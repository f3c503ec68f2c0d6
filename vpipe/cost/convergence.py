"""Samples to equal loss with stale weights: how many times as many as with fresh ones, measured and looked up.

`MEASURED` is the one place for these figures. Whoever measures better ones replaces them here; docs/convergence.md has
the runs that they are from, and the one command that measures those of Muon and AdamW anew
(`benchmarks/staleness.py --output`). A user's own figures come from a file of `vpipe converge --output`.

The delay of a run is one number: the updates between the weights that a gradient is of and those that it is applied to,
on average over stages and minibatches (`schedule.facts.mean_delay`). It is (P - 1) / 2 for an update a minibatch on P
stages, and less where few minibatches of an update are stale. A factor compares runs of the same optimizer with equal
samples an update, at the higher of their two final losses. That larger updates need more samples too is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainValidator

from vpipe.cost.fields import FileObject, Unit, read_object
from vpipe.errors import ConfigError
from vpipe.schedule import Schedule
from vpipe.schedule.facts import holdings, mean_delay, sample
from vpipe.system.files import write_json

LIKE = {"adam": "adamw"}
"""Optimizers that are taken to bear a delay as another one does."""
MUCH = 1.2
"""Times as many samples, from which on users are warned."""
UNKNOWN = "adamw"
"""Stands for optimizers that nobody has measured."""


@dataclass(frozen=True)
class Slowdown(FileObject):
    """What a delay has cost in samples, measured once."""

    optimizer: str
    predict: bool
    delay: Annotated[float, Unit("updates")]
    factor: Annotated[float, Unit("times as many samples", least=0.01)]
    source: str = ""


MEASURED = (
    Slowdown("muon", True, 0.1875, 1.05, "GPT of 25 M, 3,000 updates, 2bw on 4 stages, interval 8"),
    Slowdown("muon", True, 0.375, 1.07, "GPT of 25 M, 3,000 updates, 2bw on 4 stages, three seeds"),
    Slowdown("muon", True, 1.5, 1.14, "GPT of 25 M, 3,000 updates, vpipe on 4 stages"),
    Slowdown("muon", True, 1.75, 1.16, "the same, 8 stages, update_interval 2, split_tied, three seeds"),
    Slowdown("muon", True, 3.5, 1.53, "GPT of 25 M, 3,000 updates, vpipe on 8 stages, split_tied"),
    Slowdown("muon", False, 0.375, 1.05, "GPT of 25 M, 2bw on 4 stages"),
    Slowdown("muon", False, 1.5, 1.95, "GPT of 25 M, vpipe on 4 stages"),
    Slowdown("adamw", False, 0.5, 1.5, "configs/demo.yml, vpipe on 2 stages"),
    Slowdown("adamw", True, 0.5, 1.25, "configs/demo.yml, vpipe on 2 stages"),
    Slowdown("adamw", True, 1.5, 5.0, "GPT of 25 M, vpipe on 4 stages"),
    Slowdown("nadamw", False, 1.5, 1.35, "ViT of 4 layers x 48, vpipe on 4 stages"),
    Slowdown("lamb", False, 1.5, 1.75, "ViT of 4 layers x 48, vpipe on 4 stages"),
    Slowdown("sgd", False, 1.5, 3.9, "ViT of 4 layers x 48, vpipe on 4 stages"),
    Slowdown("sgd", True, 1.5, 3.3, "ViT of 4 layers x 48, vpipe on 4 stages"),
)


@dataclass(frozen=True)
class ConvergenceFile(FileObject):
    """What `vpipe converge --output` writes: the slowdowns, and the rows as `--json` prints them."""

    slowdowns: tuple[Slowdown, ...]
    rows: Annotated[Any, PlainValidator(lambda value: value)] = ()
    format: Literal["vpipe convergence 1"] = "vpipe convergence 1"


class StaleTraining(NamedTuple):
    """How a run trains if its weights are stale, and what is known of what that costs."""

    optimizer: str = "muon"
    predict: bool = True
    measured: tuple[Slowdown, ...] = ()
    """A user's own; `MEASURED` stands in where they have none of this optimizer."""

    def factor(self, schedule: Schedule) -> float:
        """Samples to equal loss under this schedule, as a multiple of those of a synchronous one."""
        return sample_factor(mean_delay(schedule), self.optimizer, self.predict, self.measured)

    def warning(self, schedule: Schedule) -> str | None:
        """What the delays of this schedule cost, and what helps, if that is much."""
        factor = 1.0 if schedule.synchronous else self.factor(schedule)
        if factor < MUCH:
            return None
        oldest = max(held.staleness for held in holdings(sample(schedule)))
        how = self.optimizer + (" with predicted weights" if self.predict else "")
        return (
            f"gradients are up to {oldest} updates old: {how} needs about {factor:.1f} times as many samples to equal "
            f"loss as with a synchronous schedule; {self._better(schedule)} (docs/convergence.md)"
        )

    def _better(self, schedule: Schedule) -> str:
        """What would need fewer samples, with the figure."""
        best = StaleTraining()
        remedy = best.factor(schedule)
        found = []
        if (self.optimizer, self.predict) != (best.optimizer, best.predict) and remedy < self.factor(
            schedule
        ):
            found.append(f"optimizer muon with staleness [predict] needs {remedy:.1f} times as many")
        if schedule.update_interval < schedule.num_ranks and schedule.lazy:
            if schedule.update_interval == 1 and schedule.num_ranks > 2:
                found.append("an update_interval of 2 makes them half as old")
            found.append(
                f"an update_interval of {schedule.num_ranks} (schedule 2bw) leaves few gradients old"
            )
        return ", ".join(found) or "a synchronous schedule would need fewer"


def sample_factor(
    delay: float, optimizer: str, predict: bool = False, measured: Iterable[Slowdown] = ()
) -> float:
    """Between two delays that were measured, and beyond the last two, factors lie on a line."""
    if not delay:
        return 1.0
    alike = LIKE.get(optimizer, optimizer)
    points = (
        _points(measured, optimizer, predict)
        or _points(MEASURED, alike, predict)
        or _points(MEASURED, alike, False)
        or _points(MEASURED, UNKNOWN, predict)
    )
    lines = list(pairwise([(0.0, 1.0), *points]))
    (start, low), (end, high) = next((line for line in lines if delay <= line[1][0]), lines[-1])
    return low + (high - low) * (delay - start) / (end - start)


def _points(slowdowns: Iterable[Slowdown], optimizer: str, predict: bool) -> list[tuple[float, float]]:
    """By delay, the worst of each, none below 1 and none below that of a shorter delay: the rest is noise."""
    least, found = 1.0, dict[float, float]()
    for one in sorted(slowdowns, key=lambda one: (one.delay, one.factor)):
        if (one.optimizer, one.predict) == (optimizer, predict) and one.delay:
            least = found[one.delay] = max(least, one.factor)
    return list(found.items())


def read_slowdowns(path: Path) -> tuple[Slowdown, ...]:
    """Those of a file of `vpipe converge --output`."""
    found = read_object(ConvergenceFile, path).slowdowns
    if not found:
        raise ConfigError(
            f"{path}: slowdowns is empty: compare a synchronous schedule and an asynchronous one with the same "
            "optimizer, e.g. `vpipe converge CONFIG --schedules 1f1b:1,vpipe --optimizers muon --output FILE`"
        )
    return found


def write_convergence(rows: list[dict[str, Any]], slowdowns: Iterable[Slowdown], path: Path) -> None:
    made = ConvergenceFile(tuple(slowdowns), rows)
    listed = [asdict(one) for one in made.slowdowns]
    write_json(path, {"format": made.format, "slowdowns": listed, "rows": made.rows})
