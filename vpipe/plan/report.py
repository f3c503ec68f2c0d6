"""The output of `vpipe plan`: plain data, and a table of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table

from vpipe.cost import KEEP, POLICIES, RECOMPUTE, SWAP
from vpipe.plan.result import PlanResult, RankPlan, StagePlan
from vpipe.system.units import duration, show_bytes

HEADS = {RECOMPUTE: "recomputed", SWAP: "swapped"}


def describe(result: PlanResult) -> dict[str, Any]:
    """The plan as plain data; `recompute_ratio` is there only where the policies have its shape."""
    plan = result.to_plan()
    ratios = plan.ratios()
    return {
        "partition": list(plan.partition),
        **({} if ratios is None else {"recompute_ratio": ratios}),
        "policies": list(plan.policies),
        "schedule": plan.schedule,
        "replicas": list(plan.replicas),
        "minibatches": plan.minibatches,
        "chunks": plan.chunks,
        "update_interval": plan.update_interval,
        "depth": list(plan.depth) or None,
        "batch_size": plan.batch_size,
        "fingerprint": plan.fingerprint,
        "memory": result.cap,
        "prediction": plan.prediction,
        **({} if result.faster is None else {"faster": _other(result.faster)}),
        "placement": [list(ranks) for ranks in plan.placement] or None,
        "idle": plan.idle,
        **({"hosts": [host._asdict() for host in result.hosts]} if result.hosts else {}),
        "positions": [
            {
                "ranks": list(position.ranks),
                "stages": [stage.number for stage in position.stages],
                "blocks": [[stage.slice.start, stage.slice.stop] for stage in position.stages],
                "in_flight": [stage.slice.load.in_flight for stage in position.stages],
                "waiting": [stage.slice.load.waiting for stage in position.stages],
                "versions": [stage.slice.load.versions for stage in position.stages],
                "seconds": position.seconds,
                "time": position.time._asdict(),
                "peak_memory": position.memory.total,
                "memory": position.memory._asdict(),
                "limit": position.limit,
            }
            for position in result.positions
        ],
    }


def _other(faster: PlanResult) -> dict[str, Any]:
    return {
        "schedule": faster.schedule,
        "samples_per_s": faster.samples_per_second,
        "sample_factor": faster.sample_factor,
    }


def plan_table(result: PlanResult) -> Table:
    table = Table(title=headline(result), title_justify="left", caption_justify="left")
    others = [name for name in POLICIES if name != KEEP]
    table.add_column("stage", justify="right")
    table.add_column("ranks", justify="right")
    table.add_column("blocks")
    table.add_column("time", justify="right")
    table.add_column(f"memory of {show_bytes(result.cap)}", justify="right")
    for policy in others:
        table.add_column(HEADS.get(policy, policy), overflow="fold")
    table.add_column("limited by")
    slowest = max(position.seconds for position in result.positions)
    for position in result.positions:
        table.add_row(
            ", ".join(str(stage.number) for stage in position.stages),
            runs(position.ranks),
            ", ".join(_blocks(stage) for stage in position.stages),
            duration(position.seconds) + (" *" if position.seconds == slowest else ""),
            f"{show_bytes(position.memory.total)} ({position.memory.total / result.cap:.0%})",
            *(runs(_with_policy(position, policy)) or "-" for policy in others),
            position.limit,
        )
    table.caption = "* the slowest; times are of one minibatch, replicas taking turns"
    if result.depth:
        table.caption += f"; depth {', '.join(map(str, result.depth))}"
    if result.idle:
        last = result.ranks + result.idle - 1
        named = f"rank {last} is" if result.idle == 1 else f"ranks {result.ranks} to {last} are"
        table.caption += f"; {named} idle: no plan that was found for {last + 1} ranks is as fast"
    if result.turns is not None:
        table.caption += f"; {result.turns}"
    if result.gap is not None:
        table.caption += f"; the search was cut short: no plan can be faster by more than {result.gap:.1%}"
    if (line := about_loss(result)) is not None:
        table.caption += f"\n{line}"
    return table


def hosts_table(result: PlanResult, names: Sequence[str] = ()) -> Table:
    """Which host runs which stages, and what its network card carries."""
    table = Table(title="Hosts", title_justify="left", caption_justify="left")
    table.add_column("host")
    table.add_column("ranks", justify="right")
    table.add_column("stages", overflow="fold")
    for column in ("sent", "received", "gradients sent", "card busy"):
        table.add_column(column, justify="right")
    for number, host in enumerate(result.hosts):
        share = host.seconds / result.seconds if result.seconds else 0.0
        table.add_row(
            names[number] if number < len(names) else str(number),
            runs(host.ranks),
            ", ".join(_stages_on(result, host.ranks)),
            show_bytes(host.sent),
            show_bytes(host.received),
            show_bytes(host.reduced),
            f"{duration(host.seconds)} ({share:.0%})",
        )
    table.caption = (
        "to and from other hosts: messages of a minibatch; gradients that replicas add up, an update"
    )
    return table


def _stages_on(result: PlanResult, ranks: Sequence[int]) -> Iterator[str]:
    """With how many of their replicas, if not all."""
    for position in result.positions:
        own = len(set(position.ranks) & set(ranks))
        if own:
            part = "" if own == len(position.ranks) else f" ({own} of {len(position.ranks)} replicas)"
            yield ", ".join(str(stage.number) for stage in position.stages) + part


def about_loss(result: PlanResult) -> str | None:
    """A line about what stale weights cost in samples, if that has been weighed."""
    faster = result.faster
    if faster is not None:
        return (
            f"{_ahead(result)} reaches a loss before {faster.schedule}, which has {faster.samples_per_second:.4g} "
            f"samples/s but needs {faster.sample_factor:.2f} times as many samples to equal loss: as with "
            f"{faster.samples_per_second / faster.sample_factor:.4g} samples/s (docs/convergence.md; `vpipe plan --by "
            "samples` ignores it)"
        )
    if result.sample_factor > 1:
        return (
            f"stale weights need {result.sample_factor:.2f} times as many samples to equal loss, which is weighed in "
            "(docs/convergence.md)"
        )
    return None


def _ahead(result: PlanResult) -> str:
    kind = "synchronous " if result.synchronous else ""
    return f"{kind}{result.schedule} with {result.samples_per_second / result.sample_factor:.4g} samples/s"


def headline(result: PlanResult) -> str:
    ranks = "1 rank" if result.ranks == 1 else f"{result.ranks} ranks"
    update = f", {result.minibatches} an update" if result.synchronous else ""
    return (
        f"{result.schedule} on {ranks}, minibatches of {result.batch_size}{update}: "
        f"{result.samples_per_second:.4g} samples/s expected"
    )


def runs(numbers: Iterable[int]) -> str:
    """'3-7, 9' for 3, 4, 5, 6, 7, 9."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _blocks(stage: StagePlan) -> str:
    first, last = stage.slice.start, stage.slice.stop - 1
    return f"{runs(range(first, last + 1))} ({last - first + 1})"


def _with_policy(position: RankPlan, policy: str) -> list[int]:
    return [
        number
        for stage in position.stages
        for number, chosen in enumerate(stage.policies, stage.slice.start)
        if chosen == policy
    ]
