"""The identity of this host and its network interfaces, without torch."""

import fcntl
import os
import socket
import struct
from contextlib import suppress

_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def host_identity() -> str:
    """Equal for ranks that can reach each other's sockets: the same kernel and the same network namespace.

    Before the first slash stands the host's name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}/{namespace_of('net')}"


def namespace_of(kind: str) -> str:
    """Equal for processes in the same namespace of the kernel."""
    try:
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    except OSError:
        return ""


def interface_with(address: str) -> str | None:
    """The name of the interface that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe, _GET_ADDRESS, request)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
