"""Costs of a save for the training, and of the check for numbers that are not finite for an update.

    python benchmarks/checkpoint.py [--rounds N] [--directory DIR] [--json]

One process trains the benchmark's transformer with AdamW. *A save that waits* writes, hashes and syncs before
training goes on, as `checkpoint.save` does; *a save beside the training* waits for the copy alone (`Saver.start`),
and the updates that run while the writer works are slower, which is reported too. The three take turns. *Looking* is
the norm of all gradients, which `on_nonfinite` takes once an update. Each is measured by the clock and by the time of
the processor, of all threads; on a busy machine only the latter says much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import work

import vpipe
from vpipe import checkpoint

MINIBATCHES = 2
"""Of an update."""
Seconds = tuple[float, float]  # by the clock, of the processor


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        found = measure(Path(directory), options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{'':44} {'clock, s':>10} {'processor, s':>13}")
    for what, (clock, processor) in found.items():
        print(f"{what:44} {clock:10.4f} {processor:13.4f}")


def measure(directory: Path, rounds: int) -> dict[str, Seconds]:
    (batch,) = work.batches(1)
    pipe = vpipe.Pipeline(
        work.build_model(), batch, optimizer=work.build_optimizer, stages=1, minibatches=MINIBATCHES
    )
    taken: dict[str, list[Seconds]] = defaultdict(list)
    with pipe:
        saver = checkpoint.Saver(pipe, directory / "beside", keep=1)
        _train(pipe, batch)
        saver.start({})  # allocates the copy
        saver.finish()
        gradients = [torch.randn_like(t) for t in pipe.state_dict().values() if t.is_floating_point()]
        path = None
        for _ in range(rounds):
            taken["an update"].append(_seconds(lambda: _train(pipe, batch)))
            taken["looking for numbers that are not finite"].append(
                _seconds(lambda: pipe.runtime.updates._norm_of(gradients))
            )
            taken["a save that waits"].append(
                _seconds(lambda: checkpoint.save(pipe, directory / "waits", {}))
            )
            taken["a save beside the training: the copy"].append(_seconds(lambda: saver.start({})))
            while saver.busy:
                taken["an update, and what is written beside it"].append(
                    _seconds(lambda: _train(pipe, batch))
                )
            path = saver.finish()
    assert path is not None
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{size / 1e6:.0f} MB of state, medians of {rounds} rounds", file=sys.stderr)
    return {
        what: (statistics.median(clock for clock, _ in each), statistics.median(cpu for _, cpu in each))
        for what, each in taken.items()
    }


def _train(pipe: vpipe.Pipeline, batch: Any) -> None:
    for _ in pipe.train([batch] * MINIBATCHES):
        pass


def _seconds(do: Callable[[], object]) -> Seconds:
    clock, processor = time.perf_counter(), time.process_time()
    do()
    return time.perf_counter() - clock, time.process_time() - processor


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
