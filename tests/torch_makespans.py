"""Makespans of torch's pipeline schedules, for `test_schedule_makespans.py`. Run it to make the table again:

    python -m tests.torch_makespans > tests/torch_makespans.csv

Only the orders of computing are taken from torch.distributed.pipelining; F takes 1 unit, I and W 1 each and a whole
backward 2, messages none. `held` is the most chunks of minibatches in flight on any rank. Where torch refuses a number
of minibatches there is no row.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.pipelining.schedules as torch_schedules

from vpipe.schedule import Op, Schedule, read_table, walk

RANKS, MINIBATCHES, CHUNKS = range(1, 9), range(1, 33), (2, 3, 4)
HEADER = "schedule,ranks,chunks,minibatches,makespan,held"


def torch_order(name: str, ranks: int, chunks: int, minibatches: int) -> Schedule | None:
    """Torch's order as one of our schedules; None: torch refuses it."""
    kind = getattr(torch_schedules, name)
    stages: list[Any] = [
        SimpleNamespace(
            group=None, group_size=ranks, group_rank=0, num_stages=chunks * ranks, stage_index=chunk * ranks,
            is_first=chunk == 0, is_last=False, has_backward=True, device=torch.device("cpu"), submod=torch.nn.Module(),
        )
        for chunk in range(chunks)
    ]  # fmt: skip
    try:
        order = kind(stages, minibatches, loss_fn=lambda output, target: output).pipeline_order
    except ValueError:
        return None
    rows = (",".join(str(action) for action in order[rank] if action) for rank in range(ranks))
    return read_table("\n".join(rows), name)


def makespan(schedule: Schedule) -> int:
    return int(max(event.end for event in walk(schedule)))


def held(schedule: Schedule) -> int:
    """The most chunks of minibatches between F and the end of B or W on any rank."""
    most = 0
    for rank in range(schedule.num_ranks):
        now = 0
        for _, op, _ in schedule.program(rank):
            now += {Op.F: 1, Op.B: -1, Op.W: -1}.get(op, 0)
            most = max(most, now)
    return most


def main() -> None:
    print(HEADER)
    for ours, theirs, choices in (
        ("interleaved", "ScheduleInterleaved1F1B", CHUNKS),
        ("zb-v", "ScheduleZBVZeroBubble", (2,)),
    ):
        for ranks in RANKS:
            for chunks in choices:
                for minibatches in MINIBATCHES:
                    order = torch_order(theirs, ranks, chunks, minibatches)
                    if order is not None:
                        row = (ours, ranks, chunks, minibatches, makespan(order), held(order))
                        print(*row, sep=",", file=sys.stdout)


if __name__ == "__main__":
    main()
