"""The gain of `compile: true`: the model of a configuration, trained by one rank with and without it.

    python benchmarks/compiled.py [configs/demo.yml] [--rounds 7] [--json]

One process of one thread has the whole model. Updates of four minibatches are timed by the processor's clock, so that
others on the machine count little; plain and compiled take turns in every round. The first updates, which compile, are
reported separately. `1f1b` runs backward whole; `zb-h1` splits off weight gradients, so its stretches end at every
product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import torch

from vpipe import Pipeline
from vpipe.communication import InProcessHub
from vpipe.config.file import read_config
from vpipe.train.models import build_model, synthetic_batch
from vpipe.weights import optimizer_factory

MINIBATCHES = 4
SCHEDULES = ("1f1b", "zb-h1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=Path("configs/demo.yml"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(arguments.config, schedule, arguments.rounds) for schedule in SCHEDULES]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['schedule']}: {row['plain']:.1f} samples a second plain, {row['compiled']:.1f} compiled: "
            f"{row['gain']:.3f} times ({row['least']:.3f} to {row['most']:.3f} in {row['rounds']} rounds); "
            f"{row['compiling']:.0f} s to compile"
        )


def measure(config: Path, schedule: str, rounds: int) -> dict[str, object]:
    """Samples of a second of the processor's time, both ways, and what compiling took of it."""
    settings = read_config(config)
    begun = time.process_time()
    plain = train(config, schedule, compiled=False)
    next(plain)
    middle = time.process_time()
    compiled = train(config, schedule, compiled=True)
    next(compiled)
    # Building takes the same both ways. What compilers take that run as processes of their own comes on top.
    compiling = (time.process_time() - middle) - (middle - begun)
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for which, training in ((False, plain), (True, compiled)):
            start = time.process_time()
            for _ in range(2):
                next(training)
            taken[which].append((time.process_time() - start) / 2)
    samples = MINIBATCHES * settings.batch_size
    gains = [a / b for a, b in zip(taken[False], taken[True], strict=True)]
    return {
        "schedule": schedule,
        "plain": samples / statistics.median(taken[False]),
        "compiled": samples / statistics.median(taken[True]),
        "gain": statistics.median(gains),
        "least": min(gains),
        "most": max(gains),
        "rounds": rounds,
        "compiling": compiling,
    }


def train(config: Path, schedule: str, *, compiled: bool) -> Iterator[object]:
    """Update after update; the first three, in which everything is compiled, are one."""
    settings = read_config(config)
    model = build_model(settings).model
    batches = [
        synthetic_batch(model, settings.batch_size, settings.sequence_length, seed)
        for seed in range(MINIBATCHES)
    ]
    with Pipeline(
        model,
        batches[0],
        optimizer=optimizer_factory(settings.optimizer, settings.learning_rate, settings.weight_decay),
        schedule=schedule,
        minibatches=MINIBATCHES,
        compile=compiled,
        precision=settings.precision,
        world=InProcessHub(1).join(0),
    ) as pipe:
        training = pipe.train(cycle(batches))
        yield list(islice(training, 3))
        yield from training


if __name__ == "__main__":
    main()
