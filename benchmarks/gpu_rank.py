"""One of the four ranks of `benchmarks/gpu.py`: the parts of the benchmark, one after the other."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import torch
from gpu_bench import Bench, Case, Settings, with_sizes
from gpu_graphs import graphs
from gpu_largest import largest
from gpu_peers import peers
from gpu_settings import CAP, RANKS, ROOMS, even_stages, find_cap, hand_made

from vpipe.communication import InProcessHub, ProcessWorld
from vpipe.cost import Profile, as_scheduled, for_batch_size
from vpipe.cost.plan_file import recomputed_from_end
from vpipe.errors import VPipeError
from vpipe.graph.partition import partition_for_ranks
from vpipe.plan import plan
from vpipe.plan.result import PlanResult
from vpipe.schedule import kind_of

COMPILED = ("vpipe", "1f1b", "zb-v")
"""The asynchronous one, the plainest, and one that splits backward: to compile takes half a minute each time."""
SYNCHRONOUS = ("1f1b", "interleaved", "zb-h1", "zb-v", "gpipe")


def main() -> None:
    settings = with_sizes(Settings(**json.loads(sys.argv[1])))
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    if settings.device != "cpu":
        torch.cuda.set_device(settings.device)
    world = ProcessWorld(timeout=300)
    bench = Bench(world, settings)
    if world.rank == 0:
        Path(settings.json).unlink(missing_ok=True)
    limited = {"schedules", "compiled"} & set(settings.parts)
    limits = find_limits(bench) if limited else {}
    if settings.parts == ["targets"]:
        targets(bench)
        return
    profile = bench.profile(settings.batch, compiled=settings.compile)
    for part in settings.parts:
        PARTS[part](bench, profile, limits)


def find_limits(bench: Bench) -> dict[str, float]:
    """Samples a second of four ranks that each train the whole model alone, updates as they are made."""
    found: dict[str, float] = {}
    for kind, count in (("step", 8), ("minibatch", 1)):
        case = Case("limit", "1f1b", bench.batch, count)
        alone = 0.0
        if bench.world.rank == 0:
            alone = bench.pace(case, InProcessHub(1).join(0)).rate
        bench.world.all_gather("alone", None)
        together = bench.pace(case, InProcessHub(1).join(0), meet=True).rate
        rates = bench.world.all_gather("together", together)
        found[kind] = RANKS * bench.world.all_gather("alone", alone)[0]
        found[f"{kind}, together"] = sum(rates)
        row = {"minibatches": count, "batch": bench.batch, "samples_per_s": found[kind], "of_limit": 1.0}
        name = f"limit, one update a {kind}"
        bench.tell(case=f"{name}: four times one rank alone", **row)
        row |= {"samples_per_s": sum(rates), "of_limit": sum(rates) / found[kind]}
        bench.tell(case=f"{name}: four ranks at once, each a whole model", **row)
    return found


def balanced(profile: Profile, case: Case) -> tuple[int, ...]:
    """Cuts that let the busiest rank take as little time as possible, by the profile, updates included."""
    name, per_update = case.schedule, case.minibatches or 1
    kind = kind_of(name)
    schedule = kind.build(RANKS, per_update if kind.synchronous else None, chunks=case.chunks)
    blocks = as_scheduled(profile, kind.splits_backward, per_update).blocks
    times = [block.forward + block.backward + block.update / per_update for block in blocks]
    return partition_for_ranks([round(1e9 * seconds) for seconds in times], schedule.placement)


def every_schedule(bench: Bench, compiled: bool = False) -> list[Case]:
    """Asynchronous ones, then synchronous ones with each number of minibatches; gpipe, which keeps most, last."""
    cases = [Case("vpipe", "vpipe", bench.batch), Case("2bw", "2bw", bench.batch, 8)]
    for count in bench.settings.minibatches:
        cases += [
            Case(name, name, bench.batch, count, chunks=2 if name == "interleaved" else None)
            for name in SYNCHRONOUS
        ]
    return [
        case._replace(name=f"{case.name}, compiled", compile=True) if compiled else case for case in cases
    ]


def run_schedules(bench: Bench, profile: Profile, limits: dict[str, float], cases: list[Case]) -> None:
    for case in cases:
        if not bench.in_time():
            return
        case = case._replace(partition=balanced(profile, case))
        needed = sum(bench.prediction(case, profile)["predicted_bytes"])
        if bench.total and needed > bench.total:
            bench.tell(
                case=case.name,
                minibatches=case.minibatches,
                batch=case.batch,
                error=f"{needed / 2**30:.0f} GiB predicted: not tried",
            )
        else:
            bench.run(case, profile, limits)


def schedules(bench: Bench, profile: Profile, limits: dict[str, float]) -> None:
    run_schedules(bench, profile, limits, every_schedule(bench))
    made = plan(profile, RANKS, None, "vpipe")
    if bench.in_time():
        bench.run(planned(made, "vpipe, as planned", bench.batch), profile, limits)


def compiled(bench: Bench, profile: Profile, limits: dict[str, float]) -> None:
    """Some schedules with compiled blocks, their fewest minibatches only; the limit is the plain model's."""
    first = bench.settings.minibatches[:1]
    cases = [
        case
        for case in every_schedule(bench, compiled=True)
        if case.schedule in COMPILED and case.minibatches in (None, *first)
    ]
    run_schedules(bench, bench.profile(bench.batch, compiled=True), limits, cases)


def predictions(bench: Bench, profile: Profile, limits: dict[str, float]) -> None:
    """Schedules, and under a cap for minibatches of half the size the guides' settings and our plan, from one profile.

    The cap is a little less than PipeDream's setting is predicted to need.
    """
    size, count, even = bench.batch, bench.settings.minibatches[0], even_stages(bench.blocks)
    half, everything = size // 2, ("recompute",) * bench.blocks

    def own(case: Case) -> Profile:
        return profile if case.batch == size else for_batch_size(profile, case.batch)

    def run(*cases: Case) -> list[float | None]:
        chosen = (case._replace(compile=bench.settings.compile) for case in cases)
        return [bench.run(case, own(case), limits) if bench.in_time() else None for case in chosen]

    def balance(*cases: Case) -> list[Case]:
        return [case._replace(partition=balanced(profile, case)) for case in cases]

    run(*balance(Case("1f1b", "1f1b", size, count)))
    whole = Case("PipeDream's setting", "pipedream", half, partition=even)
    cap = int(CAP * max(bench.prediction(whole, own(whole))["predicted_bytes"]))
    room, found = ROOMS[1], []
    for each in (half, size):
        with suppress(VPipeError):  # it does not fit
            found.append(plan(profile, RANKS, int(room * cap), "vpipe", batch_size=each))
    made = max(found, key=lambda each: each.samples_per_second)
    quarter = max(1, half // 2)
    accumulated = 16 if bench.settings.quick else 32
    ours, pipedream, gpipe = run(
        planned(made, f"our plan for {room:.0%} of the cap", made.batch_size, cap),
        Case("PipeDream's setting, half the batch", "pipedream", quarter, partition=even, cap=cap),
        Case("GPipe's setting", "gpipe", half, accumulated, even, everything, cap),
    )
    if ours:
        settings = {"gpipe": gpipe, "pipedream": pipedream}
        ratios = {name: ours / rate for name, rate in settings.items() if rate}
        bench.tell(case="our plan against the settings", ratios=ratios)
    run(*balance(Case("zb-v", "zb-v", size, count)))
    run(Case("PipeDream's setting", "pipedream", size, partition=even))
    run(*balance(Case("vpipe", "vpipe", size), Case("zb-h1", "zb-h1", size, count)))
    run(Case("gpipe, all recomputed", "gpipe", size, count, even, everything))


def targets(bench: Bench) -> None:
    """Four ranks for `gpu_targets.py`: the default partition, no profile."""
    count = bench.settings.minibatches[0]
    for name in bench.settings.schedules:
        minibatches = None if name in ("vpipe", "pipedream") else count
        case = Case(name, name, bench.batch, minibatches, compile=bench.settings.compile)
        bench.run(case, None, {})


def planned(made: PlanResult, name: str, batch: int, cap: int | None = None) -> Case:
    return Case(name, "vpipe", batch, None, made.partition, made.policies, cap, replicas=made.replicas)


def run_plans(
    bench: Bench,
    profile: Profile,
    limits: dict[str, float],
    batch: int,
    cap: int,
    known: float | None,
) -> float | None:
    """Our plan for ever less of the cap, until it has room for the gaps that the allocator leaves."""
    for room in ROOMS:
        try:
            made = plan(profile, RANKS, int(room * cap), "vpipe")
        except VPipeError as error:
            bench.tell(case=f"our plan, batch {batch}", error=str(error).splitlines()[0][:100])
            return None
        case = planned(made, f"our plan for {room:.0%} of the cap", batch, cap)
        if known and bench.prediction(case, profile)["predicted"] < known:
            return None
        if not bench.in_time():
            return None
        rate = bench.run(case, profile, limits)
        if rate is not None:
            return rate
    return None


def guides(bench: Bench, profile: Profile, limits: dict[str, float]) -> None:
    """The guides' table under one cap, and plans of our own for it."""
    size, even, hand = bench.batch, even_stages(bench.blocks), hand_made(bench.blocks)
    cap = find_cap(bench, profile, limits)
    some = recomputed_from_end(hand, (0.3, 0.0, 0.0, 0.0))
    best = None
    for scale in (1, 2):
        if not bench.in_time():
            break
        wider = profile if scale == 1 else bench.profile(size * scale)
        rate = run_plans(bench, wider, limits, size * scale, cap, best)
        best = max(filter(None, (best, rate)), default=None)
    settings = {
        "pipedream": Case(
            "PipeDream's setting, half the batch", "pipedream", size // 2, partition=even, cap=cap
        ),
        "gpipe": Case("GPipe's setting", "gpipe", size, 32, even, ("recompute",) * bench.blocks, cap),
        "vpipe": Case("VPipe's setting", "vpipe", size, None, hand, some, cap),
    }
    half = bench.profile(size // 2)
    rates = {
        name: bench.run(case, half if case.batch < size else profile, limits)
        for name, case in settings.items()
        if bench.in_time()
    }
    if best:
        ratios = {name: best / rate for name, rate in rates.items() if rate}
        bench.tell(case="our plan against the settings", ratios=ratios)
    if bench.in_time():
        whole = Case("PipeDream's setting, whole batch", "pipedream", size, partition=even, cap=cap)
        bench.run(whole, profile, limits)


PARTS = {
    "schedules": schedules,
    "predictions": predictions,
    "compiled": compiled,
    "guides": guides,
    "largest": largest,
    "graphs": graphs,
    "peers": peers,
}

if __name__ == "__main__":
    main()
