"""What a save costs the training, and what looking for numbers that are not finite costs an update.

    python benchmarks/checkpoint.py [--rounds N] [--directory DIR] [--json]

One process trains the benchmark's transformer with AdamW. *A save that waits* writes, hashes and syncs before
training goes on, as `checkpoint.save` does; *a save beside the training* waits for the copy alone (`Saver.start`),
and the updates that run while the writer works are slower, which is told too. The three take turns. *Looking* is
the norm of all gradients, which `on_nonfinite` takes once an update.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import work

import vpipe
from vpipe import checkpoint
from vpipe.runtime.updates import Updates

MINIBATCHES = 2
"""Of an update."""


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        found = measure(Path(directory), options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    for what, value in found.items():
        print(f"{what:48} {value:10.4f}")


def measure(directory: Path, rounds: int) -> dict[str, float]:
    (batch,) = work.batches(1)
    pipe = vpipe.Pipeline(
        work.build_model(), batch, optimizer=work.build_optimizer, stages=1, minibatches=MINIBATCHES
    )
    with pipe:
        saver = checkpoint.Saver(pipe, directory / "beside", keep=1)
        path = None
        _train(pipe, batch, 2)
        saver.start({})  # allocates the copy
        saver.finish()
        taken: dict[str, list[float]] = {
            name: [] for name in ("update", "waits", "copies", "beside", "writes")
        }
        for _ in range(rounds):
            taken["update"].append(_seconds(lambda: _train(pipe, batch, 1)))
            taken["waits"].append(_seconds(lambda: checkpoint.save(pipe, directory / "waits", {})))
            began = time.perf_counter()
            taken["copies"].append(_seconds(lambda: saver.start({})))
            while saver.busy:
                taken["beside"].append(_seconds(lambda: _train(pipe, batch, 1)))
            path = saver.finish()
            taken["writes"].append(time.perf_counter() - began)
        gradients = [torch.randn_like(t) for t in pipe.state_dict().values() if t.is_floating_point()]
        looking = [_seconds(lambda: Updates._norm_of(gradients)) for _ in range(10 * rounds)]
    assert path is not None
    median = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "checkpoint, MB": sum(file.stat().st_size for file in path.iterdir()) / 1e6,
        "an update, s": median["update"],
        "a save that waits, s": median["waits"],
        "a save beside the training: it waits, s": median["copies"],
        "... and is written after, s (at most)": median["writes"],
        "an update while it is written, s": median["beside"],
        "looking for numbers that are not finite, s": statistics.median(looking),
    }


def _train(pipe: vpipe.Pipeline, batch: Any, updates: int) -> None:
    for _ in pipe.train([batch] * (updates * MINIBATCHES)):
        pass


def _seconds(do: Any) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--directory", type=Path, default=None, help="on the disk to measure; else a temporary one"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
