"""The commands about schedules and models: `vpipe schedule`, `blocks`, `verify`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from vpipe.cli.options import AsJson, Config, Settings, read_run
from vpipe.errors import ScheduleError
from vpipe.schedule import KINDS
from vpipe.system.console import show

app = typer.Typer()


@app.command()
def schedule(
    name: Annotated[str | None, typer.Argument(help=f"{', '.join(KINDS)}.")] = None,
    stages: Annotated[
        int | None, typer.Option(help="Pipeline positions: ranks, where there are no replicas.")
    ] = None,
    minibatches: Annotated[int | None, typer.Option(help="Minibatches to run.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages on each rank (interleaved).")] = None,
    replicas: Annotated[str | None, typer.Option(help="Ranks of each position, such as 2,1.")] = None,
    update_interval: Annotated[
        int | None, typer.Option(help="Minibatches of an update (asynchronous ones).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts and programs as JSON.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the programs to this file, one row a rank.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Read the programs from this CSV file.")
    ] = None,
    communication: Annotated[bool, typer.Option(help="Show sends, receives and reductions too.")] = False,
) -> None:
    """Draw a schedule, and tell its bubble, its minibatches in flight and its weight versions."""
    from vpipe.schedule import build, check, describe, draw, draw_svg, lower, read_table, write_table
    from vpipe.schedule.facts import show_bubble
    from vpipe.system.files import read_text, write_text

    if source is not None:
        if name is not None:
            raise ScheduleError(
                f"give either a schedule's name or --from, not both: {name!r}, {str(source)!r}"
            )
        plan = read_table(read_text(source), source.name)
    elif name is None or stages is None or minibatches is None:
        raise ScheduleError("give NAME, --stages and --minibatches, or --from FILE")
    else:
        counts = None if replicas is None else read_counts(replicas)
        plan = build(
            name, stages, minibatches, chunks=chunks, replicas=counts, update_interval=update_interval
        )
    check(plan)
    if csv is not None:
        write_text(csv, write_table(lower(plan) if communication and not plan.lowered else plan))
    if svg is not None:
        write_text(svg, draw_svg(plan))
    facts = describe(plan, communication)
    if as_json:
        print(json.dumps(facts))
        return
    print(draw(plan, width=shutil.get_terminal_size((120, 24)).columns))
    print(f"\n{show_bubble(plan)}")
    for key in ("in_flight", "versions", "staleness"):
        print(f"{key.replace('_', ' ')} {facts[key]}")


@app.command()
def blocks(
    config: Config,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """List a model's blocks: name, parameters, and the bytes that cross the cut behind each."""
    from vpipe.cli.tables import block_table, describe_blocks

    described = describe_blocks(read_run(config, settings))
    if as_json:
        print(json.dumps(described))
    else:
        show(block_table(described))


@app.command()
def verify(
    config: Config,
    settings: Settings = None,
    schedule: Annotated[
        str | None, typer.Option(help="Another schedule than the file's: a name, or a CSV file.")
    ] = None,
    updates: Annotated[
        int | None, typer.Option(help="Updates to train; 5, and some more where weights are stale.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; if not given, the GPU where there is one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train some updates with and without the pipeline and compare losses, gradients and weights.

    Exits with 1 if they differ by more than rounding explains.
    """
    from vpipe.cli.tables import describe_verification, verdict, verification_table
    from vpipe.verify import verify_config

    run = read_run(config, settings)
    if schedule is not None:
        # A path on the command line is relative to where we stand, one in the file to the file.
        table = schedule.endswith(".csv")
        run = run.with_schedule(str(Path(schedule).absolute()) if table else schedule)
    result = verify_config(run, updates=updates, dtype=dtype, device=device)
    if as_json:
        print(json.dumps(describe_verification(result)))
    else:
        show(verification_table(result))
        print(verdict(result))
    if not result.ok:
        raise typer.Exit(1)


def read_counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ScheduleError(
            f"--replicas {text!r} is not a list of numbers: write 2,1 for two ranks, then one"
        ) from None
