"""The cases of `vpipe converge`: every combination of the options, each a configuration of its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.cli.compare import split_values
from vpipe.config.file import read_config
from vpipe.config.settings import read_settings
from vpipe.errors import ConfigError
from vpipe.schedule import kind_of

if TYPE_CHECKING:
    from vpipe.config import RunConfig

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


Choice = tuple[str, dict[str, Any]]
"""How a row's label names it, and the keys that it sets."""


def schedule_choices(given: str) -> list[Choice]:
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


def value_choices(key: str, given: str | None) -> list[Choice]:
    if given is None:
        return [("", {})]
    return [(value, read_settings([f"{key}={value}"])) for value in split_values(given)]


def remedy_choices(given: str | None) -> list[Choice]:
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


def make_cases(
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
