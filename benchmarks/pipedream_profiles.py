"""Plans for PipeDream's own profiles beside those of its optimizer, at equal memory.

    python benchmarks/pipedream_profiles.py [--profiles gnmt,vgg16] [--ranks 2,4,8] [--straight] [--keep]
    python benchmarks/pipedream_profiles.py --graph gnmt > graph.txt

The optimizer is written down from PipeDream's paper (`tests/pipedream_optimizer.py`). Its plan and vpipe's are
simulated alike (`tests/pipedream_contest.py`), with links of 10 and 1 GB/s. `--straight`: PipeDream has no replicas.
`--keep`: vpipe neither recomputes nor swaps. `--graph`: print a profile as PipeDream's file instead.
The columns: milliseconds a minibatch and replicas of each stage, what vpipe's plan saves, and by how much another
plan may still be faster at most (`gap`).
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from tests.pipedream_contest import FAST, SLOW, Contest, contest
from tests.pipedream_graphs import NAMES, graph_text, read_graph
from vpipe.system.units import show_bytes

HEADS = ("profile", "ranks", "GB/s", "memory", "PipeDream", "replicas", "vpipe", "replicas", "depth", "policies",
         "saved", "gap")  # fmt: skip


def cells(found: Contest) -> tuple[str, ...]:
    result = found.result
    return (
        show_bytes(found.cap),
        f"{1000 * found.theirs:.2f}",
        "-".join(map(str, found.their_replicas)),
        f"{1000 * found.ours:.2f}",
        "-".join(map(str, result.replicas)),
        "-".join(map(str, result.depth)),
        ", ".join(sorted(set(result.policies))),
        f"{round(found.is_better, 4) + 0.0:.1%}",  # no -0.0 %
        "none" if result.gap is None else f"{result.gap:.1%}",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profiles", default=",".join(NAMES))
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--straight", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--graph", choices=NAMES)
    arguments = parser.parse_args()
    if arguments.graph:
        print(graph_text(read_graph(arguments.graph)), end="")
        return
    print("| " + " | ".join(HEADS) + " |\n|" + "---|" * len(HEADS))
    names, ranks = arguments.profiles.split(","), map(int, arguments.ranks.split(","))
    for name, count, bandwidth in product(names, ranks, (FAST, SLOW)):
        found = contest(name, count, bandwidth, straight=arguments.straight, keep=arguments.keep)
        row = (f"`{name}`", str(count), f"{bandwidth / 1e9:g}", *cells(found))
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
