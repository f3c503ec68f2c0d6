"""The commands that train, and those that look at runs and at this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from vpipe.cli.options import AsJson, Config, Settings, read_run, warn_of_links
from vpipe.errors import VPipeError, printable
from vpipe.system.best_effort import survive_lost_output
from vpipe.system.console import announce
from vpipe.system.start import collector_off

app = typer.Typer()

RESUME = typer.Option(help="auto: the newest checkpoint; or the folder of a run or checkpoint.")
SLURM: Any = {"rich_help_panel": "SLURM"}
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run, running or over.")]


@app.command()
def train(
    config: Config,
    settings: Settings = None,
    resume: Annotated[str | None, RESUME] = None,
    debug: Annotated[
        list[str] | None,
        typer.Option(
            help="tensors, versions or schedule: log each of them in the ranks' logs. May be given again."
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts from the newest checkpoint after a fault.")
    ] = 0,
    print_config: Annotated[bool, typer.Option(help="Print every key with its value and exit.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show how long each phase took until the first update.")
    ] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit the run to SLURM, which starts the ranks.", **SLURM)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script for sbatch and exit.", **SLURM)
    ] = False,
    partition: Annotated[str | None, typer.Option(help="Partition of the cluster.", **SLURM)] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 12:00:00.", **SLURM)] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.", **SLURM)] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each node, one for each rank.", **SLURM)
    ] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="Cores of each rank.", **SLURM)] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="Another option of sbatch, such as account=physics. May be given again.", **SLURM),
    ] = None,
) -> None:
    """Train a model. Starts the ranks that the file names; under torchrun or srun, this process is one of them."""
    from vpipe.config.file import resolved_yaml
    from vpipe.config.settings import rank_arguments
    from vpipe.launch.sbatch import Resources
    from vpipe.observe.debug import read_scenes
    from vpipe.train.run import run, submit_run

    def work() -> None:
        with collector_off(keep=True):
            from vpipe.train.rank import train_rank  # with torch: for a rank, not for the launcher

        train_rank(chosen, resume, scenes, verbose=verbose)

    chosen = read_run(config, settings)

    if print_config:
        print(resolved_yaml(chosen), end="")
        return
    survive_lost_output()
    scenes = read_scenes(debug or ())
    arguments = ["train", *rank_arguments(config, settings or ())]
    arguments += [part for scene in scenes for part in ("--debug", scene)]
    arguments += ["--verbose"] if verbose else []
    if resume is not None:
        arguments += ["--resume", _absolute(resume)]
    resources = Resources(partition, time, nodes, gpus_per_node, cpus_per_task, tuple(sbatch or ()))
    if slurm:
        if "RANK" in os.environ:
            raise VPipeError(
                "--slurm is given to a rank, and each would submit a job: start `vpipe train --slurm` without torchrun"
            )
        submit_run(chosen, arguments, resources, max_restarts=max_restarts, dry_run=dry_run)
        return
    if dry_run or resources != Resources():
        raise VPipeError(
            "the options of SLURM (--dry-run, --nodes and so on) are for --slurm: give it, or none of them"
        )
    run(chosen, arguments, work, max_restarts=max_restarts)


@app.command()
def converge(
    config: Config,
    settings: Settings = None,
    schedules: Annotated[
        str,
        typer.Option(
            help="Schedules to train with, with the minibatches of an update behind a colon: 1f1b:8,2bw:8,vpipe."
        ),
    ] = "1f1b,vpipe",
    stages: Annotated[
        int | None, typer.Option(min=1, help="Stages, instead of the file's partition and machines.")
    ] = None,
    optimizers: Annotated[str | None, typer.Option(help="Optimizers to compare: adamw,muon.")] = None,
    staleness: Annotated[
        str | None,
        typer.Option(
            help="Remedies to compare, for stale schedules: none,predict,predict+split_tied,predict+async_after:100."
        ),
    ] = None,
    rates: Annotated[str | None, typer.Option(help="Learning rates to compare: 3e-4,1e-3.")] = None,
    updates: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Updates of the run with the largest ones, in as many epochs as they take; others see equal samples. "
            "Default: 300, within the file's epochs.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, from the seed of the file on.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time, each in a process.")] = 1,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda:0; by default a GPU if there is one.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A profile: the loss is then also shown against predicted time.")
    ] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Where the picture goes (PNG).")] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where the figures go, for `vpipe plan --convergence`."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the losses of schedules, optimizers and remedies, in one process: exact delays, any number of stages."""
    from vpipe.cli.convergence import converge as run_all

    run_all(
        config,
        settings or (),
        schedules=schedules,
        stages=stages,
        optimizers=optimizers,
        staleness=staleness,
        rates=rates,
        updates=updates,
        seeds=seeds,
        jobs=jobs,
        device=device,
        profile=profile,
        picture=picture,
        output=output,
        as_json=as_json,
    )


@app.command("eval")
def evaluate(
    config: Config,
    settings: Settings = None,
    resume: Annotated[str, RESUME] = "auto",
    as_json: AsJson = False,
) -> None:
    """Print the loss of a trained model on the validation samples."""
    from vpipe.config.settings import rank_arguments
    from vpipe.train.run import run

    def work() -> None:
        from vpipe.train.rank import evaluate_rank  # with torch: for a rank, not for the launcher

        evaluate_rank(chosen, resume, as_json)

    chosen = read_run(config, settings)
    arguments = ["eval", *rank_arguments(config, settings or ()), "--resume", _absolute(resume)]
    arguments += ["--json"] if as_json else []
    run(chosen, arguments, work)


@app.command()
def compare(
    configs: Annotated[
        list[Path], typer.Argument(help="The runs' YAML files; or folders of runs that are over.")
    ],
    settings: Settings = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="A key with several values, such as batch_size=8,16,32.")
    ] = None,
    turns: Annotated[
        int, typer.Option(min=1, help="Times that each is run, all of them in turns: a b a b.")
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture (PNG) of speed and loss to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run several configurations one after the other on the same data, and compare speed and loss."""
    from vpipe.cli.compare import compare_runs

    compare_runs(configs, settings or [], sweep or [], plot, as_json, turns)


@app.command()
def doctor(
    machines: Annotated[
        Path | None,
        typer.Option(
            help="A run's YAML file: examine the hosts that its `machines` names, and the links between."
        ),
    ] = None,
    settings: Settings = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="With --machines: where the measured links go.")
    ] = Path("links.json"),
    as_json: AsJson = False,
) -> None:
    """Show what this machine has, what would not work on it, and why; or the same of all hosts of a run."""
    if machines is not None:
        from vpipe.cli.doctor_hosts import examine_hosts

        if not examine_hosts(read_run(machines, settings), machines, output, as_json):
            raise typer.Exit(1)
        return
    from vpipe.cli.doctor import print_facts

    announce("examining this machine")
    print_facts(as_json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="The folders of one or more runs.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Where the report goes; default: into the run's folder, or beside it."
        ),
    ] = None,
) -> None:
    """Write one HTML file that shows runs: timeline, waiting, memory, curves; several side by side."""
    from vpipe.observe.report import only_runs, report_path, write_report

    runs = only_runs(runs)
    announce(f"reading {', '.join(map(str, runs))}")

    for run in runs:
        warn_of_links(run)
    output = output or report_path(runs)
    write_report(runs, output)
    print(printable(f"report {output}"))


@app.command()
def top(
    run: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="Show it once and exit.")] = False,
) -> None:
    """Show what each stage of a run is doing: computing, waiting, sending, memory; refreshed while it runs."""
    from vpipe.observe.screen import top as show_run

    warn_of_links(run)
    show_run(run, once=once)


@app.command()
def diagnose(
    run: RunFolder,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong with a run, with figures: hangs, deaths, memory, loss, throughput, communication, versions."""
    announce(f"reading {run}")
    from vpipe.observe.diagnosis import diagnose_command

    warn_of_links(run)
    diagnose_command(run, as_json)


def _absolute(resume: str) -> str:
    return resume if resume == "auto" else str(Path(resume).absolute())
