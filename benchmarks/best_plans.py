"""Plans of small problems beside every plan that there is, simulated one by one.

    python benchmarks/best_plans.py [--cases 20] [--seed 1] [--blocks 9] [--ranks 4] [--deepest 4] [--odd] [--short]
                                    [--hosts 2,2] [--schedules 1f1b,2bw]

Problems are drawn (`tests/every_plan.py`): uneven blocks, 1 to 32 minibatches, links from free to slower than compute.
Every partition with all replicas, every depth up to `--deepest` forwards ahead (of 2BW those that do not make updates
rarer than the plan's), and all of these on fewer ranks.
`--odd`: with giants among the blocks, and boundaries and weights that are huge or nothing.
`--short`: with less memory than keeping everything needs, which has every policy of every block to be tried.
`--hosts`: with so many ranks on each host, links between hosts up to 100 times slower, and every placement.
The columns: how many plans are the best or at most 0.1 % slower, how far the worst one is off, how many have a depth
of their own, and how many leave ranks idle.
"""

from __future__ import annotations

import argparse
import sys
from math import inf
from pathlib import Path
from random import Random

from vpipe.errors import VPipeError
from vpipe.plan import PlanResult, plan

sys.path.append(str(Path(__file__).parents[1]))

from tests.every_plan import SCHEDULES, Problem, best_seconds, drawn, on_hosts
from vpipe.schedule import kind_of


def planned(problem: Problem) -> PlanResult | None:
    try:
        return plan(problem.profile, problem.ranks, problem.cap, problem.schedule, problem.minibatches)
    except VPipeError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("cases", 20), ("seed", 1), ("blocks", 9), ("ranks", 4), ("deepest", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--odd", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--hosts", default="")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    arguments = parser.parse_args()
    print("| schedule | cases | best | worst | with depth | with idle ranks |\n|---|---|---|---|---|---|")
    for schedule in arguments.schedules.split(","):
        if arguments.short and kind_of(schedule).chunks > 1:
            continue
        random, best, worst, deep, idle = Random(arguments.seed), 0, 0.0, 0, 0
        for _ in range(arguments.cases):
            blocks, ranks = range(4, arguments.blocks + 1), range(2, arguments.ranks + 1)
            sizes = tuple(map(int, filter(None, arguments.hosts.split(","))))
            on = [sum(sizes)] if sizes else ranks
            problem = drawn(random, schedule, blocks, on, arguments.short, arguments.odd)
            problem = on_hosts(random, problem, sizes) if sizes else problem
            found = planned(problem)
            seconds = inf if found is None else found.seconds
            interval = problem.ranks if found is None else found.update_interval
            least = best_seconds(problem, interval, arguments.deepest)
            off = 0.0 if seconds == least else seconds / least - 1
            best += off <= 1e-3
            worst = max(worst, off)
            deep += found is not None and bool(found.depth)
            idle += found is not None and found.idle > 0
        row = (f"`{schedule}`", arguments.cases, best, f"{worst:.2%}", deep, idle)
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
