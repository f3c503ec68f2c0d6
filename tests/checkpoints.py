"""Runs that save and resume, for the tests of checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests import models
from tests.examples import example, varied
from vpipe import Pipeline, checkpoint
from vpipe.checkpoint import Manifest, manifest
from vpipe.pipeline.threads import run_ranks
from vpipe.weights import OptimizerFactory, optimizer_factory

UPDATES = 8
STOP = 2
OPTIMIZERS = {
    "sgd": optimizer_factory("sgd", 0.05, weight_decay=0.01),
    "adamw": optimizer_factory("adamw", 1e-3, weight_decay=0.1),
    "lamb": optimizer_factory("lamb", 1e-3, weight_decay=0.01),
}
SYNCHRONOUS: dict[str, Any] = {"schedule": "1f1b", "minibatches": 3}


def bert() -> models.Example:
    """Tied weights, dropout, and blocks enough for four stages."""
    return example("bert", layers=2, dropout=0.1)


def run(
    example: models.Example,
    ranks: int,
    directory: Path,
    *,
    resume: Path | None = None,
    optimizer: str | OptimizerFactory = "adamw",
    prepare: Callable[[Pipeline], None] = lambda pipe: None,
    updates: int = UPDATES,
    **options: Any,
) -> dict[int, float]:
    """Train to the end; save there, and in the middle unless the run begins from a checkpoint. The losses."""
    model, batch, loss_fn = example
    factory = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer

    def work(world: Any) -> dict[int, float]:
        with Pipeline(model, batch, optimizer=factory, loss_fn=loss_fn, world=world, **options) as pipe:
            prepare(pipe)
            if resume is not None:
                extra = checkpoint.load(pipe, resume)
                assert extra == {"position": pipe.updates}
            interval = pipe.schedule.update_interval
            data = varied(batch, updates * interval)
            losses = {}
            for update, loss in pipe.train(data[pipe.updates * interval :]):
                losses[update] = loss
                if update + 1 == STOP and resume is None:
                    pipe.flush()
                    checkpoint.save(pipe, directory, {"position": pipe.updates})
            checkpoint.save(pipe, directory, {"position": pipe.updates})
            return losses

    results = run_ranks(ranks, work)
    assert all(losses == results[0] for losses in results)
    return results[0]


def steps(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name.startswith("step-"))


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def check_resumes(example: models.Example, ranks: int, tmp_path: Path, **options: Any) -> Manifest:
    """The second half alone, from the checkpoint: the same losses, and at the end the same files."""
    whole = run(example, ranks, tmp_path / "whole", **options)
    middle, end = steps(tmp_path / "whole")
    assert list(whole) == list(range(UPDATES))
    made = checkpoint.verify(middle).updates
    assert STOP <= made < UPDATES
    second = run(example, ranks, tmp_path / "second", resume=middle, **options)
    assert second == {update: loss for update, loss in whole.items() if update >= made}
    (again,) = steps(tmp_path / "second")
    assert again.name == end.name == f"step-{UPDATES:08d}"
    assert checkpoint.verify(again) == checkpoint.verify(end)  # with hashes: equal to the bit
    return checkpoint.read_manifest(middle)


def alone(work: Callable[[Pipeline], Any], tiny: models.Example, optimizer: str = "adamw") -> Any:
    """A pipeline of one rank, for what has nothing to do with the number of ranks."""
    model, batch, loss_fn = tiny

    def on_rank(world: Any) -> Any:
        with Pipeline(
            model, batch, optimizer=OPTIMIZERS[optimizer], loss_fn=loss_fn, minibatches=1, world=world
        ) as pipe:
            return work(pipe)

    return run_ranks(1, on_rank)[0]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest as somebody would who knows how its hash is made."""
    content = json.loads((path / "manifest.json").read_text())
    del content["sha256"]
    change(content)
    content["sha256"] = manifest._hash(content)
    (path / "manifest.json").write_text(json.dumps(content))
