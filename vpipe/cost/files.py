"""The profile as a JSON file, which a person can write by hand; docs/formats.md describes it."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from vpipe.cost.costs import BlockCost, DeviceCost, LinkCost, Profile, Tie
from vpipe.cost.json_fields import Fields
from vpipe.cost.pipedream import is_pipedream_graph, read_pipedream_graph
from vpipe.errors import ConfigError
from vpipe.system.files import read_json, read_text, write_json

FORMAT = "vpipe profile 1"
KEYS = (
    "format", "fingerprint", "batch_size", "optimizer_ratio", "device", "link", "links", "blocks", "tied",
)  # fmt: skip
DEVICE_KEYS = tuple(entry.name for entry in dataclass_fields(DeviceCost))
LINK_KEYS = ("bandwidth", "latency", "sender_busy")
BLOCK_KEYS = tuple(entry.name for entry in dataclass_fields(BlockCost))

DEVICE_EXAMPLE = '{"memory": 11811160064, "to_host": 1.2e10, "from_host": 1.2e10}'
LINK_EXAMPLE = '{"bandwidth": 1e10, "latency": 2e-5}'
BLOCK_EXAMPLE = (
    '{"forward": 0.01, "input_gradient": 0.01, "weight_gradient": 0.01, '
    '"kept_bytes": 1000, "boundary_bytes": 100, "parameter_bytes": 4000}'
)
PROFILE_EXAMPLE = '{"batch_size": 8, "device": {...}, "link": {...}, "blocks": [...]}'


def read_any_profile(path: Path) -> Profile:
    """A profile of ours, or PipeDream's graph.txt: whichever the file holds."""
    text = read_text(path)
    if text.lstrip().startswith("{"):
        return read_profile(path)
    if is_pipedream_graph(text):
        return read_pipedream_graph(path)
    raise ConfigError(
        f"{path}: is neither a profile in JSON nor a graph.txt of PipeDream: "
        "make one with `vpipe profile`, or see docs/formats.md"
    )


def read_profile(path: Path) -> Profile:
    top = Fields(read_json(path), str(path), KEYS, PROFILE_EXAMPLE)
    if top.text("format", FORMAT) != FORMAT:
        raise top.fault("format", f"{FORMAT!r}, or left out")
    device = Fields(top.required("device", DEVICE_EXAMPLE), f"{path}: device", DEVICE_KEYS, DEVICE_EXAMPLE)
    blocks = top.items("blocks", "a list with an object for each block")
    return Profile(
        blocks=tuple(_block(index, values, path) for index, values in enumerate(blocks)),
        device=DeviceCost(
            memory=device.count("memory", "bytes", least=1),
            to_host=device.number("to_host", "bytes a second", positive=True),
            from_host=device.number("from_host", "bytes a second", positive=True),
            overhead=device.number("overhead", "seconds", default=0.0),
            shared_by=device.count("shared_by", "ranks", least=1, default=1),
            crowding=device.number("crowding", "times as long as alone", least=1, default=1.0),
            workspace=device.count("workspace", "bytes", default=0),
            swapped_in=device.count("swapped_in", "minibatches", least=2, default=2),
            adding=device.number("adding", "seconds a byte", default=0.0),
            graphs=device.flag("graphs", False),
            slack=device.count("slack", "bytes", default=0),
        ),
        link=_link(Fields(top.required("link", LINK_EXAMPLE), f"{path}: link", LINK_KEYS, LINK_EXAMPLE)),
        batch_size=top.count("batch_size", "samples of a minibatch", least=1),
        optimizer_ratio=top.number("optimizer_ratio", "bytes for each byte of parameters", default=2.0),
        links=_links(top, path),
        fingerprint=top.text("fingerprint", ""),
        tied=_ties(top, path, len(blocks)),
    )


def write_profile(profile: Profile, path: Path) -> None:
    links = [{"from": a, "to": b} | asdict(link) for (a, b), link in sorted(profile.links.items())]
    values: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": profile.fingerprint,
        "batch_size": profile.batch_size,
        "optimizer_ratio": profile.optimizer_ratio,
        "device": asdict(profile.device),
        "link": asdict(profile.link),
    }
    tied = [asdict(tie) for tie in profile.tied]
    values |= {key: entries for key, entries in (("links", links), ("tied", tied)) if entries}
    write_json(path, values | {"blocks": [asdict(block) for block in profile.blocks]})


def _block(index: int, values: Any, path: Path) -> BlockCost:
    fields = Fields(values, f"{path}: block {index}", BLOCK_KEYS, BLOCK_EXAMPLE)
    name = fields.text("name", f"block {index}")
    if "name" in fields:
        fields.place += f" ({name})"
    return BlockCost(
        name=name,
        forward=fields.number("forward", "seconds"),
        input_gradient=fields.number("input_gradient", "seconds"),
        weight_gradient=fields.number("weight_gradient", "seconds"),
        update=fields.number("update", "seconds", default=0.0),
        kept_bytes=fields.count("kept_bytes", "bytes"),
        boundary_bytes=fields.count("boundary_bytes", "bytes"),
        parameter_bytes=fields.count("parameter_bytes", "bytes"),
        spread=fields.number("spread", "a share of the median", default=0.0),
        deferred_bytes=fields.optional_count("deferred_bytes", "bytes", least=0),
        version=fields.number("version", "seconds", default=0.0),
        splitting=fields.number("splitting", "seconds", default=0.0),
        accumulating=fields.number("accumulating", "seconds", default=0.0),
        recomputing=fields.optional_number("recomputing", "seconds"),
        split_recomputing=fields.optional_number("split_recomputing", "seconds"),
        swapping=fields.number("swapping", "seconds", default=0.0),
        working_bytes=fields.count("working_bytes", "bytes", default=0),
        forward_bytes=fields.count("forward_bytes", "bytes", default=0),
        update_bytes=fields.count("update_bytes", "bytes", default=0),
    )


def _links(top: Fields, path: Path) -> dict[tuple[int, int], LinkCost]:
    found: dict[tuple[int, int], LinkCost] = {}
    example = '{"from": 0, "to": 1, "bandwidth": 1e10, "latency": 2e-5}'
    entries = top.items("links", f"a list of {example}", empty=True) if "links" in top else []
    for index, values in enumerate(entries):
        fields = Fields(values, f"{path}: link {index} of links", ("from", "to", *LINK_KEYS), example)
        ends = (fields.count("from", "the sending rank"), fields.count("to", "the receiving rank"))
        if ends in found or ends[0] == ends[1]:
            raise fields.fault("to", f"another rank than {ends[0]}, and each pair must stand once")
        found[ends] = _link(fields)
    return found


def _ties(top: Fields, path: Path, blocks: int) -> tuple[Tie, ...]:
    example = '{"bytes": 4000, "blocks": [0, 8]}'
    entries = top.items("tied", f"a list of {example}", empty=True) if "tied" in top else []
    ties = []
    for index, values in enumerate(entries):
        fields = Fields(values, f"{path}: parameter {index} of tied", ("bytes", "blocks"), example)
        expected = f"different numbers of two or more blocks, each from 0 to {blocks - 1}"
        numbers = fields.items("blocks", expected)
        plain = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
        if (
            not plain
            or len(set(numbers)) < max(2, len(numbers))
            or not 0 <= min(numbers) <= max(numbers) < blocks
        ):
            raise fields.fault("blocks", expected)
        ties.append(Tie(fields.count("bytes", "bytes"), tuple(sorted(numbers))))
    return tuple(ties)


def _link(fields: Fields) -> LinkCost:
    return LinkCost(
        bandwidth=fields.number("bandwidth", "bytes a second", positive=True),
        latency=fields.number("latency", "seconds", default=0.0),
        sender_busy=fields.flag("sender_busy", False),
    )
