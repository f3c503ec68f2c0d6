"""The commands that look at runs: `vpipe report`, `top`, `diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vpipe.cli.options import AsJson

app = typer.Typer()


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="The folders of one or more runs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the report goes.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML file that shows runs: timeline, waiting, memory, curves; several side by side."""
    from vpipe.observe.report import write_report

    write_report(runs, output)
    print(f"report {output}")


@app.command()
def top(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    once: Annotated[bool, typer.Option("--once", help="Show it once, and stop.")] = False,
) -> None:
    """Show what each stage of a run is doing: computing, waiting, sending, memory; refreshed while it runs."""
    from vpipe.observe.screen import top as show_run

    show_run(run, once=once)


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="The folder of a run, running or over.")],
    as_json: AsJson = False,
) -> None:
    """Tell what is wrong with a run, with figures: hangs, deaths, memory, loss, throughput, communication, versions."""
    from vpipe.observe.diagnosis import diagnose_command

    diagnose_command(run, as_json)
