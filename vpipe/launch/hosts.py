"""The hosts that `machines` names: which of them is this one, and its addresses."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

LOCAL_NAMES = ("localhost", "127.0.0.1")


class Host(NamedTuple):
    name: str
    """As `machines` has it: a name or an address that ssh understands."""
    ranks: tuple[int, ...]
    here: bool


def hosts_of(machines: Sequence[str]) -> list[Host]:
    """The hosts of these ranks (host:GPU), in the order of their first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine.rpartition(":")[0], []).append(rank)
    return [Host(name, tuple(own), is_here(name)) for name, own in ranks.items()]


def is_here(name: str) -> bool:
    return name in (*LOCAL_NAMES, socket.gethostname()) or bool(own_addresses(name))


def own_addresses(name: str) -> list[str]:
    """The addresses of this name that an interface of this host has, without loopback ones."""
    found: list[str] = []
    with suppress(OSError, UnicodeError):
        for family, _, _, _, where in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM):
            address = str(where[0])
            if not ipaddress.ip_address(address).is_loopback and _is_own(family, address):
                found.append(address)
    return found


def _is_own(family: int, address: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
