"""A rank that runs out of file descriptors is named, with the limit and the fix, and nothing is left."""

import errno
import os
import resource
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.end_to_end.command import wait_until_gone
from tests.faults.runs import be_patient, shared_memory, train, write_config
from vpipe.communication.shared_memory import DATA, HEADER, SharedMemoryChannel
from vpipe.errors import ConfigError, PeerError
from vpipe.system.descriptors import exhausted

LIMIT = 200


def few_descriptors() -> None:
    be_patient()
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))


@pytest.mark.parametrize("point", ["init", pytest.param("rendezvous", marks=pytest.mark.long), "fwd"])
def test_the_rank_is_named_and_the_limit(point: str, tmp_path: Path) -> None:
    """Rank 1 has none left from then on; at the latest a checkpoint or a new slot of shared memory needs one."""
    write_config(tmp_path, 2, heartbeat_limit=60, on_save_error="stop")
    shared = shared_memory()
    ended, run = train(tmp_path, f"rank=1,point={point},kind=descriptors", prepare=few_descriptors)
    assert ended.code == 2, ended.said
    message = f"rank 1: no file descriptor is left: a process may have {LIMIT} (ulimit -n); raise the limit"
    assert f"error: {message}" in ended.err
    assert "Traceback" not in ended.said
    assert f"stopped because rank 1 failed: {message}" in (run / "output.log.0").read_text()
    wait_until_gone(str(tmp_path))
    assert not shared_memory() - shared


def test_errors_that_come_from_it_are_recognised() -> None:
    def raised(*, told: bool) -> BaseException:
        try:
            try:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            except OSError:
                raise (ConfigError if told else PeerError)("config.yml: cannot be read") from None
        except ValueError as error:
            return error

    assert "ulimit -n" in exhausted(raised(told=True))
    assert "ulimit -n" in exhausted(raised(told=False))
    assert "ulimit -n" in exhausted(RuntimeError("unable to open shared memory: Too many open files (24)"))
    assert exhausted(PeerError("rank 1 has gone")) == ""
    assert exhausted(OSError(errno.ENOSPC, "No space left on device")) == ""


EXHAUSTED_NOW = """
import os, resource
from vpipe.system.descriptors import exhausted
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
try:
    while True:
        os.dup(2)
except OSError:
    pass
print(exhausted(ValueError("rank 2 did not come")))
"""


def test_what_went_wrong_for_want_of_one_is_not_blamed_on_others() -> None:
    said = subprocess.run(
        [sys.executable, "-c", EXHAUSTED_NOW], capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith("no file descriptor is left: a process may have 20 (ulimit -n)")


def test_a_slot_whose_descriptor_cannot_be_received() -> None:
    """The kernel drops the descriptor and says so with a flag."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = SharedMemoryChannel(1, 2, 10.0, left)
    slot = os.memfd_create("test")
    os.ftruncate(slot, 4096)
    socket.send_fds(right, [HEADER.pack(DATA, 0, 0, 0, 4096)], [slot])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
        with suppress(OSError):
            while True:
                held.append(os.dup(2))
        with pytest.raises(OSError, match="Too many open files"):
            channel._take_next()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in (*held, slot):
            os.close(descriptor)
        channel.close()
        right.close()
