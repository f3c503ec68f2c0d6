"""A row of docs/measured/scaling.csv: one point of docs/scaling.md."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple, get_type_hints

from scaling_layouts import Point
from scaling_models import Model

BOUNDS = {
    "compute": "the busiest rank computes",
    "bubble": "ranks wait for each other, because the pipeline is filled and drained",
    "link": "messages between stages",
    "reduction": "adding up gradients",
    "swap": "copies to and from host memory",
    "memory": "no layout fits into the memory of the GPU",
    "host memory": "what is swapped does not fit into the memory of the host",
}
"""What can bound a point."""


class Row(NamedTuple):
    model: str
    gpus: int
    schedule: str
    policy: str
    gigabits: int
    """A second, of a host's network card."""
    bound: str
    tokens_per_second: int
    """0 if it does not fit."""
    tflops: float
    """Of the model, for each GPU: 10^12 operations a second."""
    of_card: float
    """The same as a share of what a large matrix product reaches."""
    gib: float
    """Memory of a GPU."""
    samples: int
    stages: int
    pipelines: int
    together: int
    minibatches: int
    compute: float
    bubble: float
    link: float
    reduction: float
    swap: float
    memory_gain: float

    def fields(self) -> list[str]:
        return [str(value) for value in self]


COLUMNS = Row._fields


def row_of(
    model: Model, gpus: int, schedule: str, policy: str, gigabits: int, point: Point, speed: float
) -> Row:
    """`speed`: operations a second of a large matrix product."""
    shares = {name: round(share, 3) for name, share in point.shares.items()}
    tokens = model.batch * model.sequence / point.seconds
    flops = tokens * model.token_flops / gpus
    bound = point.lacks or max(point.shares, key=lambda name: point.shares[name])
    return Row(
        model.name,
        gpus,
        schedule,
        policy,
        gigabits,
        bound,
        0 if point.lacks else round(tokens),
        0.0 if point.lacks else round(flops / 1e12, 1),
        0.0 if point.lacks else round(flops / speed, 3),
        round(point.memory / 2**30, 1),
        *point.layout,
        shares["compute"],
        shares["bubble"],
        shares["link"],
        shares["reduction"],
        shares["swap"],
        round(point.memory_gain, 3),
    )


def read_rows(path: Path) -> list[Row]:
    kinds = get_type_hints(Row)
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(**{name: kinds[name](text) for name, text in row.items()}) for row in csv.DictReader(file)
        ]
