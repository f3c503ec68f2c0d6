"""Speed of what must be quick, against its bound: planning and simulating at their largest, observing, drawing.

    python benchmarks/speed.py [simulate] [plan] [schedule] [observe] [report] [--schedules 1f1b,zb-v] [--noise 1]

*simulate*: 1,024 stages with 4,096 minibatches, and 64 with 256. *plan*: 400 blocks on 64 ranks, of two kinds as a
transformer's or all different, under a memory that keeps everything, under one in which blocks have to be
recomputed or swapped, and under one in which no schedule fits. Every figure of these two is that of one `vpipe`
command, the imports (printed first) included. *schedule*: schedules built, and begun. *observe*: what recording and the
watch take of a rank. *report*: frames of a timeline, in a browser.

A figure above its bound is marked, and the exit code is 1 then. Bounds of commands are those of a free core, times
`--noise`: what neighbours on the same core may cost. The test suite measures no time at all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from time import thread_time
from timeit import repeat
from typing import Any

from vpipe.cost import BlockCost, DeviceCost, LinkCost, Plan, Profile, write_plan, write_profile
from vpipe.schedule import KINDS, Action, Op, build

sys.path.append(str(Path(__file__).parents[1]))  # for made-up runs, of which the tests have some

SIZES = ((1024, 4096, 60.0), (64, 256, 1.0))
"""Stages, minibatches, and seconds at most."""
MOST_MEMORY = 2048.0
"""Mebibytes of any of these simulations."""
BLOCKS, RANKS, PLANNING = 400, 64, 10.0
ROOMY, TIGHT, TOO_LITTLE = "64GiB", "8GiB", "512MiB"
REFUSED = 2
"""The exit code of a command that was refused."""
BUILDING = 50.0
"""Milliseconds in which a schedule of 8 stages and 32 minibatches is built and read, or a long one begun."""
RECORDING = 0.2
"""Milliseconds for ten actions: a hundredth of a step of 20 ms, which has about as many."""
LOOKING = 10.0
"""Milliseconds of a second: ten samples of the memory and one status."""
FRAME = 100.0
"""Milliseconds, well below what an eye notices as a jerk."""


class Bounds:
    """Which figures are above their bounds."""

    def __init__(self, noise: float) -> None:
        self.noise = noise
        self.broken: list[str] = []

    def cell(self, what: str, figure: float, most: float, digits: int = 1) -> str:
        """The figure as it is printed, marked if it is too large."""
        if figure <= most:
            return f"{figure:.{digits}f}"
        self.broken.append(f"{what}: {figure:.{digits}f}, at most {most:g}")
        return f"**{figure:.{digits}f}**"

    def seconds(self, what: str, figure: float, most: float) -> str:
        return self.cell(what, figure, most * self.noise)

    def rows(self, title: str, figures: Iterable[tuple[str, float, float]]) -> None:
        """A table of names, milliseconds, and how many there may be."""
        print(f"| {title} | ms | at most |\n|---|---|---|")
        for what, figure, most in figures:
            print(f"| {what} | {self.cell(what, figure, most, 3)} | {most:g} |", flush=True)
        print()


def main() -> None:
    everything = ",".join(KINDS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {
        "simulate": simulations,
        "plan": plans,
        "schedule": schedules,
        "observe": observing,
        "report": frames,
    }
    parser.add_argument("parts", nargs="*", choices=[[], *parts], metavar="part", help=", ".join(parts))
    parser.add_argument("--schedules", default=everything, help="names, with commas between them")
    parser.add_argument("--noise", type=float, default=1.0, help="times slower than a free core (1)")
    arguments = parser.parse_args()
    names, bounds = arguments.schedules.split(","), Bounds(arguments.noise)
    with tempfile.TemporaryDirectory() as folder:
        print(f"`vpipe --help`: {spent(Path(folder), '--help')[0]:.1f} s\n", flush=True)
        for part, measure in parts.items():
            if part in (arguments.parts or parts):
                auto = ["auto"] if part == "plan" and arguments.schedules == everything else []
                measure(Path(folder), [*names, *auto], bounds)
    for line in bounds.broken:
        print(f"above its bound: {line}")
    raise SystemExit(bool(bounds.broken))


def quickest(work: Callable[[], object], times: int = 5) -> float:
    """Milliseconds of this thread's processor, without the garbage of others (`timeit` collects none)."""
    return 1000 * min(repeat(work, number=1, repeat=times, timer=thread_time))


def spent(folder: Path, *words: str, code: int = 0) -> tuple[float, float]:
    """Processor seconds and mebibytes of a command that ends with this exit code."""
    command = subprocess.Popen(
        [sys.executable, "-m", "vpipe", *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if code else None,
    )
    _, status, usage = os.wait4(command.pid, 0)
    command.returncode = os.waitstatus_to_exitcode(status)
    if command.returncode != code:
        raise SystemExit(f"vpipe {' '.join(words)} ended with {command.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def simulations(folder: Path, names: Iterable[str], bounds: Bounds) -> None:
    heads = [f"{stages} stages, {minibatches} minibatches" for stages, minibatches, _ in SIZES]
    most = [f"at most {seconds * bounds.noise:g}" for _, _, seconds in SIZES]
    columns = [f"{head}: s, {seconds} | MiB" for head, seconds in zip(heads, most, strict=True)]
    print("| `vpipe simulate`, schedule | " + " | ".join(columns) + " |")
    print("|---" * (1 + 2 * len(heads)) + "|")
    block = BlockCost("block", 0.010, 0.011, 0.009, 0.002, 10**7, 10**6, 10**7, version=0.001)
    for name in names:
        cells = []
        for head, (stages, minibatches, longest) in zip(heads, SIZES, strict=True):
            link = LinkCost(1e10, 1e-5)
            write_profile(
                Profile((block,) * stages, DeviceCost(2**40, 1e10, 1e10), link, 8), folder / "profile.json"
            )
            write_plan(Plan((1,) * stages, ("keep",) * stages), folder / "plan.json")
            words = ["--schedule", name, "--minibatches", str(minibatches), "--json"]
            seconds, memory = spent(
                folder, "simulate", "--profile", "profile.json", "--plan", "plan.json", *words
            )
            what = f"`vpipe simulate`, {name}, {head}"
            cells.append(bounds.seconds(f"{what}, seconds", seconds, longest))
            cells.append(bounds.cell(f"{what}, MiB", memory, MOST_MEMORY, 0))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print()


def plans(folder: Path, names: Iterable[str], bounds: Bounds) -> None:
    cases = [
        (kinds, memory) for kinds in ("two kinds", "all different") for memory in (ROOMY, TIGHT, TOO_LITTLE)
    ]
    most = f"at most {PLANNING * bounds.noise:g} s"
    print(f"| `vpipe plan` of {BLOCKS} blocks on {RANKS} ranks, {most}, schedule | ", end="")
    print(" | ".join(f"{kinds}, {memory}: s" for kinds, memory in cases) + " |")
    print("|---" * (1 + len(cases)) + "|")
    for name in names:
        cells = []
        for kinds, memory in cases:
            write_profile(profile(different=kinds == "all different"), folder / "profile.json")
            words = ["--ranks", str(RANKS), "--memory", memory, "--schedule", name, "--json"]
            code = REFUSED if memory == TOO_LITTLE else 0
            seconds, _ = spent(folder, "plan", "--profile", "profile.json", *words, code=code)
            cells.append(
                bounds.seconds(f"`vpipe plan`, {name}, {kinds}, {memory}, seconds", seconds, PLANNING)
            )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print()


def profile(different: bool) -> Profile:
    """Attention and feed-forward in turn; all different: each up to a fifth larger or smaller."""
    random = Random(1)

    def block(number: int) -> BlockCost:
        size = random.uniform(0.8, 1.2) if different else 1.0
        weight = 1.0 if number % 2 else 2.0
        forward, kept = 0.004 * weight * size, 6e7 / weight * size
        return BlockCost(
            f"block {number}", forward, forward, 0.9 * forward, 0.0005 * weight, round(kept),
            8_000_000, round(1.6e7 * weight * size), deferred_bytes=round(kept / 3),
        )  # fmt: skip

    device, link = DeviceCost(2**36, 1.2e10, 1.2e10, 2e-5), LinkCost(1e10, 1e-5)
    return Profile(tuple(block(number) for number in range(BLOCKS)), device, link, 8)


def schedules(folder: Path, names: Iterable[str], bounds: Bounds) -> None:
    def read(name: str) -> int:
        made = build(name, 8, 32)
        return sum(len(list(made.program(rank))) for rank in range(8))

    def begin(name: str) -> list[Action]:
        return list(islice(build(name, 4, 10**6).program(1), 3))

    cases = {"8 stages, 32 minibatches, built and read": read, "a million minibatches, begun": begin}
    bounds.rows(
        "schedule",
        [
            (f"{name}, {what}", quickest(partial(work, name)), BUILDING)
            for name in names
            for what, work in cases.items()
        ],
    )


def observing(folder: Path, names: Iterable[str], bounds: Bounds) -> None:
    from tests import models
    from vpipe import Pipeline
    from vpipe.observe.watch import RankWatch
    from vpipe.pipeline.threads import run_ranks
    from vpipe.record.events import Events
    from vpipe.record.whereabouts import whereabouts
    from vpipe.system.best_effort import LogFile
    from vpipe.system.device_memory import used_memory
    from vpipe.weights import optimizer_factory

    ring, action, place = Events(0), Action(1, Op.F, 3), whereabouts(0)

    def record() -> None:
        for _ in range(1000):
            place.enter(action, 1.0)
            ring.add(action, 1.0, 2.0, 0.0, 0, 0, 3, False)

    def look(world: Any) -> float:
        model, batch, loss_fn = models.sequential()
        optimizer = optimizer_factory("sgd", 0.01, weight_decay=0.0)
        with Pipeline(model, batch, optimizer=optimizer, loss_fn=loss_fn, world=world) as pipe:
            watch = RankWatch(pipe, folder, LogFile(folder / "log"), limit=60.0, facts=dict, say=print)
            watch.close()
            second = 10 * quickest(lambda: [used_memory(pipe.device) for _ in range(100)]) / 100
            return second + quickest(lambda: [watch._look() for _ in range(10)]) / 10

    bounds.rows(
        "observing",
        [
            ("ten actions are recorded", quickest(record) / 100, RECORDING),
            ("ten samples of the memory and a status, in each second", run_ranks(1, look)[0], LOOKING),
        ],
    )


def frames(folder: Path, names: Iterable[str], bounds: Bounds) -> None:
    """Moving through the record of eight ranks with ten thousand actions each, at four widths of the view."""
    from tests.unit.test_report import BROWSER, asked, make_run, report

    if BROWSER is None:
        print("no frames were drawn: there is no chromium here\n")
        return
    page = folder / "report.html"
    report([make_run(folder / "run", ranks=8, minibatches=2000)], page)
    script = """
      return [1, 10, 100, 1000].map((part) => {
        const span = timeline.data.end / part, took = [];
        for (let step = 0; step < 8; step++) {
          const from = (timeline.data.end - span) * step / 8, began = performance.now();
          timeline.show(from, from + span); timeline.paint();
          took.push(performance.now() - began);
        }
        return Math.min(...took);  // others may keep the processor busy
      });
    """
    widths = ("all", "a tenth", "a hundredth", "a thousandth")
    found: Any = asked(page, script)
    bounds.rows(
        "a frame of 80,000 actions",
        [(f"{width} in view", took, FRAME) for width, took in zip(widths, found, strict=True)],
    )


if __name__ == "__main__":
    main()
