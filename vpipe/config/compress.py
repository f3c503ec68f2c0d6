"""The key `compress`: a mode for all links between hosts, one for each direction, or some for pairs of hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from vpipe.errors import meant
from vpipe.system.files import short_repr

if TYPE_CHECKING:
    from vpipe.config.keys import RunConfig

AUTO = "auto"
DIRECTIONS = ("forward", "backward", "replicas")
BETWEEN = "/"
"""Between two hosts in the name of a link."""


def compression_by_ranks(config: RunConfig) -> str | dict[Any, Any]:
    """As `Pipeline` takes it: pairs of ranks in place of pairs of hosts."""
    if not isinstance(config.compress, Mapping):
        return config.compress
    found: dict[Any, Any] = {key: mode for key, mode in config.compress.items() if key in DIRECTIONS}
    ranks = _ranks_by_name(config)
    for key, modes in config.compress.items():
        if key not in DIRECTIONS:
            first, second = key.split(BETWEEN)
            found |= dict.fromkeys(product(ranks[first], ranks[second]), modes)
    return found


def compression_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What is wrong with the key, if anything."""
    if config.links is not None and AUTO not in (config.compress, config.partition):
        yield "links", "only compress: auto and partition: auto read it: leave it out"
    if not isinstance(config.compress, Mapping):
        return
    names = _ranks_by_name(config)
    for key, modes in config.compress.items():
        if key in DIRECTIONS:
            if not isinstance(modes, str):
                yield "compress", f"{key} has a mode, not {short_repr(modes)}: write {key}: int8"
        elif BETWEEN not in key:
            yield (
                "compress",
                f"{short_repr(key)} is neither a direction nor a link such as nodea/nodeb: {meant(key, DIRECTIONS)}",
            )
        else:
            ends = key.split(BETWEEN)
            unknown = [end for end in ends if end not in names]
            if len(ends) != 2 or ends[0] == ends[1]:
                yield "compress", f"{short_repr(key)} is no link: name two hosts, such as nodea/nodeb"
            elif unknown and config.machines is None:
                yield (
                    "compress",
                    f"there is no rank {short_repr(unknown[0])}, and `machines` is not given: name two of the ranks 0 "
                    f"to {len(names) - 1}, such as 0/1, or give `machines`",
                )
            elif unknown:
                yield (
                    "compress",
                    f"`machines` has no host {short_repr(unknown[0])}: its hosts are {', '.join(names)}",
                )


def _ranks_by_name(config: RunConfig) -> dict[str, list[int]]:
    """The ranks of each host; without `machines` a rank goes by its number."""
    if config.machines is None:
        return {str(rank): [rank] for rank in range(config.ranks)}
    ranks: dict[str, list[int]] = {}
    for rank, machine in enumerate(config.machines):
        ranks.setdefault(machine.rpartition(":")[0], []).append(rank)
    return ranks
