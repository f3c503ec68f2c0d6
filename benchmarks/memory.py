"""Ways to train under one memory cap: our plans, GPipe's setting and PipeDream's.

    python benchmarks/memory.py [--ranks 2] [--layers 8] [--width 256] [--batch-size 8] [--rounds 5]
                                [--write docs/performance.md]

As in the guides' table, the cap makes GPipe recompute everything and PipeDream halve its minibatch: it is the memory
that PipeDream needs for half a minibatch, and GPipe accumulates as many minibatches as then fit. The planner gets the
profile and the cap, and plans once for the schedule `vpipe`, which updates after each minibatch as PipeDream does, and
once for whichever schedule is fastest. All take turns, round after round, in the same processes (one of one thread a
rank); ratios are taken within a round. Activations are counted as autograd holds them; the rest of a rank's memory
(weights, versions, gradients, optimizer, buffers) is computed.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
import work
from accuracy import processors, resize
from peers import ENVIRONMENT

import vpipe
from vpipe.cost import KEEP, RECOMPUTE, Plan, Profile
from vpipe.graph import capture
from vpipe.plan import plan
from vpipe.profile.model import MeasuredModel
from vpipe.simulate import Simulation, simulate

GPIPE, PIPEDREAM, VPIPE, ANY = "GPipe", "PipeDream", "our plan", "our plan, any schedule"
TARGETS = {GPIPE: 1.34, PIPEDREAM: 1.67}
MOST_ACCUMULATED = 16
WARM, COUNTED = 2, 2
"""Rounds before the timed ones, and behind them, where bytes are counted."""
TITLE = "## Under one memory cap"


class Setting(NamedTuple):
    """One way to train, and what is expected of it."""

    name: str
    batch_size: int
    plan: Plan
    expected: Simulation

    @property
    def peak(self) -> int:
        return max(rank.memory.total for rank in self.expected.ranks)

    @property
    def update(self) -> int:
        """Minibatches of an update."""
        return self.expected.update_interval


class Measured(NamedTuple):
    """By setting: samples a second in each round, and each rank's most bytes of activations."""

    speeds: dict[str, list[float]]
    peaks: dict[str, tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="the file whose section on memory this becomes")
    given = parser.parse_args()
    given.load = os.getloadavg()[0]
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # glibc reads it when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    torch.set_num_threads(1)
    resize(given.layers, given.width)
    cap, settings = all_settings(given.ranks, given.batch_size)
    measured = run(settings, given.ranks, given.rounds, given.layers, given.width)
    command = "python benchmarks/memory.py " + " ".join(sys.argv[1:])
    text = report(cap, settings, measured, command, given)
    print(text)
    if given.write:
        put_section(given.write, text)


def profiled(batch_size: int, ranks: int) -> Profile:
    work.MINIBATCH = batch_size
    model = MeasuredModel(work.build_model(), work.batches(1)[0], optimizer=work.build_optimizer)
    return model.measure(ranks=ranks)


def all_settings(ranks: int, batch_size: int) -> tuple[int, list[Setting]]:
    """The cap, and the settings that it leaves."""
    whole, half = profiled(batch_size, ranks), profiled(batch_size // 2, ranks)
    blocks = len(whole.blocks)
    work.MINIBATCH = batch_size
    partition = tuple(capture(work.build_model(), work.batches(1)[0]).balanced_partition(ranks))

    def asynchronous(profile: Profile) -> Setting:
        made = Plan(partition, (KEEP,) * blocks, "pipedream", batch_size=profile.batch_size)
        return Setting(PIPEDREAM, profile.batch_size, made, simulate(profile, made))

    def synchronous(minibatches: int, kept: Sequence[int] = ()) -> Setting:
        policies = tuple(KEEP if block in kept else RECOMPUTE for block in range(blocks))
        made = Plan(partition, policies, "gpipe", minibatches=minibatches, batch_size=batch_size)
        return Setting(GPIPE, batch_size, made, simulate(whole, made))

    pipedream = asynchronous(half)
    cap = pipedream.peak
    assert asynchronous(whole).peak > cap, "PipeDream needs no smaller minibatch: choose other sizes"
    fitting = [m for m in range(ranks, MOST_ACCUMULATED + 1) if synchronous(m).peak <= cap]
    assert fitting, "GPipe does not fit at all: choose other sizes"
    gpipe = synchronous(fitting[-1])
    planned = {
        VPIPE: plan(whole, ranks, cap, "vpipe").to_plan(),
        ANY: plan(whole, ranks, cap, "auto").to_plan(),
    }
    if planned[ANY].schedule == "vpipe":
        del planned[ANY]
    ours = [Setting(name, batch_size, made, simulate(whole, made)) for name, made in planned.items()]
    return cap, [*ours, gpipe, pipedream]


def run(settings: Sequence[Setting], ranks: int, rounds: int, layers: int, width: int) -> Measured:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain = [
        (setting.name, setting.batch_size, setting.plan, setting.update, setting.expected.synchronous)
        for setting in settings
    ]
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(
        work_as_rank, (plain, ranks, rounds, layers, width, port, queue), nprocs=ranks
    )
    found = dict(queue.get() for _ in range(ranks))
    names = [setting.name for setting in settings]
    return Measured(
        # A round of all ranks is as quick as the slowest of them.
        {
            name: [min(speeds) for speeds in zip(*(found[r][0][name] for r in range(ranks)), strict=True)]
            for name in names
        },
        {name: tuple(found[rank][1][name] for rank in range(ranks)) for name in names},
    )


def work_as_rank(
    rank: int,
    settings: Sequence[tuple[str, int, Plan, int, bool]],
    ranks: int,
    rounds: int,
    layers: int,
    width: int,
    port: int,
    queue: Any,
) -> None:
    torch.set_num_threads(1)
    resize(layers, width)
    world = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in world.items()}
    # A round of each setting has at least as many samples as GPipe's update.
    samples = max(batch_size * update for _, batch_size, _, update, _ in settings)
    pipes, trainings, updates = {}, {}, {}
    for name, batch_size, made, update, synchronous in settings:
        work.MINIBATCH = batch_size
        batches = work.batches(8)
        count = {"minibatches": update} if synchronous else {"update_interval": update}
        pipes[name] = vpipe.Pipeline(
            work.build_model(),
            batches[0],
            optimizer=work.build_optimizer,
            schedule=made.schedule,
            partition=made.partition,
            policies=made.policies,
            replicas=made.replicas or None,
            chunks=made.chunks if made.schedule == "interleaved" else None,
            device="cpu",
            **count,
        )
        trainings[name] = pipes[name].train(cycle(batches))
        updates[name] = -(-samples // (batch_size * update))
    speeds: dict[str, list[float]] = {name: [] for name in pipes}
    held = {}
    for number in range(WARM + rounds + COUNTED):
        for name, batch_size, _, update, _ in settings:
            if number == WARM + rounds:
                held[name] = pipes[name].runtime.count_held()
            start = time.perf_counter()
            list(islice(trainings[name], updates[name]))
            taken = time.perf_counter() - start
            if WARM <= number < WARM + rounds:
                speeds[name].append(updates[name] * update * batch_size / taken)
    queue.put((rank, (speeds, {name: counter.peak for name, counter in held.items()})))
    for name, training in trainings.items():
        training.close()
        pipes[name].close()


def report(
    cap: int, settings: Sequence[Setting], measured: Measured, command: str, given: argparse.Namespace
) -> str:
    introduction = (
        f"`{command}`, on {processors()} processors. A transformer of {work.LAYERS} layers, {work.WIDTH} wide, "
        f"sequence {work.SEQUENCE}, on {given.ranks} ranks of one thread. The figures are medians of {given.rounds} "
        f"rounds, in which the settings take turns. The cap is {cap:,} bytes a rank. That is what PipeDream needs with "
        f"{given.batch_size // 2} samples a minibatch (with {given.batch_size} it would not fit). GPipe recomputes "
        "everything and accumulates as many minibatches as fit. *Bytes* are the activations of the rank that holds "
        f"most of them, as autograd counts them. The machine's load was {given.load:.1f} before the run. Above 0.5 "
        "other programs ran on it, and the speeds say little."
    )
    lines = [
        TITLE,
        textwrap.fill(introduction, 100, break_long_words=False, break_on_hyphens=False),
        "",
        "| setting | schedule | minibatch | partition | recomputed, swapped | of the cap | bytes predicted | counted "
        "| samples/s predicted | measured | quartiles |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting in settings:
        speeds = measured.speeds[setting.name]
        low, _, high = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else speeds * 3
        counted = max(measured.peaks[setting.name])
        predicted = max(rank.most_activations for rank in setting.expected.ranks)
        policies = setting.plan.policies
        how = f"{setting.update} accumulated" if setting.update > 1 else "each updates"
        replicas = setting.plan.replicas
        copies = f" x {list(replicas)} replicas" if replicas and max(replicas) > 1 else ""
        lines.append(
            f"| {setting.name} | {setting.plan.schedule} | {setting.batch_size}, {how} | "
            f"{list(setting.plan.partition)}{copies} | "
            f"{policies.count(RECOMPUTE)}, {policies.count('swap')} of {len(policies)} | {setting.peak / cap:.0%} | "
            f"{predicted:,} | {counted:,} | {setting.expected.samples_per_second:.2f} | "
            f"{statistics.median(speeds):.2f} | {low:.2f} to {high:.2f} |"
        )
    lines += ["", "| | over | predicted | measured | quartiles | target |", "|---|---|---|---|---|---|"]
    *ours, gpipe, pipedream = settings
    for mine, other in product(ours, (gpipe, pipedream)):
        pairs = zip(measured.speeds[mine.name], measured.speeds[other.name], strict=True)
        ratios = [faster / slower for faster, slower in pairs]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        predicted = mine.expected.samples_per_second / other.expected.samples_per_second
        lines.append(
            f"| {mine.name} | {other.name} | {predicted:.2f} | {statistics.median(ratios):.2f} | "
            f"{low:.2f} to {high:.2f} | {TARGETS[other.name]} |"
        )
    return "\n".join(lines) + "\n"


def put_section(path: Path, text: str) -> None:
    """Put the section into the file, in place of the one that it has; what stands behind the tables stays."""
    page = path.read_text(encoding="utf-8")
    before, found, old = page.partition(TITLE + "\n")
    if not found:
        path.write_text(page.rstrip("\n") + "\n\n" + text, encoding="utf-8")
        return
    end = old.rfind("\n|", 0, old.find("\n## ") if "\n## " in old else len(old))
    path.write_text(before + text + old[old.index("\n", end + 1) + 1 :], encoding="utf-8")


if __name__ == "__main__":
    main()
