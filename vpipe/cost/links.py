"""The links between ranks and between hosts, as profiles and measured files hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, GetPydanticSchema, StrictBool
from pydantic import Field as FileKey
from pydantic_core import core_schema

from vpipe.cost.fields import FileObject, Unit, mistake
from vpipe.errors import VPipeError

Seconds = Annotated[float, Unit("seconds")]
BytesPerSecond = Annotated[float, Unit("bytes a second", positive=True)]


@dataclass(frozen=True)
class LinkCost(FileObject):
    bandwidth: BytesPerSecond
    latency: Seconds = 0.0
    sender_busy: StrictBool = False
    """Whether the sending rank copies the message itself and computes nothing meanwhile: shared memory on CPU."""

    reducing: Annotated[float, Unit("bytes a second")] = 0.0
    """Of gradients that replicas add up, where they are compressed in another way. 0: `bandwidth`."""

    @property
    def reduce_bandwidth(self) -> float:
        return self.reducing or self.bandwidth

    def seconds(self, count: float) -> float:
        """The time to send so many bytes."""
        return self.latency + count / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class PairLink(LinkCost):
    """An entry of a profile file's `links`."""

    sender: Annotated[int, Unit("the sending rank or host"), FileKey(alias="from")]
    receiver: Annotated[int, Unit("the receiving rank or host"), FileKey(alias="to")]


def _by_pair(links: list[PairLink]) -> dict[tuple[int, int], LinkCost]:
    found: dict[tuple[int, int], LinkCost] = {}
    for link in links:
        ends = link.sender, link.receiver
        if ends in found or link.sender == link.receiver:
            raise mistake(
                f"from {ends[0]} to {ends[1]}: expected two different ranks, or hosts, and each pair once"
            )
        found[ends] = LinkCost(link.bandwidth, link.latency, link.sender_busy, link.reducing)
    return found


Links = Annotated[
    Mapping[tuple[int, int], LinkCost],
    GetPydanticSchema(
        lambda _, handler: core_schema.no_info_after_validator_function(_by_pair, handler(list[PairLink]))
    ),
]


def _every_rank(hosts: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    ranks = sorted(rank for own in hosts for rank in own)
    if ranks != list(range(len(ranks))):
        raise ValueError("the ranks of each host: every rank, from 0 on, on one of them")
    return hosts


def _beside(link: LinkCost) -> LinkCost:
    if link.sender_busy:
        raise ValueError("a link without sender_busy: the card of a host sends while its ranks compute")
    return link


def _all_beside(links: Mapping[tuple[int, int], LinkCost]) -> Mapping[tuple[int, int], LinkCost]:
    return {ends: _beside(link) for ends, link in links.items()}


HostRanks = Annotated[tuple[Annotated[int, Unit("a rank")], ...], FileKey(min_length=1)]


@dataclass(frozen=True)
class Hosts(FileObject):
    """Which ranks are on which host, and the network between hosts.

    Each host has one network card, which all its ranks share: messages to other hosts leave one after the other, and
    those from other hosts arrive one after the other.
    """

    ranks: Annotated[tuple[HostRanks, ...], FileKey(min_length=1), AfterValidator(_every_rank)]
    """Of each host."""
    link: Annotated[LinkCost, AfterValidator(_beside)]
    """From any host to any other, unless `links` says otherwise."""
    links: Annotated[Links, AfterValidator(_all_beside)] = field(default_factory=dict)
    """By sending and receiving host."""

    @cached_property
    def _host_of(self) -> dict[int, int]:
        return {rank: host for host, own in enumerate(self.ranks) for rank in own}

    def host_of(self, rank: int) -> int:
        return self._host_of[rank]

    def link_between(self, sender: int, receiver: int) -> LinkCost | None:
        """From one rank to another; None: they are on one host."""
        there, here = self._host_of[receiver], self._host_of[sender]
        return None if there == here else self.links.get((here, there), self.link)

    def check(self, ranks: int) -> None:
        """Raise if there are more ranks than the hosts have."""
        if ranks > len(self._host_of):
            raise VPipeError(
                f"{ranks} ranks are to be placed, and the hosts of the profile have {len(self._host_of)}: give as many "
                "ranks, or add hosts"
            )


@dataclass(frozen=True)
class MeasuredLinks(FileObject):
    """The file that `vpipe doctor --machines` writes."""

    hosts: Hosts | None = None
    links: Links = field(default_factory=dict)
    """By rank: older files have them instead of hosts."""
