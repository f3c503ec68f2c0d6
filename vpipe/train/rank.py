"""A rank of `vpipe train` and of `vpipe eval`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from vpipe.config import RunConfig
from vpipe.errors import Stopped, VPipeError
from vpipe.launch.rank import ASKED, hold_signals, start_heartbeat
from vpipe.observe.description import write_outcome
from vpipe.observe.recorder import perplexity
from vpipe.observe.screen import summary_table
from vpipe.system.console import show
from vpipe.train.export import export_run, write_sentence
from vpipe.train.signals import ignore_save_signal
from vpipe.train.trainer import Trainer


def train_rank(config: RunConfig, resume: str | None, debug: Sequence[str] = ()) -> None:
    """This rank's part of a training run; rank 0 prints the result."""
    ignore_save_signal()
    start_heartbeat()
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
    model = export_run(trainer, Path(summary["checkpoint"]))
    summary["model"] = str(model)
    write_outcome(trainer.folder, summary)
    sentence = write_sentence(trainer, model)
    if sentence is not None:
        print(f"{config.prompt!r} goes on: {sentence!r}")
    show(summary_table(summary))


def evaluate_rank(config: RunConfig, resume: str, as_json: bool) -> None:
    """This rank's part of an evaluation."""
    start_heartbeat()
    trainer = Trainer(config)
    try:
        restored = trainer.restore(resume, lambda line: print(line, file=sys.stderr))
        if not trainer.pipe.updates:
            raise VPipeError(f"--resume is {resume!r}: there is no checkpoint to evaluate: train first")
        loss, metrics = trainer.evaluate()
    finally:
        trainer.close()
    if trainer.rank == 0:
        shutil.rmtree(trainer.folder, ignore_errors=True)  # only logs of a successful evaluation
        if as_json:
            figures = {
                **metrics,
                "loss": loss,
                "perplexity": perplexity(loss),
                "updates": trainer.pipe.updates,
            }
            print(json.dumps(figures))
        else:
            found = "".join(f", {name}: {value:.4f}" for name, value in metrics.items())
            print(f"{restored}\nEvaluation loss: {loss:.4f}, Perplexity: {perplexity(loss):.2f}{found}")
