"""A language model on one GPU, compiled: by hand with torch.compile, with vpipe on one rank, and on four that share it.

    python benchmarks/gpu_targets.py [--model qwen3-0.6b] [--lengths 512,2048] [--tokens 8192] [--json FILE]
        [--schedules zb-v,2bw,vpipe] [--timed 4] [--cuda-graphs]

All train the same model in bf16 with float32 masters and fused AdamW, 16 minibatches of so many tokens an update. *By
hand* is the Hugging Face model under `torch.compile`, in a loop. One rank has the whole card; four ranks have a quarter
of its multiprocessors each (MPS), with the schedules zb-v, 2bw and vpipe and the default partition; vpipe makes an
update after each minibatch, which is sixteen times the updates. Shares are of the speed by hand; `mfu` is that of the
card's peak. With `--cuda-graphs` the one rank replays its stage where its host is slower than the card. What was
compiled is kept by torch: a first call with `--timed 3`, beside other work, makes a second one short.

Whether the script works can be tried without a GPU: `--device cpu --tiny --eager`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench, Case, Settings
from gpu_models import SUBJECTS
from gpu_peers import MasterOptimizer

from vpipe.communication import InProcessHub
from vpipe.profile.measured_stage import clock_of, seconds
from vpipe.system.card_peak import device_peak

MINIBATCHES, WARM = 16, 2
"""Of an update, and updates."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SUBJECTS))
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--tokens", type=int, default=8192, help="of a minibatch")
    parser.add_argument("--layers", type=int, help="default: the model's own")
    parser.add_argument("--device", default="cuda:0", help="or cpu, to try the script")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--eager", action="store_true", help="nothing is compiled")
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="vpipe's one rank with `cuda_graphs: auto`"
    )
    parser.add_argument("--timed", type=int, default=4, help="updates that are timed, 3 at least")
    parser.add_argument("--schedules", default="zb-v,2bw,vpipe", help="of four ranks")
    parser.add_argument("--json", type=Path, default=Path(tempfile.gettempdir()) / "vpipe-targets.jsonl")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.timed < 3:
        parser.error(
            f"--timed is {arguments.timed}: of asynchronous schedules some of them are lost: give 3 or more"
        )
    if arguments.way:
        run_way(arguments)
        return
    arguments.json.unlink(missing_ok=True)
    for length in arguments.lengths.split(","):
        for way in WAYS:  # each in a process of its own, so that nothing of another is left
            given = [*sys.argv[1:], "--way", way, "--lengths", length, "--json", str(arguments.json)]
            subprocess.run([sys.executable, __file__, *given], check=False)
        subprocess.run([sys.executable, *four_ranks(arguments, int(length))], check=False)
        show(arguments.json, int(length))


def settings_of(arguments: argparse.Namespace) -> Settings:
    subject, length = SUBJECTS[arguments.model], int(arguments.lengths)
    return Settings(
        json=str(arguments.json),
        device=arguments.device,
        precision="bf16",
        tf32=False,
        model=arguments.model,
        tiny=arguments.tiny,
        layers=arguments.layers or subject.layers,
        batch=max(1, arguments.tokens // length),
        length=length,
        warm=WARM * MINIBATCHES,
        measured=arguments.timed * MINIBATCHES,
        least=arguments.timed,
        began=time.monotonic(),
        seconds=1e6,
        parts=(),
        minibatches=(MINIBATCHES,),
        cuda_graphs="auto" if arguments.cuda_graphs and arguments.way == "one rank" else False,
        quick=True,
    )


def run_way(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if arguments.device != "cpu":
        torch.cuda.set_device(arguments.device)
    bench = Bench(InProcessHub(1).join(0), settings_of(arguments))
    rate = WAYS[arguments.way](bench, not arguments.eager)
    flops = sum(block.flops for block in bench.graph(bench.layers, bench.batch).blocks)
    peak = device_peak(bench.device, "bf16")
    bench.tell(
        way=arguments.way,
        length=bench.settings.length,
        tokens_per_s=rate * bench.settings.length,
        flops_per_sample=3 * flops / bench.batch,
        mfu=None if peak is None else 3 * flops / bench.batch * rate / peak,
        peak_gib=round(bench.peak() / 2**30, 2),
    )


def by_hand(bench: Bench, compiled: bool) -> float:
    """Samples a second of a plain loop."""
    bench.begin(None)
    with bench.device:
        made = bench.subject.build(bench.layers, tiny=bench.settings.tiny)
    model = made.to(torch.bfloat16).train()
    optimizer = MasterOptimizer(bench, list(model.parameters()))
    step: Any = torch.compile(model) if compiled else model
    batches = [
        {name: tensor.to(bench.device) for name, tensor in one.items()} for one in bench.batches(bench.batch)
    ]
    clock = clock_of(bench.device) if bench.device.type == "cuda" else time.perf_counter
    marks = []
    timed = bench.settings.least
    for _ in range(WARM + timed):
        marks.append(clock())
        for number in range(MINIBATCHES):
            (step(**batches[number % len(batches)]).loss / MINIBATCHES).backward()
        optimizer.step()
        if len(marks) == 1:
            bench.tell(case="by hand: compiled and run for one update")
    marks.append(clock())
    return timed * MINIBATCHES * bench.batch / seconds((marks[WARM], marks[-1]))


def one_rank(bench: Bench, compiled: bool) -> float:
    case = Case("one rank", "1f1b", bench.batch, MINIBATCHES, compile=compiled)
    return bench.pace(case, InProcessHub(1).join(0)).rate


WAYS = {"by hand": by_hand, "one rank": one_rank}


def four_ranks(arguments: argparse.Namespace, length: int) -> list[str]:
    options = {
        "model": arguments.model,
        "length": length,
        "batch": max(1, arguments.tokens // length),
        "device": arguments.device,
        "minibatches": MINIBATCHES,
        "measured": arguments.timed * MINIBATCHES,
        "least": arguments.timed,
        "schedules": arguments.schedules,
        "parts": "targets",
        "json": arguments.json.with_suffix(f".{length}.jsonl"),
        **({"layers": arguments.layers} if arguments.layers else {}),
    }
    flags = ["--quick", *([] if arguments.eager else ["--compile"]), *(["--tiny"] if arguments.tiny else [])]
    named = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    return [str(Path(__file__).with_name("gpu.py")), *named, *flags]


def show(file: Path, length: int) -> None:
    """Tokens a second, the share of the speed by hand, the share of the peak."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = {row["way"]: row for row in rows if row.get("length") == length and "way" in row}
    others = file.with_suffix(f".{length}.jsonl")
    for line in others.read_text().splitlines() if others.exists() else ():
        row = json.loads(line)
        if "samples_per_s" in row:
            found[f"four ranks, {row['schedule']}"] = {"tokens_per_s": row["samples_per_s"] * length}
    hand = found.get("by hand")
    for way, row in found.items():
        share = f", {row['tokens_per_s'] / hand['tokens_per_s']:.3f} of by hand" if hand else ""
        mfu = ""
        if hand and hand["mfu"]:
            mfu = f", mfu {hand['mfu'] * row['tokens_per_s'] / hand['tokens_per_s']:.1%}"
        print(f"length {length}, {way}: {row['tokens_per_s']:.0f} tokens/s{share}{mfu}", flush=True)


if __name__ == "__main__":
    main()
