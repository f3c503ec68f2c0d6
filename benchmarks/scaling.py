"""docs/scaling.md with its plot and its table of all points, from the measured profiles of `scaling_profile.py`.

    python benchmarks/scaling.py [--profiles docs/measured] [--output docs] [--jobs 2] [--models 1.3B,13B]

It needs no GPU and takes 5 minutes of processor time, in as many processes as `--jobs` says: about 10,000 simulations,
two thirds of it for GPT 175B. With `--models` the points of other models are kept as they are.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from io import StringIO
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from scaling_layouts import best_point
from scaling_models import MEASURED, MODELS, Model, card, card_speed
from scaling_page import page
from scaling_pipeline import ALONE
from scaling_plot import plot
from scaling_rows import COLUMNS, Row, read_rows, row_of

from vpipe.cost import KEEP, RECOMPUTE, SWAP
from vpipe.schedule.registry import KINDS

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
GIGABITS = (100, 400)
POLICIES = (KEEP, RECOMPUTE, SWAP)
SCHEDULES = (ALONE, *(name for name in KINDS if name != "vpipe"))
"""`vpipe` has the order of `pipedream`."""


def rows_of(
    task: tuple[Model, str, str], folder: Path, gpus: Iterable[int] = GPUS, links: Iterable[int] = GIGABITS
) -> list[Row]:
    """All points of a model under a schedule and a memory policy."""
    model, schedule, policy = task
    speed = card_speed(folder)
    return [
        row_of(model, count, schedule, policy, link, point, speed)
        for count in gpus
        for link in links
        for point in (best_point(model, count, schedule, policy, link * 1e9 / 8, folder),)
        if point is not None
    ]


def table(rows: Iterable[Row]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(row.fields() for row in rows)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profiles", type=Path, default=MEASURED)
    parser.add_argument("--output", type=Path, default=MEASURED.parent)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--models", default=",".join(model.name for model in MODELS))
    arguments = parser.parse_args()
    parts, path = arguments.models.split(","), arguments.output / "measured" / "scaling.csv"
    chosen = [model for model in MODELS if any(part in model.name for part in parts)]
    tasks = list(product(chosen, SCHEDULES, POLICIES))
    longest_first = sorted(tasks, key=lambda task: (-task[0].layers * task[0].width, task[2] != SWAP))
    with ProcessPoolExecutor(arguments.jobs, get_context("fork")) as pool:
        done = pool.map(partial(rows_of, folder=arguments.profiles), longest_first)
        found = dict(zip(longest_first, done, strict=True))
    rows = [row for task in tasks for row in found[task]]
    if len(chosen) < len(MODELS):
        names = [model.name for model in MODELS]
        kept = read_rows(path) if path.exists() else []
        rows += [row for row in kept if row.model not in {model.name for model in chosen}]
        rows.sort(key=lambda row: names.index(row.model))
    path.write_text(table(rows), encoding="utf-8")
    write_page(rows, arguments.profiles, arguments.output)


def write_page(rows: Sequence[Row], profiles: Path, output: Path) -> None:
    text = page(rows, card(profiles), card_speed(profiles))
    (output / "scaling.md").write_text(text, encoding="utf-8")
    plot(rows, output / "drawings" / "scaling.svg")


if __name__ == "__main__":
    main()
