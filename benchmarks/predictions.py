"""Predicted beside measured throughput of models that nothing was built for, by the commands that users have.

    python benchmarks/predictions.py [--models qwen3,vit] [--schedules 1f1b,vpipe] [--ranks 2] [--rounds 1]

For each model of transformers and each schedule `vpipe profile` measures the blocks, `vpipe train` trains on random
data right after it, with the partition and the optimizer that a run has if nothing is chosen, and `vpipe simulate`
predicts the plan of that run. With several rounds the medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

WIDTH = {"vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 4}
DECODER = WIDTH | {"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 48}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 32}
    | DECODER,
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    | DECODER,
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
    | DECODER,
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": 4096,
        "d_model": 192,
        "d_kv": 48,
        "d_ff": 512,
        "num_layers": 4,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "num_hidden_layers": 8,
        "image_size": 64,
        "patch_size": 8,
    }
    | {key: value for key, value in WIDTH.items() if key != "vocab_size"},
}
"""Their config.json."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"minibatches": 8, "max_updates": 30},
    "zb-v": {"minibatches": 8, "max_updates": 30},
    "2bw": {"update_interval": 4, "max_updates": 60},
    "vpipe": {"max_updates": 240},
}
RUN = {"synthetic_data": True, "max_samples": 512, "batch_size": 8, "epochs": 1000, "print_frequency": 1000}
LIMIT = 0.05
SECONDS = 300


class Figures(NamedTuple):
    """Samples a second."""

    predicted: float
    measured: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    print("| model | schedule | samples/s predicted | measured | ratio |\n|---|---|---|---|---|")
    ratios = []
    for model, schedule in product(given.models.split(","), given.schedules.split(",")):
        found = [measure(model, schedule, given.ranks) for _ in range(given.rounds)]
        ratios.append(median(each.predicted / each.measured for each in found))
        predicted, measured = (median(values) for values in zip(*found, strict=True))
        print(f"| {model} | {schedule} | {predicted:.1f} | {measured:.1f} | {ratios[-1]:.3f} |", flush=True)
    near = sum(abs(ratio - 1) <= LIMIT for ratio in ratios)
    print(f"\nWithin {LIMIT:.0%}: {near} of {len(ratios)}; {min(ratios):.3f} to {max(ratios):.3f}.")


def measure(model: str, schedule: str, ranks: int) -> Figures:
    with TemporaryDirectory(prefix="vpipe-predictions-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        length = {} if model == "vit" else {"sequence_length": 64}
        run = RUN | length | SCHEDULES[schedule] | {"model": ".", "stages": ranks, "schedule": schedule}
        (folder / "run.yml").write_text(yaml.safe_dump(run))
        vpipe(folder, "profile", "run.yml", "-o", "profile.json")
        vpipe(folder, "train", "run.yml")
        (trained,) = folder.glob("runs/2*")
        plan = str(trained / "plan.json")
        predicted = vpipe(folder, "simulate", "--profile", "profile.json", "--plan", plan, "--json")
        measured = json.loads((trained / "summary.json").read_text())
        return Figures(json.loads(predicted)["samples_per_s"], measured["samples_per_s"])


def vpipe(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "vpipe", *arguments]
    own = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    main()
