"""The comparison of runs: its variants, one run of each, a table of their figures and a plot."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vpipe.cli.compare_plot import plot
from vpipe.cli.loss_plot import figures_to, goal_of, loss_plots, loss_run, loss_table
from vpipe.cli.options import print_result
from vpipe.config.file import read_config
from vpipe.config.settings import rank_arguments, read_settings
from vpipe.errors import ConfigError, VPipeError, printable
from vpipe.launch.mps import gpus_of
from vpipe.system.console import announce, show, warn
from vpipe.system.files import LARGE, exists, is_folder, read_json
from vpipe.system.host_memory import busy_cores, usable_cores

if TYPE_CHECKING:
    from vpipe.config import RunConfig

GIB = 2**30
BUSY = 0.15
"""Share of a machine's cores that others may keep busy before a comparison warns."""

SHOWN = (
    "samples_per_s",
    "seconds_per_update",
    "communication_share",
    "bubble_share",
    "of_limit",
    "peak_memory",
    "losses",
)
"""What a run's summary must have to be compared."""

Result = dict[str, Any]
"""A run's `summary.json`, its `label`, the `quartiles` of its samples/s from update to update, and `turns`: the
samples/s of each time that it was run. Of several turns the figures are those of the middle one by speed."""


@dataclass(frozen=True)
class Variant:
    """One run of a comparison: a file and its `--set`."""

    label: str
    path: Path
    settings: tuple[str, ...] = ()


def compare_runs(
    paths: Sequence[Path],
    settings: Sequence[str],
    sweeps: Sequence[str],
    picture: Path | None,
    as_json: bool,
    turns: int = 1,
) -> None:
    """Train the variants of files in turns, and print their figures, and those of runs that are over."""
    from vpipe.observe.report import write_report

    can_plot = find_spec("matplotlib") is not None
    if picture is not None and not can_plot:
        raise VPipeError("--plot needs the package matplotlib: pip install 'vpipe[plot]'")
    folders = [path for path in paths if is_folder(path)]
    files = [path for path in paths if path not in folders]
    for number, folder in enumerate(folders):
        if folder.resolve() in (other.resolve() for other in folders[:number]):
            raise ConfigError(f"{folder}: this run is named twice: name each run once")
    made = [(past_run(folder, paths), folder) for folder in folders]
    if files or not folders:
        made += _train(variants(files, sweeps, settings), turns)
    elif settings or sweeps:
        raise ConfigError(
            "--set and --sweep are for files of configurations: runs that are over cannot change"
        )
    results = with_time_to_loss([result for result, _ in made])
    print_result(results, comparison_table(results), as_json)
    drawn = [run for run in map(loss_run, results) if run is not None]
    if len(drawn) > 1 and not as_json:
        print(f"\n{loss_plots(drawn)}\n")
        show(loss_table(drawn))
    last = made[-1][1]
    if can_plot:
        picture = picture or last.parent / f"comparison-{last.name}.png"
        plot(results, picture)
        print(printable(f"picture {picture}"), file=sys.stderr)
    page = last.parent / f"comparison-{last.name}.html"
    write_report([folder for _, folder in made], page)
    print(printable(f"report {page}"), file=sys.stderr)


def _train(chosen: Sequence[Variant], turns: int) -> list[tuple[Result, Path]]:
    """Each variant in turns, each time in ranks of its own; of each the turn that counts, with its folder."""
    from vpipe.train.launcher import launch

    # All are read before anything is trained.
    runs = [read_config(one.path, read_settings(one.settings)) for one in chosen]
    made: list[list[tuple[Result, Path]]] = [[] for _ in chosen]
    for turn in range(turns):
        for number, (variant, config) in enumerate(zip(chosen, runs, strict=True)):
            counted = f", turn {turn + 1} of {turns}" if turns > 1 else ""
            announce(f"{number + 1} of {len(chosen)}{counted}: {variant.label}")
            warn_of_load(config)
            folder = launch(config, ["train", *rank_arguments(variant.path, variant.settings)], quiet=True)
            summary = read_json(folder / "summary.json", most=LARGE)
            made[number].append(
                (summary | {"label": variant.label, "quartiles": speed_quartiles(folder, summary)}, folder)
            )
    return [middle(each) for each in made]


def past_run(folder: Path, paths: Sequence[Path]) -> Result:
    """The result of a run that is over; `paths` are all that are compared."""
    file = folder / "summary.json"
    found = read_json(file, most=LARGE) if exists(file) else {}
    summary = found if isinstance(found, dict) else {}
    missing = [key for key in SHOWN if summary.get(key) is None]
    if missing:
        what = f"{missing[0]} is missing in its summary.json" if summary else "it has no summary.json"
        raise ConfigError(f"{folder}: {what}: name the folder of a run that came to its end")
    name = _names([path.absolute() for path in paths])[list(paths).index(folder)]
    label = printable(" ".join([name, *filter(None, [summary.get("schedule")])]))
    return summary | {"label": label, "quartiles": speed_quartiles(folder, summary)}


def with_time_to_loss(results: list[Result]) -> list[Result]:
    """The results, with when each reached the highest of their losses at the end, as `to_loss`."""
    runs = [loss_run(result) for result in results]
    known = [run for run in runs if run is not None]
    goal = goal_of(known) if known else 0.0
    return [
        result if run is None else result | {"to_loss": figures_to(run, goal)}
        for result, run in zip(results, runs, strict=True)
    ]


def middle(turns: Sequence[tuple[Result, Path]]) -> tuple[Result, Path]:
    """Of the turns of a variant the one whose speed is the median (of two the slower), with the speeds of all."""
    ordered = sorted(turns, key=lambda turn: turn[0]["samples_per_s"])
    result, folder = ordered[(len(ordered) - 1) // 2]
    return result | {"turns": [each["samples_per_s"] for each, _ in turns]}, folder


def speed_quartiles(folder: Path, summary: Result) -> list[float] | None:
    """The samples/s that a quarter of the updates did not reach, and that a quarter exceeded; None if it made few."""
    from vpipe.observe.action_figures import seconds_of_updates

    seconds = seconds_of_updates(folder)
    if len(seconds) < 4:
        return None
    samples = summary["samples_per_s"] * summary["seconds_per_update"]
    quarter, _, three = quantiles(seconds, n=4)
    return [samples / three, samples / quarter]


def warn_of_load(config: RunConfig) -> None:
    """Say what makes figures of speed doubtful, before a run: other programs, or more ranks than cores."""
    all_cores = os.cpu_count() or 1
    busy = busy_cores()
    if busy is not None and busy > BUSY * all_cores:
        warn(f"other programs keep {busy:.1f} of {all_cores} cores busy: the speed of this run says little")
    if config.ranks > usable_cores() and gpus_of(config) is None:
        warn(f"{config.ranks} ranks share {usable_cores()} cores: they cannot all compute at the same time")


def variants(
    paths: Sequence[Path], sweeps: Sequence[str] = (), settings: Sequence[str] = ()
) -> list[Variant]:
    """Every file with every combination of the swept values, and `settings` for all of them."""
    if not paths:
        raise ConfigError("nothing to compare: name one or more configuration files")
    axes = [_axis(sweep) for sweep in sweeps]
    given = [setting.split("=", 1)[0] for setting in settings]
    for sweep, (key, _) in zip(sweeps, axes, strict=True):
        if key in given:
            raise ConfigError(
                f"--sweep {sweep}: {key} is set or swept twice: give all its values in one --sweep"
            )
        given.append(key)
    swept = [[f"{key}={value}" for value in values] for key, values in axes]
    made = []
    for path, name in zip(paths, _names(paths), strict=True):
        for chosen in product(*swept):
            made.append(Variant(printable(" ".join((name, *chosen))), path, (*settings, *chosen)))
    label, times = Counter(variant.label for variant in made).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"{label} would run {times} times: name each file and each value once")
    return made


def _axis(sweep: str) -> tuple[str, list[str]]:
    """`batch_size=8,16`: the key and its values."""
    key, equals, text = sweep.partition("=")
    key, values = key.strip(), split_values(text)
    if not equals or not key or not all(values):
        raise ConfigError(f"--sweep {sweep!r}: write a key and its values, such as batch_size=8,16,32")
    return key, values


def split_values(text: str) -> list[str]:
    """The values between commas; those inside brackets belong to a list: `[1,2],[2,1]` are two."""
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def _names(paths: Sequence[Path]) -> list[str]:
    """The files' names; whole paths where two files have the same name."""
    stems = [path.stem for path in paths]
    return [str(path) if stems.count(path.stem) > 1 else path.stem for path in paths]


def comparison_table(results: Sequence[Result]) -> Table:
    """One row for each run, in the order given; ratios are to the slowest."""
    speeds = [result["samples_per_s"] for result in results]
    slowest, fastest = min(filter(None, speeds), default=0.0), max(speeds, default=0.0)
    table = Table(title="The fastest is marked *; ratios are to the slowest" if len(results) > 1 else None)
    table.caption = caption(results)
    table.caption_justify = "left"
    table.add_column("run", no_wrap=True)
    for column in ("samples/s", "quartiles", "ratio", "ms/update", "sending", "bubble", "of limit"):
        table.add_column(column, justify="right", no_wrap=column == "quartiles")
    table.add_column("peak GiB of each stage", overflow="fold")
    table.add_column("loss", justify="right")
    for result in results:
        speed = result["samples_per_s"]
        best = speed == fastest and fastest > slowest
        figures = ["–"] * 7
        if speed:  # a run of one or two updates is too short to measure it
            figures = [
                f"{speed:,.1f}" + (" *" if best else ""),
                "–".join(f"{end:,.0f}" for end in result.get("quartiles") or ()) or "–",
                f"{speed / slowest:.2f}x",
                f"{1000 * result['seconds_per_update']:,.1f}",
                *(f"{result[share]:.1%}" for share in ("communication_share", "bubble_share", "of_limit")),
            ]
        table.add_row(
            result["label"].replace(" ", "\n"),  # a line for the file and for each setting
            *figures,
            " ".join(f"{peak / GIB:.2f}" for peak in result["peak_memory"]),
            "–" if result["loss"] is None else f"{result['loss']:.4f}",
            style="bold" if best else None,
        )
    return table


def caption(results: Sequence[Result]) -> str | None:
    """How much the figures can be trusted: how the runs were made, and whether they differ by more than they vary."""
    if len(results) < 2:
        return None
    turns = len(results[0].get("turns", ()))
    if turns > 1:
        spread = max((max(r["turns"]) - min(r["turns"])) / (min(r["turns"]) or 1.0) for r in results)
        text = f"{turns} turns of each, the median shown; turns of one run differ by up to {spread:.0%}"
    else:
        text = "one after the other, each once, not side by side: what else the machine did may differ (--turns 3)"
    ranges = [
        (min(result["turns"]), max(result["turns"])) if turns > 1 else result.get("quartiles")
        for result in results
    ]
    known = [each for each in ranges if each]
    if len(known) == len(results) and max(low for low, _ in known) <= min(high for _, high in known):
        text += f"; {'turns' if turns > 1 else 'quartiles'} of all overlap: the differences may be chance"
    return text
