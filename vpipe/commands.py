"""What `vpipe train` and `vpipe eval` do on a rank, and what `vpipe compare` does with the runs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.errors import Stopped, VPipeError

if TYPE_CHECKING:
    from vpipe.config import RunConfig


def train_rank(config: RunConfig, resume: str | None, debug: Sequence[str] = ()) -> None:
    """This rank's part of a training run; rank 0 tells how it ended."""
    from vpipe.files import write_json
    from vpipe.launch.last_words import hold_signals
    from vpipe.launch.rank import ASKED, start_beating
    from vpipe.observe.report import write_report
    from vpipe.observe.summary import summary_table
    from vpipe.observe.trace import write_trace
    from vpipe.requests import ignore_requests
    from vpipe.tables import show
    from vpipe.trainer import Trainer

    ignore_requests()
    start_beating()
    trainer = Trainer(config)
    try:
        summary = trainer.train(resume, debug, take_signals=hold_signals)
    except Stopped as stopped:
        if trainer.rank == 0:
            print(stopped)
        sys.exit(ASKED)
    finally:
        trainer.close()
    if trainer.rank:
        return
    from vpipe.export import export_run, write_sentence

    model = export_run(trainer, Path(summary["checkpoint"]))
    summary["model"] = str(model)
    write_json(trainer.folder / "summary.json", summary)
    write_trace(trainer.folder)
    write_report([trainer.folder], Path(summary["report"]))
    sentence = write_sentence(trainer, model)
    if sentence is not None:
        print(f"{config.prompt!r} goes on: {sentence!r}")
    show(summary_table(summary))


def evaluate_rank(config: RunConfig, resume: str, as_json: bool) -> None:
    """This rank's part of an evaluation."""
    from vpipe.launch.rank import start_beating
    from vpipe.observe.recorder import perplexity
    from vpipe.trainer import Trainer

    start_beating()
    trainer = Trainer(config)
    try:
        restored = trainer.restore(resume, lambda line: print(line, file=sys.stderr))
        if not trainer.pipe.updates:
            raise VPipeError(f"--resume is {resume!r}: there is no checkpoint to evaluate: train first")
        loss = trainer.evaluate()
    finally:
        trainer.close()
    if trainer.rank == 0:
        shutil.rmtree(trainer.folder, ignore_errors=True)  # it holds logs of an evaluation that ended well
        figures: dict[str, Any] = {
            "loss": loss,
            "perplexity": perplexity(loss),
            "updates": trainer.pipe.updates,
        }
        print(
            json.dumps(figures)
            if as_json
            else f"{restored}\nEvaluation loss: {loss:.4f}, Perplexity: {perplexity(loss):.2f}"
        )


def compare_runs(
    configs: Sequence[Path],
    settings: Sequence[str],
    sweeps: Sequence[str],
    picture: Path | None,
    as_json: bool,
) -> None:
    """Train each variant in ranks of its own, one after the other, and tell how they differ."""
    from vpipe.compare import comparison_table, variants
    from vpipe.compare_plot import can_plot, plot
    from vpipe.config_file import read_config
    from vpipe.launch import launch
    from vpipe.settings import rank_arguments, read_settings
    from vpipe.tables import show

    if picture is not None and not can_plot():
        raise VPipeError("--plot needs the package matplotlib: pip install 'vpipe[plot]'")
    chosen = variants(configs, sweeps, settings)
    runs = [read_config(one.path, read_settings(one.settings)) for one in chosen]  # all mistakes come first
    results = []
    for number, (variant, config) in enumerate(zip(chosen, runs, strict=True), 1):
        print(f"{number} of {len(chosen)}: {variant.label}", file=sys.stderr)
        folder = launch(config, ["train", *rank_arguments(variant.path, variant.settings)], quiet=True)
        results.append(json.loads((folder / "summary.json").read_text()) | {"label": variant.label})
    if as_json:
        print(json.dumps(results))
    else:
        show(comparison_table(results))
    if not can_plot():
        return  # nobody asked for a picture
    picture = picture or folder.parent / f"comparison-{folder.name}.png"
    plot(results, picture)
    print(f"picture {picture}", file=sys.stderr)
