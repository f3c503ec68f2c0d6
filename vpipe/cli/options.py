"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(help="A run's YAML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A key of the file with another value, such as batch_size=16."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
