"""The commands below `vpipe checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from vpipe.cli.options import AsJson, print_result
from vpipe.errors import VPipeError, printable
from vpipe.system.console import announce, warn
from vpipe.system.files import is_file, json_text
from vpipe.system.units import show_bytes

app = typer.Typer(help="Show, verify, export and delete checkpoints.", no_args_is_help=True)

CheckpointPath = Annotated[
    Path, typer.Argument(help="The folder of a run, or one of its checkpoints/step-...")
]


@app.command()
def show(path: CheckpointPath, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds, or list those of a run."""
    _announce_reading(path)
    from vpipe.checkpoint.inspection import describe, find

    found = find(path)
    described: list[dict[str, Any]] = []
    for one in found:
        try:
            described.append(describe(one))
        except VPipeError as error:
            if len(found) == 1:
                raise
            warn(f"checkpoint {one} is left out: {error}")
    if not described:
        raise VPipeError(f"no checkpoint in {path} can be read")
    table = show_one(described[0]) if len(described) == 1 else show_several(described)
    print_result(described, table, as_json)


@app.command()
def verify(path: CheckpointPath, as_json: AsJson = False) -> None:
    """Check sizes, SHA-256 and that all numbers are finite. Exits with 1 if anything is wrong."""
    _announce_reading(path)
    from vpipe.checkpoint.inspection import examine, find

    found = {str(one): examine(one) for one in find(path)}
    if as_json:
        print(json_text(found, ascii=True))
    else:
        for one, wrong in found.items():
            print(printable(f"{one}: {wrong or 'good'}"))
    if any(found.values()):
        raise typer.Exit(1)


@app.command()
def export(
    path: CheckpointPath,
    directory: Annotated[Path, typer.Argument(help="Where the model goes.")],
    config: Annotated[
        Path | None, typer.Option(help="The run's YAML file; the run's folder has one.")
    ] = None,
) -> None:
    """Write a directory that `from_pretrained` of transformers reads: weights, configuration, the run's tokenizer."""
    _announce_reading(path)
    from vpipe.checkpoint import export_pretrained
    from vpipe.checkpoint.inspection import newest_whole
    from vpipe.config.file import read_config
    from vpipe.data import read_tokenizer
    from vpipe.train.datasets import TOKENIZER
    from vpipe.train.export import write_tokenizer
    from vpipe.train.workload import configured_model

    chosen = newest_whole(path)
    run = chosen.absolute().parents[1]
    described = config or run / "config.yml"
    if not is_file(described):
        raise VPipeError(
            f"{described} does not exist, so the trained model is unknown: give the run's file with --config"
        )
    model: Any = configured_model(read_config(described), "meta")
    missing = export_pretrained(chosen, model, directory)
    if is_file(run / TOKENIZER):
        write_tokenizer(read_tokenizer(run / TOKENIZER, model.config.vocab_size), directory)
    print(printable(f"model of {chosen} in {directory}"))
    if missing:
        print(printable(f"without values for {', '.join(missing)}: training never used them"))


@app.command()
def prune(
    path: CheckpointPath,
    keep: Annotated[int, typer.Option(help="How many of the newest stay; the best stays too.")],
) -> None:
    """Delete the oldest checkpoints of a run, and files of interrupted saves older than an hour."""
    _announce_reading(path)
    from vpipe.checkpoint.inspection import prune_run

    for deleted in prune_run(path, keep):
        print(printable(f"deleted {deleted}"))


def _announce_reading(path: Path) -> None:
    announce(f"reading the checkpoints of {path}")  # torch is imported for it, which takes seconds


def show_one(described: dict[str, Any]) -> Table:
    table = Table(title=described["path"], show_header=False)
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    for key in ("updates", "saved", "evaluation_loss", "optimizer"):
        if described[key] is not None:
            table.add_row(key.replace("_", " "), str(described[key]))
    for part in ("layout", "extra"):
        for key, value in described[part].items():
            if key != "evaluation_loss":
                table.add_row(key.replace("_", " "), str(value))
    for name, entry in described["files"].items():
        table.add_row(name, f"{entry['tensors']} tensors, {show_bytes(entry['bytes'])}")
    table.add_row("total", show_bytes(described["bytes"]))
    return table


def show_several(described: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("checkpoint", "updates", "saved", "stages", "size", "evaluation loss"):
        table.add_column(name, justify="left" if name in ("checkpoint", "saved") else "right")
    for one in described:
        loss = one["evaluation_loss"]
        table.add_row(
            Path(one["path"]).name,
            str(one["updates"]),
            one["saved"],
            str(len(one["files"])),
            show_bytes(one["bytes"]),
            "" if loss is None else f"{loss:.4f}",
        )
    return table
