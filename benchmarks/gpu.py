"""A model on four ranks that share one GPU: the limit, every schedule, settings under a memory cap, peers.

    python benchmarks/gpu.py [--json FILE] [--model bert-large] [--precision bf16] [--layers 24] [--batch 16]
        [--parts schedules,guides] [--cuda-graphs] [--compile]

Each rank has a quarter of the card's multiprocessors (MPS) and trains a model of `gpu_models.py`: a BERT of the guides'
size with sequence 128, or another one. Parts (the last three of BERT only):

    schedules   every schedule, with 8 and 32 minibatches an update, against the limit
    predictions settings with what was predicted of each, the guides' among them; `--compile` with compiled blocks
    targets     four ranks for `gpu_targets.py`, alone
    compiled    every schedule with compiled blocks
    guides      the guides' settings and plans of our own under one cap
    largest     the largest minibatch and the most layers that train under the cap, in five minutes at most
    peers       torch.distributed.pipelining over vpipe's channel
    graphs      what CUDA graphs gain where nothing else is done: layers issued one by one, and replayed

*The limit* is the time of all blocks on one such rank, over four; it is measured with one rank at work, and with all
four at work each on a whole model of its own, which share the card's memory bandwidth and its power (*at once*). *The
cap* is 97 % of what PipeDream's setting needs, so that this does not fit. Figures are written to FILE as they
come; predictions are the simulator's, from a profile that was measured while all four ranks computed.

Whether the script works can be tried without a GPU: `--device cpu --tiny`. Its figures then say nothing, and a cap is
what is predicted above it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vpipe.launch.mps import sharing

RANKS = 4
FIGURES = (("samples_per_s", ".1f"), ("of_limit", ".3f"), ("of_together", ".3f"))
PARTS = ("schedules", "predictions", "targets", "compiled", "guides", "largest", "peers", "graphs")
MODELS = ("bert-large", "qwen3-0.6b", "llama-1b", "mixtral", "vit-large")
"""Of `gpu_models.py`, which takes seconds to import."""
OF_BERT = {"largest", "peers", "graphs"}
TINY = {"length": 16, "warm": 4, "measured": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path(tempfile.gettempdir()) / "vpipe-gpu.jsonl")
    parser.add_argument("--device", default="cuda:0", help="or cpu, to try the script")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp16", "fp32", "tf32"))
    parser.add_argument("--model", default="bert-large", choices=MODELS)
    parser.add_argument("--layers", type=int, help="default: the model's own")
    parser.add_argument("--length", type=int, help="tokens of a sample; default: the model's own")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="narrow, sequence 16: to try the script")
    parser.add_argument("--minibatches", default="8,32", help="of an update of the synchronous schedules")
    parser.add_argument("--parts", default="schedules,guides", help=f"any of {', '.join(PARTS)}")
    parser.add_argument(
        "--measured", type=int, help="minibatches that are timed, at least; a quarter warms up"
    )
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="stages are played from CUDA graphs, in every case"
    )
    parser.add_argument("--least", type=int, default=4, help="updates that are timed, at least")
    parser.add_argument("--quick", action="store_true", help="profiles in less time")
    parser.add_argument("--compile", action="store_true", help="of the part predictions: compiled blocks")
    parser.add_argument("--schedules", default="zb-v,2bw,vpipe", help="of the part targets")
    parser.add_argument("--seconds", type=float, default=400.0, help="begin no further case after so long")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if arguments.model != "bert-large" and (bound := OF_BERT & set(parts)):
        parser.error(f"--parts: {', '.join(sorted(bound))} is written for bert-large only")
    settings = {
        "json": str(arguments.json),
        "device": arguments.device,
        "precision": "fp32" if arguments.precision == "tf32" else arguments.precision,
        "tf32": arguments.precision == "tf32",
        "model": arguments.model,
        "tiny": arguments.tiny,
        "layers": arguments.layers,
        "length": arguments.length,
        "batch": arguments.batch,
        "began": time.monotonic(),
        "seconds": arguments.seconds,
        "cuda_graphs": arguments.cuda_graphs,
        "parts": parts,
        "minibatches": [int(count) for count in arguments.minibatches.split(",")],
        "compile": arguments.compile,
        "schedules": arguments.schedules.split(","),
        "least": arguments.least,
        "quick": arguments.quick,
        **(TINY if arguments.tiny else {"warm": 16, "measured": 64}),
    }
    if arguments.measured:
        settings |= {"warm": -(-arguments.measured // 4), "measured": arguments.measured}
    codes = run_ranks(settings)
    if arguments.json.exists():
        rows = [json.loads(line) for line in arguments.json.read_text().splitlines()]
        Console(width=160).print(table(rows))
        for row in rows:
            if "ratios" in row:
                print(row["case"], {name: round(ratio, 2) for name, ratio in row["ratios"].items()})
            if "largest" in row:
                print(
                    row["case"], row["largest"], "" if row["sure"] else "(at least: there was no more time)"
                )
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


def run_ranks(settings: dict[str, object]) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with environments(str(settings["device"])) as shares:
        workers = [
            subprocess.Popen(
                [sys.executable, Path(__file__).with_name("gpu_rank.py"), json.dumps(settings)],
                env={
                    **os.environ,
                    **share,
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
            for rank, share in enumerate(shares)
        ]
        try:
            return [worker.wait() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()


@contextlib.contextmanager
def environments(device: str) -> Iterator[list[dict[str, str]]]:
    """Of each rank, with its share of the GPU."""
    if device == "cpu":
        yield [{}] * RANKS
        return
    with sharing([0] * RANKS) as shares:
        yield shares


def table(rows: list[dict[str, object]]) -> Table:
    made = Table(title="one GPU, four ranks", title_justify="left")
    for column in (
        "case",
        "minibatches",
        "batch",
        "samples/s",
        "of limit",
        "at once",
        "predicted",
        "off",
        "peak GiB",
        "predicted",
        "off",
    ):
        made.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        if "ratios" in row or "largest" in row:
            continue
        made.add_row(
            str(row["case"]),
            str(row.get("minibatches") or ""),
            str(row.get("batch") or ""),
            *(_number(row.get(key), form) for key, form in FIGURES),
            _number(row.get("predicted"), ".1f"),
            _number(row.get("off"), "+.1%"),
            str(row["error"]) if "error" in row else _peaks(row.get("peak_bytes")),
            _peaks(row.get("predicted_bytes")),
            " ".join(f"{value:+.0%}" for value in _list(row.get("memory_off"))),
        )
    return made


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, float) else ""


def _peaks(values: object) -> str:
    return " ".join(f"{value / 2**30:.2f}" for value in _list(values))


def _list(values: object) -> list[float]:
    return values if isinstance(values, list) else []


if __name__ == "__main__":
    main()
