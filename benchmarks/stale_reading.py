"""Which versions the minibatches of an update read in `benchmarks/staleness.py`, and the reading of them.

The minibatches of an update that may read something old are a group, computed at once with weights of their own each;
those that come later read the newest weights alone, and count as one minibatch, a group of its own:

    3 stages, 5 minibatches an update      minibatch  0  1  2  3  4
                                  age at stage 0      1  1  0  0  0
                                               1      1  0  0  0  0
                                               2      0  0  0  0  0
                                              group  |0  1  2||0  |
"""

from typing import NamedTuple

import torch
from stale_rows import Row
from stale_update import rule_of, spread
from torch import Tensor


class Group(NamedTuple):
    """Minibatches of the same number of samples, computed at once."""

    first: int
    """The place of the first one in the update."""
    minibatches: int
    samples: int
    """Of all its minibatches."""


class Source(NamedTuple):
    """Where a group has a parameter from; each pair of a layer and an age that it reads is predicted once."""

    name: str
    origin: str
    """The parameter itself: `tokens` for a tied head."""
    minibatches: int
    column: int
    """The first of those that this has in the tables of places and reaches."""
    pairs: int
    """0: it reads the newest weights alone."""


class Plan(NamedTuple):
    """What a group reads."""

    sources: tuple[Source, ...]
    layers: dict[str, Tensor]
    """The layer of each pair."""
    which: dict[str, Tensor]
    """The pair of each layer and minibatch: (layers or 1, minibatches)."""
    places: Tensor
    """Of the versions of the pairs, for each update: (updates, pairs)."""
    reaches: Tensor
    """Updates by which the pairs are predicted, for each update."""


def groups_of(row: Row, batch: int) -> list[Group]:
    if batch % row.interval:
        raise ValueError(f"a batch of {batch} samples has no {row.interval} equal minibatches (interval)")
    each, old = batch // row.interval, min(row.interval, row.stages)
    groups = [Group(0, old, each * old)]
    if row.interval > old:
        groups.append(Group(old, 1, batch - each * old))
    return groups


def ages_of(row: Row, delays: Tensor, group: Group) -> Tensor:
    """In updates, of (layers or 1, minibatches)."""
    numbers = torch.arange(group.first, group.first + group.minibatches)
    return (-((numbers - delays[:, None]) // row.interval)).clamp(min=0)


def read_delays(row: Row, delays: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Of each parameter that the model has: where it is from, and its layers' delays in minibatches."""
    found = {name: (name, late) for name, late in delays.items()}
    if row.tied == "late":
        found["head"] = ("tokens", torch.full_like(delays["tokens"], head_delay(row)))
    elif row.tied == "split":
        found["head"] = ("tokens", torch.zeros_like(delays["tokens"]))
    return found


def head_delay(row: Row) -> int:
    """Minibatches by which a tied head in the last stage is late, as `Schedule.lag` has it: whole updates.

    It applies an update of the embedding with the first of its own updates by which the first stage's part has come.
    """
    if row.stages == 1 or "tokens" in row.fresh:
        return 0
    return -(-row.stages // row.interval) * row.interval


def kept_versions(row: Row, delays: dict[str, Tensor], group: Group) -> dict[str, int]:
    """So many of each parameter; 1: the newest is enough."""
    kept = dict.fromkeys(delays, 1)
    for origin, late in read_delays(row, delays).values():
        kept[origin] = max(kept[origin], 1 + int(ages_of(row, late, group).max()))
    return kept


def reach_of(row: Row, name: str) -> float:
    """Share of the delay that is predicted."""
    if row.predict == "none":
        return 0.0
    return row.adam_reach if rule_of(row, name) == "adamw" else row.reach


def make_plan(
    row: Row, delays: dict[str, Tensor], group: Group, kept: dict[str, int], updates: int, device: torch.device
) -> Plan:  # fmt: skip
    made = torch.arange(updates)[:, None]
    sources, layers, which = [], {}, {}
    places, reaches = [0 * made], [0.0 * made]  # a first column that nobody reads, so that no table is empty
    column = 1
    for name, (origin, late) in read_delays(row, delays).items():
        ages = ages_of(row, late, group)
        pairs, columns = torch.empty(0, 2, dtype=torch.int64), None
        if ages.max() > 0:
            each = torch.arange(len(late))[:, None].expand_as(ages)
            pairs, columns = torch.stack([each, ages], -1).flatten(0, 1).unique(dim=0, return_inverse=True)
            layers[name] = pairs[:, 0].to(device)
            which[name] = columns.view_as(ages).to(device)
        sources.append(Source(name, origin, group.minibatches, column, len(pairs)))
        column += len(pairs)
        age = torch.minimum(pairs[:, 1], (made - row.async_after).clamp(min=0))
        places.append((made - age) % kept[origin])
        reaches.append(reach_of(row, origin) * age)
    tables = torch.cat(places, 1).to(device), torch.cat(reaches, 1).to(device)
    return Plan(tuple(sources), layers, which, *tables)


def read_all(
    sources: tuple[Source, ...],
    weights: dict[str, Tensor],
    versions: dict[str, Tensor],
    steps: dict[str, Tensor],
    layers: dict[str, Tensor],
    which: dict[str, Tensor],
    places: Tensor,
    reaches: Tensor,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The weights that each minibatch of a group reads: (layers or 1, minibatches, ...), each a tensor of its own."""
    found = {}
    for name, origin, minibatches, column, pairs in sources:
        if not pairs:
            newest = weights[origin].to(dtype).unsqueeze(1)
            found[name] = newest.repeat(1, minibatches, *[1] * (newest.ndim - 2))
            continue
        at = places[column : column + pairs], layers[name]
        read = versions[origin][at]
        if origin in steps:
            read = read + spread(reaches[column : column + pairs], read) * steps[origin][at]
        read = read.to(dtype)
        found[name] = read.unsqueeze(1) if minibatches == 1 else read[which[name]]
    return found
