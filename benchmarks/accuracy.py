"""Errors of the simulator against the run: throughput and peak activation bytes, for every schedule.

    python benchmarks/accuracy.py [--quick] [--ranks 2,3,4] [--layers 4] [--width 128] [--write docs/accuracy.md]

A small transformer (`work.py`) is trained by one process of one thread for each rank, in all cases in turn. Before and
behind each turn as many ranks as there are processors profile for a moment, while others wait: the pace of a machine
moves by more than the limit within a minute. So each turn is simulated with the profile around it, the mean of these
ranks', and what counts is the median of the turns' ratios. *Bytes* are those that autograd holds, counted by the
runtime on each rank; *busy* is the computing time of the rank that computes longest.
Each number of ranks has a section on the page, written when it has been measured; the others stay.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import socket
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.multiprocessing
import work
from peers import ENVIRONMENT

import vpipe
from vpipe.cost import KEEP, RECOMPUTE, Plan, Profile
from vpipe.observe.figures import RankFigures, figures_of
from vpipe.profile.device import measure_device
from vpipe.profile.links import measure_link
from vpipe.profile.model import MeasuredModel
from vpipe.profile.rounds import run_round, run_rounds
from vpipe.schedule import KINDS
from vpipe.simulate import Simulation, simulate

MINIBATCHES = 8
VOCABULARY = 512
HEAD = 64  # columns of an attention head
LIMIT = 0.05
WARM, TIMED, COUNTED = 1, 2, 3
"""Steps of each turn before the timed ones, timed ones, and at the end those where bytes are counted."""
PROFILED = 2
"""Rounds of the profile before each turn."""
COUNT = TIMED * MINIBATCHES
TIMES = (
    "forward",
    "input_gradient",
    "weight_gradient",
    "update",
    "version",
    "splitting",
    "accumulating",
    "recomputing",
    "split_recomputing",
    "swapping",
)
"""Of a block, in seconds."""


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


class Turn(NamedTuple):
    """What was predicted by the profile around it, and what each rank measured."""

    predicted: Simulation
    ranks: tuple[RankFigures, ...]

    @property
    def samples_per_second(self) -> float:
        """The slowest rank's."""
        return COUNT * work.MINIBATCH / max(rank.seconds for rank in self.ranks)

    @property
    def speed(self) -> float:
        """Predicted over measured, as all ratios."""
        return self.predicted.samples_per_second / self.samples_per_second

    @property
    def busy(self) -> float:
        """Of the rank that computes longest."""
        longest = max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].compute)
        period = self.predicted.batch_size / self.predicted.samples_per_second
        return COUNT * self.predicted.ranks[longest].compute * period / self.ranks[longest].compute


class Row(NamedTuple):
    """One case; figures are medians over its turns."""

    case: Case
    turns: Sequence[Turn]
    peaks: tuple[int, ...]
    """Bytes, by rank."""

    @property
    def speeds(self) -> tuple[float, float]:
        """Samples a second, predicted and measured."""
        return (
            statistics.median(turn.predicted.samples_per_second for turn in self.turns),
            statistics.median(turn.samples_per_second for turn in self.turns),
        )

    @property
    def speed(self) -> float:
        return statistics.median(turn.speed for turn in self.turns)

    @property
    def quartiles(self) -> tuple[float, float]:
        ratios = [turn.speed for turn in self.turns]
        first, _, third = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return first, third

    @property
    def busy(self) -> float:
        return statistics.median(turn.busy for turn in self.turns)

    @property
    def bytes(self) -> tuple[int, int]:
        """Predicted and measured, of the rank where they lie furthest apart."""
        predicted = (rank.most_activations for rank in self.turns[0].predicted.ranks)
        return max(zip(predicted, self.peaks, strict=True), key=lambda pair: abs(pair[0] / pair[1] - 1))

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
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)  # for the ranks
    torch.set_num_threads(1)
    sizes = [2] if given.quick else [int(ranks) for ranks in given.ranks.split(",")]
    names = ("1f1b", "zb-h1", "pipedream") if given.quick else KINDS
    rounds = 2 if given.quick else given.rounds
    load = os.getloadavg()[0]
    resize(given.layers, given.width)
    command = " ".join(["python benchmarks/accuracy.py", *sys.argv[1:]])
    for ranks in sizes:
        cases = [Case(ranks, name, policy) for name in names for policy in (KEEP, RECOMPUTE)]
        rows = run(cases, rounds, given.layers, given.width)
        print(report(rows), flush=True)
        if given.write:
            kept, behind = parts_of(given.write.read_text(encoding="utf-8") if given.write.exists() else "")
            text = page(kept | {ranks: section(rows, command, load)}) + behind
            given.write.write_text(text, encoding="utf-8")


def resize(layers: int, width: int) -> None:
    """Make the benchmark's transformer so small that a case takes a second."""
    work.LAYERS, work.WIDTH, work.HEADS, work.VOCABULARY = layers, width, width // HEAD, VOCABULARY


def predict(case: Case, profile: Profile) -> Simulation:
    minibatches = 6 * MINIBATCHES if not KINDS[case.schedule].synchronous else MINIBATCHES
    return simulate(profile, case.plan(len(profile.blocks)), minibatches=minibatches)


def run(cases: Sequence[Case], rounds: int, layers: int, width: int) -> list[Row]:
    """All cases of one number of ranks, in the same processes, round after round."""
    ranks = cases[0].ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        # Files, since a rank that puts this much into a queue waits for a reader, who waits for the ranks to end.
        files = [Path(folder, str(rank)) for rank in range(ranks)]
        together = torch.multiprocessing.get_context("spawn").Barrier(ranks)
        arguments = (tuple(cases), rounds, layers, width, port, files, together)
        torch.multiprocessing.spawn(work_as_rank, arguments, nprocs=ranks)
        found = [pickle.loads(file.read_bytes()) for file in files]
    rows = []
    for number, case in enumerate(cases):
        own = [found[rank][number] for rank in range(ranks)]
        turns = []
        for at in range(rounds):
            profile = mean_profile([profiles[at] for profiles, _, _ in own if profiles])
            turns.append(Turn(predict(case, profile), tuple(figures[at] for _, figures, _ in own)))
        rows.append(Row(case, turns, tuple(peak for _, _, peak in own)))
    return rows


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Of several ranks, whose blocks' times are averaged."""
    blocks = tuple(
        replace(same[0], **{name: statistics.fmean(getattr(block, name) for block in same) for name in TIMES})
        for same in zip(*(profile.blocks for profile in profiles), strict=True)
    )
    return replace(profiles[0], blocks=blocks)


def work_as_rank(
    rank: int,
    cases: Sequence[Case],
    rounds: int,
    layers: int,
    width: int,
    port: int,
    files: Sequence[Path],
    together: Barrier,
) -> None:
    torch.set_num_threads(1)
    resize(layers, width)
    world = {"RANK": rank, "WORLD_SIZE": cases[0].ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in world.items()}
    device, link = measure_device(), measure_link()
    measured = MeasuredModel(work.build_model(), work.batches(1)[0], optimizer=work.build_optimizer)
    runners = [Runner(case, case.plan(len(measured.shapes))) for case in cases]
    run_rounds([measured.stages], 1, 1, 0.0)
    profiles = rank < processors()

    def profile_for_a_moment() -> None:
        together.wait()
        for _ in range(PROFILED if profiles else 0):
            run_round(measured.stages)
        together.wait()

    for _ in range(rounds):
        for runner in runners:
            measured.clear()
            profile_for_a_moment()
            runner.turn()
            profile_for_a_moment()
            if profiles:
                runner.profiles.append(measured.profile(device, link))
    files[rank].write_bytes(pickle.dumps([runner.end() for runner in runners]))


class Runner:
    """One case, as one rank trains it."""

    def __init__(self, case: Case, plan: Plan) -> None:
        batches = work.batches(MINIBATCHES)
        options = {"update_interval": MINIBATCHES} if case.schedule == "2bw" else {"minibatches": MINIBATCHES}
        self.updates = 1  # of a step
        if not KINDS[case.schedule].synchronous and case.schedule != "2bw":
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
        self.profiles: list[Profile] = []

    def turn(self) -> None:
        """Some steps to get into its stride again, then the timed ones."""
        self.steps(WARM)
        before = figures_of(self.pipe)
        self.steps(TIMED)
        self.figures.append(figures_of(self.pipe).since(before))

    def steps(self, count: int) -> None:
        list(islice(self.training, count * self.updates))

    def end(self) -> tuple[list[Profile], list[RankFigures], int]:
        """The profile around each turn, what was measured in it, and the most bytes that autograd holds."""
        held = self.pipe.runtime.count_held()
        self.steps(COUNTED)
        self.training.close()
        self.pipe.close()
        return self.profiles, self.figures, held.peak


def report(rows: Sequence[Row]) -> str:
    lines = [
        "| ranks | schedule | blocks | samples/s predicted | measured | ratio | quartiles | busy ratio "
        "| bytes predicted | measured | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case = row.case
        first, third = row.quartiles
        speed = [*(f"{figure:.1f}" for figure in row.speeds), f"{row.speed:.3f}"]
        speed += [f"{first:.2f} to {third:.2f}", f"{row.busy:.3f}"]
        predicted, measured = row.bytes
        cells = [str(case.ranks), case.schedule, case.policy, *speed]
        lines.append(
            "| " + " | ".join([*cells, f"{predicted:,}", f"{measured:,}", f"{row.memory:.3f}"]) + " |"
        )
    return "\n".join(lines)


def page(sections: dict[int, str]) -> str:
    """All sections, by their number of ranks; those that were not measured now are as they were."""
    introduction = f"""# How accurate the simulator is

Predictions of the simulator beside measurements. The model is a transformer of {work.LAYERS} layers, {work.WIDTH} wide.
A step has {MINIBATCHES} minibatches of {work.MINIBATCH} samples. Each rank is one process with one thread. Every block
is kept, or every block is recomputed.

- *Ratio* is the prediction divided by the measurement. For throughput it is the median over turns
  of one second, with the quartiles. Each turn is predicted from a profile that was measured right
  before and right after it.
- *Busy* is the computing time of the rank that computes longest.
- *Bytes* are what autograd holds at its peak, on the rank where prediction and count differ most.
- With more ranks than processors the ranks take turns on the processors. The simulator counts the
  turns, not what the system loses by them (caches, and moments in which a processor has nothing to
  do), so it is an upper bound: 1.1 to 1.4 times what was measured. Without the turns it would be up
  to 1.5 times (three ranks) or twice (four) as high again.
- `pipedream` and `vpipe` run the same program. The difference between the two shows how far two
  measurements of one thing may differ.

Three and four ranks with one processor for each rank: [two
runs](measured/accuracy_more_processors.md).
"""
    found = (f"\n## {ranks} ranks\n\n{sections[ranks]}\n" for ranks in sorted(sections))
    return introduction + "".join(found)


def parts_of(written: str) -> tuple[dict[int, str], str]:
    """What stands under each number of ranks, and the page's other sections, which are behind them."""
    parts = re.split(r"^## (\d+) ranks$", written, flags=re.MULTILINE)[1:]
    sections = {int(ranks): text.strip() for ranks, text in zip(parts[::2], parts[1::2], strict=True)}
    if not sections:
        return {}, ""
    last = max(sections)
    sections[last], heading, others = sections[last].partition("\n## ")
    return {ranks: text.strip() for ranks, text in sections.items()}, heading + others + "\n" * bool(others)


def section(rows: Sequence[Row], command: str, load: float) -> str:
    missed = [row for row in rows if abs(row.memory - 1) > LIMIT]
    fast = sum(abs(row.speed - 1) <= LIMIT for row in rows)
    verdict = f"memory in {len(rows) - len(missed)} of {len(rows)} cases, throughput in {fast} of {len(rows)}"
    lines = [f"`{command}`, on {processors()} processors.", f"Within {LIMIT:.0%}: {verdict}.", ""]
    if load > 0.5:
        lines += [
            f"Other programs ran on the machine: its load was {load:.1f} before the run. Throughput is less",
            "reliable.",
            "",
        ]
    return "\n".join([*lines, report(rows)])


def processors() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
