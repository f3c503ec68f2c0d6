"""The commands that train: `vpipe train`, `eval`, `compare`, `doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vpipe.cli.options import AsJson, Config, Settings, read_run

app = typer.Typer()


@app.command()
def train(
    config: Config,
    settings: Settings = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: the newest checkpoint; or the folder of a run or checkpoint.")
    ] = None,
    debug: Annotated[
        list[str] | None,
        typer.Option(
            help="tensors, versions or schedule: tell of each in the ranks' logs. May be given again."
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Times that the run goes on from its newest checkpoint after a fault.")
    ] = 0,
    print_config: Annotated[bool, typer.Option(help="Print every key with its value, and stop.")] = False,
) -> None:
    """Train a model. Starts the ranks that the file names; under torchrun, this process is one of them."""
    from vpipe.config.file import resolved_yaml
    from vpipe.config.settings import rank_arguments
    from vpipe.observe.debug import read_scenes
    from vpipe.train.run import run

    chosen = read_run(config, settings)
    if print_config:
        print(resolved_yaml(chosen), end="")
        return

    scenes = read_scenes(debug or ())

    def work() -> None:
        from vpipe.train.rank import train_rank

        train_rank(chosen, resume, scenes)

    arguments = ["train", *rank_arguments(config, settings or ())]
    arguments += [part for scene in scenes for part in ("--debug", scene)]
    if resume is not None:
        arguments += ["--resume", _absolute(resume)]
    run(chosen, arguments, work, max_restarts=max_restarts)


@app.command("eval")
def evaluate(
    config: Config,
    settings: Settings = None,
    resume: Annotated[
        str, typer.Option(help="auto: the newest checkpoint; or the folder of a run or checkpoint.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Tell the loss of a trained model over the validation samples."""
    from vpipe.config.settings import rank_arguments
    from vpipe.train.run import run

    chosen = read_run(config, settings)

    def work() -> None:
        from vpipe.train.rank import evaluate_rank

        evaluate_rank(chosen, resume, as_json)

    arguments = ["eval", *rank_arguments(config, settings or ()), "--resume", _absolute(resume)]
    run(chosen, [*arguments, *(["--json"] if as_json else [])], work)


@app.command()
def compare(
    configs: Annotated[list[Path], typer.Argument(help="The runs' YAML files.")],
    settings: Settings = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="A key with several values, such as batch_size=8,16,32.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture (PNG) of speed and loss to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run several configurations one after the other on the same data, and tell how they differ."""
    from vpipe.cli.compare import compare_runs

    compare_runs(configs, settings or [], sweep or [], plot, as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Tell what this machine has, what would not work on it, and why."""
    from vpipe.cli.doctor import describe, doctor_table, examine
    from vpipe.system.console import show

    findings = examine()
    if as_json:
        print(json.dumps(describe(findings)))
    else:
        show(doctor_table(findings))


def _absolute(resume: str) -> str:
    return resume if resume == "auto" else str(Path(resume).absolute())
