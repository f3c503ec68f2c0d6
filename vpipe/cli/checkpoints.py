"""The commands below `vpipe checkpoint`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vpipe.cli.options import AsJson

app = typer.Typer(help="Look at checkpoints, verify, export and delete them.", no_args_is_help=True)

Where = Annotated[Path, typer.Argument(help="The folder of a run, or one of its checkpoints/step-...")]


@app.command()
def show(path: Where, as_json: AsJson = False) -> None:
    """Tell what a checkpoint holds, or list those of a run."""
    from vpipe.checkpoint.command import describe, find, show_one, show_several
    from vpipe.tables import show as print_table

    described = [describe(one) for one in find(path)]
    if as_json:
        print(json.dumps(described))
    else:
        print_table(show_one(described[0]) if len(described) == 1 else show_several(described))


@app.command()
def verify(path: Where, as_json: AsJson = False) -> None:
    """Compare sizes and SHA-256 with the manifest, and look for numbers that are not finite.

    Exits with 1 if anything is wrong.
    """
    from vpipe.checkpoint.command import examine, find

    found = {str(one): examine(one) for one in find(path)}
    if as_json:
        print(json.dumps(found))
    else:
        for one, wrong in found.items():
            print(f"{one}: {wrong or 'good'}")
    if any(found.values()):
        raise typer.Exit(1)


@app.command()
def export(
    path: Where,
    directory: Annotated[Path, typer.Argument(help="Where the model goes.")],
    config: Annotated[
        Path | None, typer.Option(help="The run's YAML file; the run's folder has one.")
    ] = None,
) -> None:
    """Write a directory that `from_pretrained` of transformers reads: weights, configuration, the run's tokenizer."""
    from vpipe.checkpoint.command import export as export_checkpoint

    chosen, missing = export_checkpoint(path, directory, config)
    print(f"model of {chosen} in {directory}")
    if missing:
        print(f"it has no values for {', '.join(missing)}: training never used them")


@app.command()
def prune(
    path: Where,
    keep: Annotated[int, typer.Option(help="How many of the newest stay; the best stays too.")],
) -> None:
    """Delete the oldest checkpoints of a run, and what crashes have left over for an hour."""
    from vpipe.checkpoint.command import prune_run

    for deleted in prune_run(path, keep):
        print(f"deleted {deleted}")
