"""The command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from vpipe import cli_checkpoint
from vpipe.errors import RankFailedError, ScheduleError, VPipeError

Config = Annotated[Path, typer.Argument(help="A run's YAML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A key of the file with another value, such as batch_size=16."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]

app = typer.Typer(
    help="Pipeline-parallel training for any PyTorch module, with every schedule as data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_checkpoint.app, name="checkpoint")


@app.callback()
def commands() -> None:
    pass


@app.command()
def schedule(
    name: Annotated[
        str | None, typer.Argument(help="gpipe, 1f1b, interleaved, zb-h1, zb-v, pipedream, 2bw, vpipe.")
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
    as_json: Annotated[bool, typer.Option("--json", help="Print facts and programs as JSON.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the programs to this file, one row a rank.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Read the programs from this CSV file.")
    ] = None,
    communication: Annotated[bool, typer.Option(help="Show sends, receives and reductions too.")] = False,
) -> None:
    """Draw a schedule, and tell its bubble, its minibatches in flight and its weight versions."""
    from vpipe.files import read_text, write_text
    from vpipe.schedule import build, check, describe, draw, draw_svg, lower, read_table, write_table

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
    print(f"\nbubble {facts['bubble']:.1%}")
    for key in ("in_flight", "versions", "staleness"):
        print(f"{key.replace('_', ' ')} {facts[key]}")


@app.command()
def blocks(
    config: Config,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """List a model's blocks: name, parameters, and the bytes that cross the cut behind each."""
    from vpipe.config_file import read_config
    from vpipe.settings import read_settings
    from vpipe.tables import block_table, describe_blocks, show

    described = describe_blocks(read_config(config, read_settings(settings or ())))
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
    from vpipe.config_file import read_config
    from vpipe.settings import read_settings
    from vpipe.tables import describe_verification, show, verdict, verification_table
    from vpipe.verify import verify_config

    run = read_config(config, read_settings(settings or ()))
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
    from vpipe.config_file import read_config, resolved_yaml
    from vpipe.launch import run
    from vpipe.observe.scenes import read_scenes
    from vpipe.settings import rank_arguments, read_settings

    chosen = read_config(config, read_settings(settings or ()))
    if print_config:
        print(resolved_yaml(chosen), end="")
        return

    scenes = read_scenes(debug or ())

    def work() -> None:
        from vpipe.commands import train_rank

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
    from vpipe.config_file import read_config
    from vpipe.launch import run
    from vpipe.settings import rank_arguments, read_settings

    chosen = read_config(config, read_settings(settings or ()))

    def work() -> None:
        from vpipe.commands import evaluate_rank

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
    from vpipe.commands import compare_runs

    compare_runs(configs, settings or [], sweep or [], plot, as_json)


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
    from vpipe.config_file import read_config
    from vpipe.profile.command import profile_command
    from vpipe.settings import read_settings

    profile_command(read_config(config, read_settings(settings or ())), output, as_json)


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
    from vpipe.config_file import read_config
    from vpipe.planning import plan_run, profile_cache
    from vpipe.settings import read_settings

    run = read_config(config, read_settings(settings or ()))
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
    from vpipe.observe.top import top as show_run

    show_run(run, once=once)


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="The folder of a run, running or over.")],
    as_json: AsJson = False,
) -> None:
    """Tell what is wrong with a run, with figures: hangs, deaths, memory, loss, throughput, communication, versions."""
    from vpipe.observe.diagnosis import diagnose_command

    diagnose_command(run, as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Tell what this machine has, what would not work on it, and why."""
    from vpipe.doctor import describe, doctor_table, examine
    from vpipe.tables import show

    findings = examine()
    if as_json:
        print(json.dumps(describe(findings)))
    else:
        show(doctor_table(findings))


def _absolute(resume: str) -> str:
    return resume if resume == "auto" else str(Path(resume).absolute())


def read_counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ScheduleError(
            f"--replicas {text!r} is not a list of numbers: write 2,1 for two ranks, then one"
        ) from None


def main() -> None:
    """Runs the command line; a user's mistake is one message and exit code 2, a rank's fault exit code 1."""
    try:
        sys.exit(app(prog_name="vpipe", standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        from vpipe.launch.rank import fail
        from vpipe.usage import tell_usage

        if (code := tell_usage(error)) is not None:
            sys.exit(code)
        if "RANK" in os.environ:
            fail(error)
        if not isinstance(error, VPipeError):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RankFailedError) else 2)
