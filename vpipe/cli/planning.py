"""The commands that know before it runs: `vpipe profile`, `plan`, `simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vpipe.cli.options import AsJson, Config, Settings, read_run
from vpipe.errors import VPipeError

app = typer.Typer()


@app.command()
def profile(
    config: Config,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile goes.")] = Path(
        "profile.json"
    ),
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model's blocks, this machine's memory and its links, for `vpipe plan` and `vpipe simulate`."""
    from vpipe.profile.command import profile_command

    profile_command(read_run(config, settings), output, as_json)


@app.command()
def plan(
    config: Annotated[
        Path | None, typer.Argument(help="A run's YAML file: its model is profiled, unless it was before.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Instead: what `vpipe profile` wrote, or PipeDream's graph.txt.")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Ranks to plan for; default: the file's.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a rank, such as 11GiB.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="A schedule's name, or auto for the fastest that fits.")
    ] = None,
    minibatches: Annotated[
        int | None, typer.Option(help="Minibatches of an update (synchronous ones).")
    ] = None,
    batch_size: Annotated[str | None, typer.Option(help="Samples of a minibatch, or auto.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages on each rank (interleaved).")] = None,
    settings: Settings = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the plan goes.")] = Path("plan.json"),
    as_json: AsJson = False,
) -> None:
    """Choose partition, replicas and what is kept, recomputed or swapped, under a memory cap."""
    from vpipe.plan.command import plan_command, read_batch_size, tell_plan

    if config is None:
        if profile is None or stages is None:
            raise VPipeError("give a run's YAML file, or --profile and --stages")
        plan_command(
            profile, stages, memory, schedule or "vpipe", minibatches, batch_size, chunks, as_json, output
        )
        return
    if profile is not None:
        raise VPipeError(
            f"give either a run's YAML file or --profile, not both: {str(config)!r}, {str(profile)!r}"
        )
    from vpipe.planning import plan_run, profile_cache

    run = read_run(config, settings)
    result = plan_run(
        run,
        profile_cache(run),
        ranks=stages,
        memory=memory,
        schedule=schedule,
        minibatches=minibatches,
        batch_size=None if batch_size is None else read_batch_size(batch_size),
        chunks=chunks,
    )
    tell_plan(result, as_json, output)


@app.command()
def simulate(
    profile: Annotated[Path, typer.Option(help="What `vpipe profile` wrote, or PipeDream's graph.txt.")],
    plan: Annotated[Path, typer.Option(help="What `vpipe plan` wrote, or a vpipe.json.")],
    schedule: Annotated[str | None, typer.Option(help="Another schedule than the plan's.")] = None,
    minibatches: Annotated[int | None, typer.Option(help="Minibatches to run.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline (Chrome trace) to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell how long a step would take, who would wait, and what memory it would need, without running it."""
    from vpipe.simulate.command import simulate_command

    simulate_command(profile, plan, schedule, minibatches, as_json, trace)
