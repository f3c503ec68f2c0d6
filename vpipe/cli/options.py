"""Arguments that several commands have, and the run that they describe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from vpipe import __version__
from vpipe.schedule import KINDS
from vpipe.system.console import show, warn
from vpipe.system.files import json_text, link_mistake

if TYPE_CHECKING:
    from vpipe.config import RunConfig

Config = Annotated[Path, typer.Argument(help="A run's YAML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A key of the file with another value, such as batch_size=16."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


def schedule_names(typed: str) -> list[str]:
    """For the completion of shells; where none fits, the shell offers files."""
    return [name for name in KINDS if name.startswith(typed)]


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"vpipe {__version__}")
        raise typer.Exit


def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """The options of `vpipe` itself."""


def print_result(value: Any, table: Table, as_json: bool) -> None:
    if as_json:
        print(json_text(value, ascii=True))
    else:
        show(table)


def warn_of_links(run: Path) -> None:
    """Every command that is given a run says which of its checkpoints are symbolic links."""
    folder = run / "checkpoints"
    with suppress(OSError):
        for path in sorted(folder.glob("step-*")):
            if os.path.islink(path):
                warn(link_mistake(path))


def read_run(config: Path, settings: Sequence[str] | None, schedule: str | None = None) -> RunConfig:
    """The file's keys, those of `--set` in place of its own, under its schedule or another one."""
    from vpipe.config.file import read_config
    from vpipe.config.settings import read_settings

    return read_config(config, read_settings(settings or ()), schedule)
