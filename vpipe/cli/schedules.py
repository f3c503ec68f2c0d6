"""The commands about schedules and models: `vpipe schedule`, `blocks`, `verify`."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vpipe.cli.options import AsJson, Config, Settings, print_result, read_run, schedule_names
from vpipe.errors import ScheduleError, printable
from vpipe.schedule import KINDS
from vpipe.system.console import announce, progress

if TYPE_CHECKING:
    from vpipe.config import RunConfig
    from vpipe.verify import Verification

app = typer.Typer()


@app.command()
def schedule(
    name: Annotated[
        str | None, typer.Argument(help=f"{', '.join(KINDS)}, or a CSV file.", autocompletion=schedule_names)
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Pipeline positions: ranks, where there are no replicas.")
    ] = None,
    minibatches: Annotated[int | None, typer.Option(help="Minibatches to run.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages on each rank (interleaved).")] = None,
    replicas: Annotated[str | None, typer.Option(help="Ranks of each position, such as 2,1.")] = None,
    update_interval: Annotated[
        int | None, typer.Option(help="Minibatches of an update (asynchronous ones).")
    ] = None,
    depth: Annotated[
        str | None, typer.Option(help="Forwards of each stage ahead of its first backward, such as 6,4,2,0.")
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
    from vpipe.schedule.facts import finite, show_bubble
    from vpipe.system.files import json_text, read_text, write_text

    if name is not None and name.endswith(".csv") and source is None:
        source, name = Path(name), None
    if source is not None:
        if name is not None:
            raise ScheduleError(
                f"give either a schedule's name or --from, not both: {name!r}, {str(source)!r}"
            )
        plan = read_table(read_text(source), source.name)
    elif name is None or stages is None or minibatches is None:
        raise ScheduleError("give NAME, --stages and --minibatches, or --from FILE")
    else:
        plan = build(
            name,
            stages,
            minibatches,
            chunks=chunks,
            replicas=read_counts("--replicas", replicas, "2,1 for two ranks, then one"),
            update_interval=update_interval,
            depth=read_counts("--depth", depth, "2,0 for two forwards ahead, then none"),
        )
    check(finite(plan))
    if csv is not None:
        write_text(csv, write_table(lower(plan) if communication and not plan.lowered else plan))
    if svg is not None:
        write_text(svg, draw_svg(plan))
    facts = describe(plan, communication)
    if as_json:
        print(json_text(facts, ascii=True))
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
    run = read_run(config, settings)
    announce(f"{config}: capturing the model")
    described = describe_blocks(run)
    print_result(described, block_table(described), as_json)


@app.command()
def verify(
    config: Config,
    settings: Settings = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Another schedule than the file's: a name, or a CSV file.", autocompletion=schedule_names
        ),
    ] = None,
    updates: Annotated[
        int | None, typer.Option(help="Updates to train; default: 5, more where weights are stale.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float64 or float32; default: float64, unless the model does not run in it."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: the GPU if there is one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train some updates with and without the pipeline and compare losses, gradients and weights.

    Exits with 1 if they differ by more than rounding explains.
    """
    if schedule is not None and schedule.endswith(".csv"):
        # A path on the command line is relative to the working directory, one in the file to the file.
        schedule = str(Path(schedule).absolute())
    run = read_run(config, settings, schedule)
    announce(f"{config}: training some updates with the pipeline, then without it")
    if run.compress != "none":
        announce("compress is not verified, which rounds on purpose: try its loss with `vpipe converge`")
    from vpipe.verify import verify_config  # torch comes with it

    with progress() as report:
        result = verify_config(run, updates=updates, dtype=dtype, device=device, report=report)
    if dtype is None and result.dtype != "float64":
        print(f"the model does not run in float64: it was verified in {result.dtype}", file=sys.stderr)
    print_result({**asdict(result), "ok": result.ok}, verification_table(result), as_json)
    if not as_json:
        print(printable(verdict(result)))
    if not result.ok:
        raise typer.Exit(1)


def read_counts(option: str, text: str | None, example: str) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise ScheduleError(f"{option} {text!r} is not a list of numbers: write {example}") from None


def describe_blocks(config: RunConfig) -> dict[str, Any]:
    """The blocks of the configured model, built on `meta`: it takes no memory."""
    from vpipe.graph import capture
    from vpipe.stage.precision import compute_dtype
    from vpipe.train.workload import build_workload

    model, loss_fn, make_batch = build_workload(config, "meta")
    dtype = compute_dtype(config.precision)
    graph = capture(model if dtype is None else model.to(dtype), make_batch(0), loss_fn)
    return {
        "model": type(model).__name__,
        "batch_size": config.batch_size,
        "sequence_length": None if config.data else config.sequence_length,
        "parameters": sum(info.shape.numel() for info in graph.parameters.values()),
        "blocks": [
            {
                "index": block.index,
                "name": block.name,
                "parameters": block.num_parameters,
                "flops": block.flops,
                "cut_bytes": block.cut_bytes,
            }
            for block in graph.blocks
        ],
    }


def block_table(described: dict[str, Any]) -> Table:
    found = described["blocks"]
    length = described["sequence_length"]
    minibatch = f"{described['batch_size']} " + ("samples" if length is None else f"x {length} tokens")
    table = Table(title=f"{described['model']}: {len(found)} blocks, minibatches of {minibatch}")
    table.add_column("block", justify="right")
    table.add_column("name", overflow="fold")
    for column in ("parameters", "flops", "bytes behind it"):
        table.add_column(column, justify="right")
    for block in found:
        numbers = (block["parameters"], block["flops"], block["cut_bytes"])
        table.add_row(str(block["index"]), block["name"], *(f"{number:,}" for number in numbers))
    table.caption = (
        f"{described['parameters']:,} parameters; one that several blocks use counts in each of them"
    )
    return table


def verification_table(result: Verification) -> Table:
    run = f"{result.updates} updates of {result.minibatches // result.updates} minibatches"
    title = f"schedule {result.schedule}, partition {list(result.partition)}, {result.ranks} ranks, {run}"
    table = Table(title=title)
    table.add_column("compared")
    table.add_column("largest relative difference", justify="right")
    table.add_column("where", overflow="fold")
    for what, difference in result.differences.items():
        wrong = not difference.largest <= result.bound
        number = f"{difference.largest:.1e}"
        table.add_row(what, Text(number, style="bold red") if wrong else number, difference.where)
    return table


def verdict(result: Verification) -> str:
    """One line: equal or not, and where the difference is largest."""
    bound = f"{result.bound:g} ({result.dtype})"
    wrong = {what: d for what, d in result.differences.items() if not d.largest <= result.bound}
    if not wrong:
        return f"equal: the pipeline trains as the plain model does, within {bound}"
    what, worst = max(wrong.items(), key=lambda item: item[1].largest)
    return f"DIFFERENT: {what} by {worst.largest:.1e} at {worst.where}, more than {bound}"
