"""A rank of `vpipe train` and of `vpipe eval`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vpipe.config import RunConfig
from vpipe.errors import NotWrittenError, Stopped, VPipeError, printable
from vpipe.launch.rank import ASKED, hold_signals, start_heartbeat
from vpipe.observe.evaluation import evaluation_line, perplexity_of
from vpipe.observe.results import write_results
from vpipe.observe.screen import summary_table
from vpipe.system.console import show
from vpipe.system.files import json_text, near
from vpipe.system.start import collector_off
from vpipe.train.export import export_run, write_sentence
from vpipe.train.signals import ignore_save_signal
from vpipe.train.trainer import Trainer


def train_rank(
    config: RunConfig, resume: str | None, debug: Sequence[str] = (), *, verbose: bool = False
) -> None:
    """This rank's part of a training run; rank 0 prints the result."""
    ignore_save_signal()
    start_heartbeat()
    with collector_off(keep=True):
        trainer = Trainer(config, announce=_say)
    stopped: Stopped | None = None
    try:
        summary = trainer.train(resume, debug, take_signals=hold_signals, verbose=verbose)
    except Stopped as asked:
        stopped, summary = asked, asked.summary
    finally:
        trainer.close()
    if trainer.rank == 0:
        _finish(trainer, summary, stopped)
    if stopped is not None:
        sys.exit(ASKED)


def _say(text: str) -> None:
    print(printable(f"{text} ..."), flush=True)


def _finish(trainer: Trainer, summary: dict[str, Any], stopped: Stopped | None) -> None:
    """Write and show the results, as far as that is possible; then raise for those that could not be written."""
    lost = []
    if stopped is None:
        try:
            _say(f"writing the model to {near(trainer.folder / 'model')}")
            model = export_run(trainer, Path(summary["checkpoint"]))
            summary["model"] = str(model)
            sentence = write_sentence(trainer, model)
            if sentence is not None:
                print(f"{trainer.config.prompt!r} goes on: {sentence!r}")
        except NotWrittenError as error:
            lost.append(f"{error}; write it with `vpipe checkpoint export {trainer.folder}`")
    _say("writing the trace and the report")
    try:
        write_results(trainer.folder, summary)
    except NotWrittenError as error:
        lost.append(str(error))
    if stopped is None:
        show(summary_table(summary))
    else:
        print(stopped)
    if lost:
        raise NotWrittenError("; ".join(lost))


def evaluate_rank(config: RunConfig, resume: str, as_json: bool) -> None:
    """This rank's part of an evaluation."""
    start_heartbeat()
    trainer = Trainer(config) if as_json else Trainer(config, announce=_say)
    try:
        restored = trainer.restore(resume, lambda line: print(printable(line), file=sys.stderr))
        if not trainer.pipe.updates:
            raise VPipeError(f"--resume is {resume!r}: there is no checkpoint to evaluate: train first")
        loss, metrics = trainer.evaluate()
        first = trainer.world.ranks_here()[0]
    finally:
        trainer.close()
    if trainer.rank == first:  # of its host, which may have a folder of its own
        shutil.rmtree(trainer.folder, ignore_errors=True)  # only logs of a successful evaluation
    if trainer.rank == 0:
        perplexity = perplexity_of(trainer.pipe, loss)
        if as_json:
            figures = {
                **metrics,
                "loss": loss,
                "perplexity": perplexity,
                "updates": trainer.pipe.updates,
            }
            print(json_text(figures, ascii=True))
        else:
            print(f"{printable(restored)}\n{evaluation_line(loss, perplexity, metrics)}")
