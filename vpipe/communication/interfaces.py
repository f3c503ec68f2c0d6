"""Which of this host's interfaces the other ranks are on.

Left to itself, gloo takes the one that the host's name belongs to: often the loopback interface, where no other host
finds it, or one where strangers do.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LOOPBACK = "127.0.0.1"
_GLOO = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def own_address(towards: tuple[str, int]) -> str:
    """The address of the interface on which the others are: the one that leads to where all meet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(towards)
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK


@contextmanager
def gloo_on(address: str) -> Iterator[None]:
    """Gloo groups made meanwhile use the interface with this address, unless the user has named one."""
    name = _interface_with(address)
    if _GLOO in os.environ or name is None:
        yield
        return
    os.environ[_GLOO] = name
    try:
        yield
    finally:
        del os.environ[_GLOO]


def _interface_with(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                asked = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe, _GET_ADDRESS, asked)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
