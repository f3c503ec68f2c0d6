"""Losses of a GPT with stale weights, on one GPU: rows of docs/convergence.md, trained at the same time.

    python benchmarks/convergence.py --updates 1500 --seconds 370 --json FILE

The text is the source of two Python packages that are installed. Each row is a process that trains with its ranks as
threads (`vpipe.train.convergence`) and writes its losses while it trains: a row that the time cuts off is shown as far
as it came. Needs a GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

CONFIG = """
model_type: cpm
hidden_size: 512
num_layers: 8
num_heads: 8
vocab_size: 8192
dropout: 0.0
sequence_length: 256
batch_size: 64
data_dir: text.txt
schedule: vpipe
optimizer: muon
learning_rate: 1e-3
learning_rate_policy: cosine
warmup_updates: 100
weight_decay: 0.01
clip_norm: 1.0
precision: bf16
epochs: 20
"""
ROWS = {
    "synchronous, adamw": ["schedule=1f1b", "minibatches=1", "stages=1", "optimizer=adamw", "staleness=[]"],
    "synchronous, muon": ["schedule=1f1b", "minibatches=1", "stages=1", "staleness=[]"],
    "2bw, 4 stages, muon": [
        "schedule=2bw", "update_interval=4", "stages=4", "batch_size=16", "staleness=[]",
    ],
    "2bw, 4 stages, muon, predict": [
        "schedule=2bw", "update_interval=4", "stages=4", "batch_size=16", "staleness=[predict]",
    ],
    "vpipe, 4 stages, adamw, predict": ["stages=4", "optimizer=adamw", "staleness=[predict]"],
    "vpipe, 4 stages, muon": ["stages=4", "staleness=[]"],
    "vpipe, 4 stages, muon, predict": ["stages=4", "staleness=[predict]"],
    "vpipe, 8 stages, muon, predict": ["stages=8", "staleness=[predict]"],
}  # fmt: skip
"""Every update sees 64 samples."""
TEXT = 45_000_000
"""Characters."""
WINDOW = 50
"""Updates of which a mean is shown."""


def write_text(path: Path, characters: int = TEXT) -> None:
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for package in ("transformers", "torch"):
            spec = find_spec(package)
            assert spec is not None
            assert spec.origin is not None
            for source in sorted(Path(spec.origin).parent.rglob("*.py")):
                text = source.read_text(encoding="utf-8", errors="ignore")
                if len(text) <= 200_000 and written <= characters:
                    file.write(text + "\n\n")
                    written += len(text)


def train_row(config: Path, output: Path, settings: list[str]) -> None:
    """In a process of its own."""
    import torch

    from vpipe.config.file import read_config
    from vpipe.config.settings import read_settings
    from vpipe.train.convergence import train_curve

    losses: list[float] = []

    def note(made: int, of: int, loss: float) -> None:
        losses.append(loss)
        if made % WINDOW == 0:
            output.write_text(json.dumps({"losses": losses}))

    torch.set_num_threads(1)
    curve = train_curve(read_config(config, read_settings(settings)), "cuda:0", note)
    found = {"losses": curve.losses, "evaluation": curve.evaluation_loss, "staleness": curve.staleness}
    output.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=370.0, help="then rows are cut off")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write-text", type=Path, help="only write the text to this file")
    parser.add_argument("--characters", type=int, default=TEXT, help="of the text")
    parser.add_argument("--row", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        config, output, *settings = arguments.row
        train_row(Path(config), Path(output), settings)
        return
    if arguments.write_text:
        write_text(arguments.write_text, arguments.characters)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_text(path / "text.txt", arguments.characters)
        (path / "gpt.yml").write_text(CONFIG)
        outputs = {name: path / f"{number}.json" for number, name in enumerate(ROWS)}
        common = [f"max_updates={arguments.updates}", f"log_directory={path / 'runs'}"]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--row", str(path / "gpt.yml"), str(outputs[name]), *row, *common]
            )
            for name, row in ROWS.items()
        ]
        end = time.monotonic() + arguments.seconds
        try:
            while any(p.poll() is None for p in processes) and time.monotonic() < end:
                time.sleep(1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = {name: json.loads(o.read_text()) for name, o in outputs.items() if o.exists()}
    for name, row in found.items():
        losses = row["losses"]
        places = range(max(WINDOW, arguments.updates // 10), len(losses) + 1, max(1, arguments.updates // 10))
        means = " ".join(f"{at}: {fmean(losses[at - WINDOW : at]):.3f}" for at in places)
        print(f"{name:34} evaluation {row.get('evaluation', '-')}; {means}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
