"""How far the simulator is from the run: throughput and peak activation bytes, for every schedule.

    python benchmarks/accuracy.py [--quick] [--ranks 2,3,4] [--layers 4] [--width 128] [--write docs/accuracy.md]

A small transformer (`work.py`) is trained by one process of one thread for each rank, in all cases in turn. Before each
turn all ranks profile for a moment: the pace of a machine moves by more than the limit within minutes, and so profile
and runs see the same of it. Then each case is simulated with the profile of the first rank. *Bytes* are those that
autograd holds, counted by the runtime on each rank; *busy* is the computing time of the rank that computes longest.
With more ranks than processors the ranks take turns, which no simulation of the pipeline foretells: there memory alone
is compared. The page is written anew after each number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
import work
from peers import ENVIRONMENT

import vpipe
from vpipe.cost import KEEP, RECOMPUTE, Plan, Profile
from vpipe.observe.figures import RankFigures, figures_of
from vpipe.profile.bench import run_rounds
from vpipe.profile.device import measure_device
from vpipe.profile.links import measure_link
from vpipe.profile.model import ModelBench
from vpipe.schedule import ASYNCHRONOUS, NAMES
from vpipe.simulate import Simulation, simulate

MINIBATCHES = 8
VOCABULARY = 512
HEAD = 64  # columns of an attention head
LIMIT = 0.05
WARM, TIMED, COUNTED = 1, 2, 3
"""Steps of each turn before the timed ones, timed ones, and at the end those where bytes are counted."""
PROFILED = 2
"""Rounds of the profile before each turn."""
PARTS = ("forward", "backward", "update", "send", "wait")


class Case(NamedTuple):
    ranks: int
    schedule: str
    policy: str

    def plan(self, blocks: int) -> Plan:
        """Blocks dealt out evenly, the same policy for all."""
        stages = self.ranks * (2 if self.schedule in ("interleaved", "zb-v") else 1)
        partition = tuple(blocks // stages + (stage < blocks % stages) for stage in range(stages))
        interval = MINIBATCHES if self.schedule == "2bw" else None
        return Plan(partition, (self.policy,) * blocks, self.schedule, update_interval=interval)


class Measured(NamedTuple):
    samples_per_second: float
    peaks: tuple[int, ...]
    """Bytes, by rank."""
    parts: tuple[dict[str, float], ...]
    """Seconds of each part of a minibatch, by rank."""

    @staticmethod
    def of(ranks: Sequence[tuple[Sequence[RankFigures], int]]) -> Measured:
        """Of what each rank measured: medians over the rounds, the slowest rank's speed."""
        count = TIMED * MINIBATCHES
        seconds = max(statistics.median(one.seconds for one in figures) for figures, _ in ranks)
        return Measured(
            count * work.MINIBATCH / seconds,
            tuple(peak for _, peak in ranks),
            tuple(
                {part: statistics.median(getattr(one, part) for one in figures) / count for part in PARTS}
                for figures, _ in ranks
            ),
        )

    @property
    def busy(self) -> list[float]:
        """Seconds of computing for a minibatch, by rank."""
        return [parts["forward"] + parts["backward"] + parts["update"] for parts in self.parts]


class Row(NamedTuple):
    case: Case
    predicted: Simulation
    measured: Measured

    @property
    def speed(self) -> float:
        return self.predicted.samples_per_second / self.measured.samples_per_second

    @property
    def busy(self) -> float:
        """Predicted over measured, of the rank that computes longest."""
        period = self.predicted.batch_size / self.predicted.samples_per_second
        pairs = zip((rank.compute * period for rank in self.predicted.ranks), self.measured.busy, strict=True)
        predicted, measured = max(pairs, key=lambda pair: pair[1])
        return predicted / measured

    @property
    def bytes(self) -> tuple[int, int]:
        """Predicted and measured, of the rank where they lie furthest apart."""
        pairs = zip(
            (rank.memory.activations for rank in self.predicted.ranks), self.measured.peaks, strict=True
        )
        return max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))

    @property
    def memory(self) -> float:
        predicted, measured = self.bytes
        return predicted / measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two ranks, three schedules, few steps")
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help=f"a multiple of {HEAD}")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each case")
    parser.add_argument("--write", type=Path, help="the table's file")
    parser.add_argument("--detail", type=Path, help="a JSON file for what each rank did with its time")
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)  # for the ranks
    torch.set_num_threads(1)
    sizes = [2] if given.quick else [int(ranks) for ranks in given.ranks.split(",")]
    names = ("1f1b", "zb-h1", "pipedream") if given.quick else NAMES
    rounds = 2 if given.quick else given.rounds
    load = os.getloadavg()[0]
    resize(given.layers, given.width)
    kept = [word for word in sys.argv[1:] if word not in ("--detail", str(given.detail))]
    command = " ".join(["python benchmarks/accuracy.py", *kept])
    rows: list[Row] = []
    for ranks in sizes:
        cases = [Case(ranks, name, policy) for name in names for policy in (KEEP, RECOMPUTE)]
        turns = rounds if ranks <= processors() else 1
        profile, measured = run(cases, turns, given.layers, given.width)
        new = [Row(case, predict(case, profile), found) for case, found in zip(cases, measured, strict=True)]
        rows += new
        print(report(new), flush=True)
        if given.write:
            given.write.write_text(page(report(rows), rows, command, load), encoding="utf-8")
        if given.detail:
            given.detail.write_text(json.dumps([detail(row) for row in rows], indent=1), encoding="utf-8")


def detail(row: Row) -> dict[str, Any]:
    """Predicted and measured, of each rank."""
    period = row.predicted.batch_size / row.predicted.samples_per_second
    return {
        **row.case._asdict(),
        "predicted": row.predicted.samples_per_second,
        "measured": row.measured.samples_per_second,
        "busy": [
            {"predicted": rank.compute * period, "measured": busy, "sending": rank.sending * period, **parts}
            for rank, busy, parts in zip(
                row.predicted.ranks, row.measured.busy, row.measured.parts, strict=True
            )
        ],
    }


def resize(layers: int, width: int) -> None:
    """Make the benchmark's transformer so small that a case takes a second."""
    work.LAYERS, work.WIDTH, work.HEADS, work.VOCABULARY = layers, width, width // HEAD, VOCABULARY


def predict(case: Case, profile: Profile) -> Simulation:
    minibatches = 6 * MINIBATCHES if case.schedule in ASYNCHRONOUS else MINIBATCHES
    return simulate(profile, case.plan(len(profile.blocks)), minibatches=minibatches)


def run(cases: Sequence[Case], rounds: int, layers: int, width: int) -> tuple[Profile, list[Measured]]:
    """All cases of one number of ranks, in the same processes, round after round; the profile of meanwhile."""
    ranks = cases[0].ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    arguments = (tuple(cases), rounds, layers, width, port, queue)
    torch.multiprocessing.spawn(work_as_rank, arguments, nprocs=ranks)
    found = {rank: (profile, measured) for rank, profile, measured in (queue.get() for _ in range(ranks))}
    return found[0][0], [
        Measured.of([found[rank][1][number] for rank in range(ranks)]) for number in range(len(cases))
    ]


def work_as_rank(
    rank: int,
    cases: Sequence[Case],
    rounds: int,
    layers: int,
    width: int,
    port: int,
    queue: torch.multiprocessing.SimpleQueue,
) -> None:
    torch.set_num_threads(1)
    resize(layers, width)
    world = {"RANK": rank, "WORLD_SIZE": cases[0].ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in world.items()}
    device, link = measure_device(), measure_link()
    bench = ModelBench(work.build_model(), work.batches(1)[0], optimizer=work.build_optimizer)
    runners = [Runner(case, case.plan(len(bench.shapes))) for case in cases]
    run_rounds(bench.everything, 1, 1, 0.0)
    for _ in range(rounds):
        for runner in runners:
            for _ in range(PROFILED):
                bench.round()
            runner.turn()
    queue.put((rank, bench.profile(device, link), [runner.end() for runner in runners]))


class Runner:
    """One case, as one rank trains it."""

    def __init__(self, case: Case, plan: Plan) -> None:
        batches = work.batches(MINIBATCHES)
        options = {"update_interval": MINIBATCHES} if case.schedule == "2bw" else {"minibatches": MINIBATCHES}
        self.updates = 1  # of a step
        if case.schedule in ASYNCHRONOUS and case.schedule != "2bw":
            options, self.updates = {}, MINIBATCHES
        self.pipe = vpipe.Pipeline(
            work.build_model(),
            batches[0],
            optimizer=work.build_optimizer,
            schedule=case.schedule,
            partition=plan.partition,
            policies=plan.policies,
            device="cpu",
            **options,
        )
        self.training = self.pipe.train(cycle(batches))
        self.figures: list[RankFigures] = []

    def turn(self) -> None:
        """Some steps to get into its stride again, then the timed ones."""
        self.steps(WARM)
        before = figures_of(self.pipe)
        self.steps(TIMED)
        self.figures.append(figures_of(self.pipe).since(before))

    def steps(self, count: int) -> None:
        list(islice(self.training, count * self.updates))

    def end(self) -> tuple[list[RankFigures], int]:
        """What was measured, and the most bytes that autograd holds."""
        held = self.pipe.runtime.count_held()
        self.steps(COUNTED)
        self.training.close()
        self.pipe.close()
        return self.figures, held.peak


def report(rows: Sequence[Row]) -> str:
    cores = processors()
    lines = [
        "| ranks | schedule | blocks | samples/s predicted | measured | ratio | busy ratio | bytes predicted "
        "| measured | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case = row.case
        speed = ["memory only", "", "", ""]
        if case.ranks <= cores:
            figures = (row.predicted.samples_per_second, row.measured.samples_per_second)
            speed = [f"{figures[0]:.1f}", f"{figures[1]:.1f}", f"{row.speed:.3f}", f"{row.busy:.3f}"]
        predicted, measured = row.bytes
        cells = [str(case.ranks), case.schedule, case.policy, *speed]
        lines.append(
            "| " + " | ".join([*cells, f"{predicted:,}", f"{measured:,}", f"{row.memory:.3f}"]) + " |"
        )
    return "\n".join(lines)


def page(shown: str, rows: Sequence[Row], command: str, load: float) -> str:
    timed = [row for row in rows if row.case.ranks <= processors()]
    fast = sum(abs(row.speed - 1) <= LIMIT for row in timed)
    missed = [row for row in rows if abs(row.memory - 1) > LIMIT]
    shared = ""
    if load > 0.5:
        shared = (
            f"\n**The machine was shared**: its load was {load:.1f} before the run began, and it changed between "
            "profile and runs.\nSo the throughput columns neither show nor refute the simulator: measure them on a "
            "quiet machine.\n"
        )
    misses = "".join(f"\n- {row.case.ranks} ranks, {row.case.schedule}, {row.case.policy}" for row in missed)
    return f"""# How accurate the simulator is

`{command}`,
on {processors()} processors: a transformer of {work.LAYERS} layers, {work.WIDTH} wide, {MINIBATCHES} minibatches of
{work.MINIBATCH} a step, one process of one thread for each rank, every block kept or every block recomputed.
*Bytes* are what autograd holds at its peak, on the rank where prediction and count lie furthest apart. A ratio is
the prediction over the measurement. With more ranks than processors the ranks take turns, and throughput says
nothing about the simulator: memory only. `pipedream` and `vpipe` run the same program: by what they differ, others may
too.
{shared}
Within {LIMIT:.0%}: memory in {len(rows) - len(missed)} of {len(rows)} cases, throughput in {fast} of {len(timed)}.
{"Memory is further off in:" + misses if missed else ""}

{shown}
"""


def processors() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
