"""The link between two ranks of this host: messages to a second process and its answers, timed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from statistics import median
from time import perf_counter

import torch

from vpipe.communication.channel import HOST, Key
from vpipe.communication.shared_memory import SharedMemoryChannel
from vpipe.cost import LinkCost
from vpipe.errors import PeerError
from vpipe.profile.measured_stage import Interval, clock_of, seconds

SMALL, LARGE = 64 * 2**10, 8 * 2**20
REPEATS = 30
WARM = 3
TIMEOUT = 60.0
DEFAULT = LinkCost(bandwidth=5e9, latency=3e-5, sender_busy=True)
"""Where no second process can be started: an ordinary host's shared memory."""

NOTICE = 2e-5
"""Seconds from a copy on one GPU rank's stream to the other's going on. Assumed: it is not measured yet."""

_PROGRAM = "import sys; from vpipe.profile.links import answer; answer(int(sys.argv[1]))"


def measure_link(device: torch.device = HOST) -> LinkCost:
    """Bandwidth and latency of the channel between two processes of this host: shared memory, or that of a GPU."""
    if device.type == "cuda":
        return LinkCost(_copy_bandwidth(device), NOTICE, sender_busy=True)
    try:
        return _measure()
    except (OSError, PeerError):
        return DEFAULT


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy within the GPU's memory, which is what sending over CUDA IPC costs."""
    source = torch.zeros(LARGE, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = clock_of(device)
    intervals: list[Interval] = []
    for _ in range(REPEATS):
        start = clock()
        target.copy_(source)
        intervals.append((start, clock()))
    return LARGE / median(map(seconds, intervals[WARM:]))


def _measure() -> LinkCost:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    with here, there:
        command = [sys.executable, "-c", _PROGRAM, str(there.fileno())]
        process = subprocess.Popen(
            command, env=environment, pass_fds=[there.fileno()], stderr=subprocess.DEVNULL
        )
        there.close()
        channel = SharedMemoryChannel(1, 2, TIMEOUT, here)
        try:
            nothing = _seconds(channel, 4, 0)
            small = _seconds(channel, SMALL, 1)
            large = _seconds(channel, LARGE, 2)
        finally:
            channel.close()
            process.wait()
    bandwidth = (LARGE - SMALL) / max(large - small, 1e-9)
    # Both ways are in every figure: the answer is as quick as the smallest message.
    return LinkCost(bandwidth, nothing / 2, sender_busy=True)


def _seconds(channel: SharedMemoryChannel, size: int, stream: int) -> float:
    """From the beginning of a send to the answer."""
    message = torch.zeros(size, dtype=torch.uint8)
    taken = []
    for number in range(REPEATS):
        key = Key(stream, number)
        start = perf_counter()
        channel.send(key, message)
        channel.receive(key, (1,), torch.uint8)
        taken.append(perf_counter() - start)
        channel.release(key)
    return median(taken[WARM:])


def answer(descriptor: int) -> None:
    """What the second process does: it answers every message as soon as it is there."""
    torch.set_num_threads(1)
    channel = SharedMemoryChannel(0, 2, TIMEOUT, socket.socket(fileno=descriptor))
    reply = torch.zeros(1, dtype=torch.uint8)
    for stream, size in enumerate((4, SMALL, LARGE)):
        for number in range(REPEATS):
            key = Key(stream, number)
            channel.receive(key, (size,), torch.uint8)
            channel.send(key, reply)
            channel.release(key)
    channel.close()
