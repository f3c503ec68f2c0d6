"""This host's own address on the network."""

import socket

LOOPBACK = "127.0.0.1"


def own_address(towards: tuple[str, int]) -> str:
    """This host's address on the interface that leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(towards)
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK
