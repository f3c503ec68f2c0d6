"""Plans of small problems beside every plan that there is, simulated one by one.

    python benchmarks/best_plans.py [--cases 20] [--seed 1] [--blocks 9] [--ranks 4] [--short] [--hosts 2,2]

Problems are drawn (`tests/every_plan.py`): uneven blocks, 1 to 32 minibatches, links from free to slower than compute.
`--short`: with less memory than keeping everything needs, which has every policy of every block to be tried.
`--hosts`: with so many ranks on each host, links between hosts up to 100 times slower, and every placement. The
columns: how many plans are the best of the schedule's own depth or better, how far the worst one is off, and how many
are faster than all of these because of another depth.
"""

from __future__ import annotations

import argparse
import sys
from math import inf
from pathlib import Path
from random import Random

from vpipe.errors import VPipeError
from vpipe.plan import plan

sys.path.append(str(Path(__file__).parents[1]))

from tests.every_plan import SCHEDULES, Problem, best_seconds, drawn, on_hosts
from vpipe.schedule import kind_of


def planned(problem: Problem) -> tuple[float, bool]:
    """Seconds a minibatch, and whether a depth was chosen."""
    try:
        found = plan(problem.profile, problem.ranks, problem.cap, problem.schedule, problem.minibatches)
    except VPipeError:
        return inf, False
    return found.seconds, bool(found.depth)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("cases", 20), ("seed", 1), ("blocks", 9), ("ranks", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--hosts", default="")
    arguments = parser.parse_args()
    print("| schedule | cases | best | worst | faster by depth |\n|---|---|---|---|---|")
    for schedule in SCHEDULES:
        if arguments.short and kind_of(schedule).chunks > 1:
            continue
        random, best, worst, deeper = Random(arguments.seed), 0, 0.0, 0
        for _ in range(arguments.cases):
            blocks, ranks = range(4, arguments.blocks + 1), range(2, arguments.ranks + 1)
            sizes = tuple(map(int, filter(None, arguments.hosts.split(","))))
            problem = drawn(random, schedule, blocks, [sum(sizes)] if sizes else ranks, arguments.short)
            problem = on_hosts(random, problem, sizes) if sizes else problem
            seconds, depth = planned(problem)
            least = best_seconds(problem)
            off = 0.0 if seconds == least else seconds / least - 1
            best += off <= 1e-9
            worst = max(worst, off)
            deeper += depth and off < 0
        row = (f"`{schedule}`", arguments.cases, best, f"{worst:.2%}", deeper)
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
