"""Two hosts on this machine: network namespaces that are joined by a virtual cable."""

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NETWORK = 0x40000000  # CLONE_NEWNET
FIRST = "10.231.7.1"
"""The address of the first host."""


class TwoHosts:
    def __init__(self) -> None:
        number = os.getpid() % 65536
        self.names = [f"vpipe-{number}-{side}" for side in "ab"]
        self._cables = [f"vp{number}{side}" for side in "ab"]

    def connect(self) -> None:
        first, second = self.names
        for name in self.names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            self._cables[0],
            "netns",
            first,
            "type",
            "veth",
            "peer",
            self._cables[1],
            "netns",
            second,
        )
        for last, (name, cable) in enumerate(zip(self.names, self._cables, strict=True), 1):
            _ip("-n", name, "addr", "add", f"{FIRST[:-1]}{last}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def slow_down(self, rate: str, burst: str = "256kb") -> None:
        """The cable carries no more than this each way, such as "100mbit"; after a pause, a burst at once."""
        for name, cable in zip(self.names, self._cables, strict=True):
            limit = ["tbf", "rate", rate, "burst", burst, "latency", "50ms"]
            subprocess.run(
                ["tc", "-n", name, "qdisc", "replace", "dev", cable, "root", *limit],
                check=True,
                capture_output=True,
            )

    def sent(self) -> int:
        """Bytes that the first host has sent so far."""
        said = subprocess.run(
            ["ip", "-n", self.names[0], "-s", "-j", "link", "show", self._cables[0]],
            check=True,
            capture_output=True,
        ).stdout
        return int(json.loads(said)[0]["stats64"]["tx"]["bytes"])

    def cut(self) -> None:
        """From now on nothing arrives, and no error reports it."""
        _ip("-n", self.names[0], "link", "set", self._cables[0], "down")

    def restore(self) -> None:
        _ip("-n", self.names[0], "link", "set", self._cables[0], "up")


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Where namespaces are not permitted: OSError or CalledProcessError."""
    hosts = TwoHosts()
    try:
        hosts.connect()
        yield hosts
    finally:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def enter(namespace: str) -> None:
    """What `ip netns exec` does; this process is on that host from now on."""
    with open(f"/var/run/netns/{namespace}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), NETWORK):
            raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
