"""The commands about costs before a run: `vpipe profile`, `plan`, `simulate`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vpipe.cli.options import AsJson, Config, Settings, print_result, read_run, schedule_names
from vpipe.errors import VPipeError, printable
from vpipe.schedule.kind import at_least_one
from vpipe.system.console import announce, show
from vpipe.system.files import check_place, read_text
from vpipe.system.units import duration, read_bandwidth, read_bytes, show_bytes

if TYPE_CHECKING:
    from vpipe.config import RunConfig
    from vpipe.cost import GivenHosts, Profile

app = typer.Typer()
LOSS, SAMPLES = "loss", "samples"
"""What `vpipe plan --schedule auto` weighs."""

Links = Annotated[
    Path | None, typer.Option(help="Hosts and their links: a file of `vpipe doctor --machines`.")
]
Hosts = Annotated[
    str | None, typer.Option(help="Instead: hosts x ranks of each, such as 2x4, with --network.")
]
NetworkCard = Annotated[
    str | None, typer.Option("--network", help="What each host's network card carries, such as 10Gbit/s.")
]


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
    from vpipe.cost import write_profile
    from vpipe.launch.rank import LAUNCHED
    from vpipe.train.profiling import measure_as_rank, profile_config

    chosen = read_run(config, settings)
    if LAUNCHED in os.environ:
        measure_as_rank(chosen, output)
        return
    check_place(output)
    measured = profile_config(chosen)
    write_profile(measured, output)
    if as_json:
        print(read_text(output))
    else:
        show(profile_table(measured))
        print(printable(f"profile {output}"))


@app.command()
def plan(
    config: Annotated[
        Path | None,
        typer.Argument(help="A run's YAML file; its model is profiled unless a profile is cached or given."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="A file of `vpipe profile`, or PipeDream's graph.txt; needs no YAML file."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks to plan for; default: the file's.")] = None,
    stages: Annotated[
        int | None,
        typer.Option(
            help="Stages of the pipeline; more ranks are replicas. Default: as many as are fastest."
        ),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a rank, such as 11GiB.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="A schedule's name, its table (.csv), or auto for the one that reaches a loss first.",
            autocompletion=schedule_names,
        ),
    ] = None,
    minibatches: Annotated[
        int | None, typer.Option(help="Minibatches of an update (synchronous ones).")
    ] = None,
    batch_size: Annotated[str | None, typer.Option(help="Samples of a minibatch, or auto.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages on each rank (interleaved).")] = None,
    machines: Annotated[
        bool, typer.Option("--machines", help="Place stages on the hosts that the file's `machines` names.")
    ] = False,
    links: Links = None,
    hosts: Hosts = None,
    network: NetworkCard = None,
    by: Annotated[
        str,
        typer.Option(
            help="What auto weighs: loss (time to equal loss, for which stale weights need more samples) or samples."
        ),
    ] = LOSS,
    convergence: Annotated[
        Path | None,
        typer.Option(
            help="A file of `vpipe converge --output`: how many more samples stale weights need here."
        ),
    ] = None,
    settings: Settings = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the plan goes.")] = Path("plan.json"),
    as_json: AsJson = False,
) -> None:
    """Choose partition, replicas and what is kept, recomputed or swapped, under a memory cap."""
    from vpipe.cost import (
        StaleTraining,
        named_or_table,
        read_any_profile,
        read_slowdowns,
        with_hosts,
        write_plan,
    )
    from vpipe.plan import plan as find_plan
    from vpipe.plan.report import describe, hosts_table, plan_table

    names: list[str] = []
    placed = _given_hosts(links, hosts, network)
    size = None if batch_size is None else _batch_size(batch_size)
    if by not in (LOSS, SAMPLES):
        raise VPipeError(f"--by is {by[:60]!r}: {LOSS} or {SAMPLES}")
    cap = None if memory is None else read_bytes(memory)
    for what, count in (("ranks", ranks), ("stages", stages)):
        if count is not None:
            at_least_one(what, count)
    check_place(output)
    measured = () if convergence is None else read_slowdowns(convergence)
    if config is None:
        if profile is not None and ranks is None and placed.ranks is not None:
            ranks = sum(map(len, placed.ranks))
        if profile is None or ranks is None:
            raise VPipeError("give a run's YAML file, or --profile and --ranks")
        if machines:
            raise VPipeError("--machines takes the hosts of a run's YAML file: give that, or --hosts 2x4")
        costs = with_hosts(read_any_profile(profile), placed)
        chosen = named_or_table(schedule or "vpipe", Path())
        announce(f"{profile}: searching for a plan")
        training = StaleTraining(measured=measured) if by == LOSS else None
        result = find_plan(costs, ranks, cap, chosen, minibatches, size, chunks, training, stages)
    else:
        from vpipe.train.planning import plan_run, stale_training

        run = read_run(config, settings)
        if machines:
            names, placed = _hosts_of_run(run, placed)
        if profile is not None and size is None:
            size = run.batch_size
        result = plan_run(
            run,
            None if profile is None else read_any_profile(profile),
            ranks=ranks,
            stages=stages,
            memory=memory,
            schedule=schedule,
            minibatches=minibatches,
            batch_size=size,
            chunks=chunks,
            hosts=placed,
            training=stale_training(run, measured) if by == LOSS else None,
        )
    write_plan(result.to_plan(), output)
    print_result(describe(result), plan_table(result), as_json)
    if not as_json:
        if result.hosts:
            show(hosts_table(result, names))
        print(printable(f"plan {output}"))


@app.command()
def simulate(
    profile: Annotated[Path, typer.Option(help="A file of `vpipe profile`, or PipeDream's graph.txt.")],
    plan: Annotated[Path, typer.Option(help="A file of `vpipe plan`, or a vpipe.json.")],
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Another schedule than the plan's: a name, or a CSV file.", autocompletion=schedule_names
        ),
    ] = None,
    minibatches: Annotated[int | None, typer.Option(help="Minibatches to run.")] = None,
    links: Links = None,
    hosts: Hosts = None,
    network: NetworkCard = None,
    compress: Annotated[
        str, typer.Option(help="What goes between hosts is compressed: bf16, int8 or int4.")
    ] = "none",
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline (Chrome trace) to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict time, waiting and memory of a step without running it."""
    from vpipe.cost import named_or_table, read_any_profile, read_plan, with_hosts
    from vpipe.cost.compression import with_mode
    from vpipe.simulate import simulate as run_simulation
    from vpipe.simulate.report import describe, simulation_table

    costs = with_hosts(read_any_profile(profile), _given_hosts(links, hosts, network))
    costs = with_mode(costs, compress)
    if minibatches is not None:
        at_least_one("minibatches", minibatches)
    planned = read_plan(plan)
    directory = Path() if schedule else plan.parent
    chosen = named_or_table(schedule or planned.schedule, directory)
    announce(f"{plan}: simulating it")
    result = run_simulation(costs, planned, chosen, minibatches, timeline=trace is not None)
    if trace is not None:
        from vpipe.observe.trace import write_simulated_trace

        write_simulated_trace(result, trace)
    print_result(describe(result), simulation_table(result, costs), as_json)


def _given_hosts(links: Path | None, hosts: str | None, network: str | None) -> GivenHosts:
    from vpipe.cost import GivenHosts

    card = None if network is None else read_bandwidth(network, "--network")
    if hosts is None:
        return GivenHosts(links, None, card)
    count, _, each = hosts.partition("x")
    if not all(number.isdecimal() and 0 < len(number) <= 4 and int(number) for number in (count, each)):
        raise VPipeError(f"--hosts is {hosts[:60]!r}: write hosts x ranks of each, such as 2x4")
    ranks = [tuple(range(host * int(each), (host + 1) * int(each))) for host in range(int(count))]
    return GivenHosts(links, tuple(ranks), card)


def _hosts_of_run(run: RunConfig, given: GivenHosts) -> tuple[list[str], GivenHosts]:
    """The names of the run's hosts; their ranks instead of others."""
    from vpipe.launch.hosts import hosts_of

    if run.machines is None or given.ranks is not None:
        raise VPipeError(
            f"{run.source}: --machines takes the hosts from `machines`: "
            + ("leave --hosts out" if given.ranks is not None else "write `machines: [host:GPU, ...]`")
        )
    hosts = hosts_of(run.machines)
    return [host.name for host in hosts], given._replace(ranks=tuple(host.ranks for host in hosts))


def _batch_size(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or len(text) > 9:
        raise VPipeError(f"batch size {text[:60]!r} is neither a whole number nor 'auto'")
    return int(text)


def profile_table(profile: Profile) -> Table:
    blocks = profile.blocks
    step = sum(block.forward + block.backward for block in blocks)
    title = (
        f"{len(blocks)} blocks, minibatches of {profile.batch_size}: {duration(step)} forward and backward"
    )
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("block", justify="right")
    table.add_column("name", overflow="fold")
    times = ("forward", "input gradient", "weight gradient", "update", "spread")
    for column in (*times, "kept", "boundary", "parameters"):
        table.add_column(column, justify="right")
    for index, block in enumerate(blocks):
        seconds = (block.forward, block.input_gradient, block.weight_gradient, block.update)
        sizes = (block.kept_bytes, block.boundary_bytes, block.parameter_bytes)
        figures = (*map(duration, seconds), f"{block.spread:.0%}", *map(show_bytes, sizes))
        table.add_row(str(index), block.name, *figures)
    device, link = profile.device, profile.link
    table.caption = (
        f"device {show_bytes(device.memory)}, to the host {show_bytes(device.to_host)}/s, "
        f"back {show_bytes(device.from_host)}/s; "
        f"link {show_bytes(link.bandwidth)}/s, {duration(link.latency)}; an action {duration(device.overhead)}; "
        f"{profile.optimizer or 'optimizer'} {profile.optimizer_ratio:g} bytes for each byte of parameters"
    )
    return table
