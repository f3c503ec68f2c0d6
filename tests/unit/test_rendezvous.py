"""The rendezvous: ranks meet, strangers are turned away (rows 12 and 13 of docs/reliability.md)."""

import json
import logging
import secrets
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import distributed_c10d

from tests.drawing import draws
from tests.waiting import wait_until
from vpipe.communication import admission
from vpipe.communication.handshake import (
    GREETING_BYTES,
    INTRODUCTION_BYTES,
    MAGIC,
    YES,
    RefusedError,
)
from vpipe.communication.rendezvous import client
from vpipe.communication.rendezvous.client import RendezvousAddress, RendezvousClient
from vpipe.communication.rendezvous.job import RendezvousStore, _listener
from vpipe.communication.rendezvous.server import LARGEST, Rendezvous
from vpipe.errors import ConfigError, PeerError
from vpipe.launch.local import listen_here
from vpipe.system.environment import LISTENER

SECRET = b"of this job"
SIZE = 3
PATIENT = 100.0
"""Seconds that nothing takes which goes well, on however busy a machine."""


class Job:
    """A rendezvous, and ranks that are threads."""

    def __init__(self) -> None:
        self.listener = listen_here(0)
        self.port: int = self.listener.getsockname()[1]
        self.rendezvous = Rendezvous(self.listener, SIZE, SECRET)
        self.ranks = [self.client(rank) for rank in range(SIZE)]
        for rank in self.ranks:
            rank.change("check", "")  # each has a connection of this thread, which stays

    def client(self, rank: int, secret: bytes = SECRET) -> RendezvousClient:
        return RendezvousClient(rank, lambda: RendezvousAddress("127.0.0.1", self.port, secret), PATIENT)

    def gather(self, name: str, ranks: list[int], timeout: float = PATIENT) -> list[Any]:
        """What each of these ranks gets when it brings ten times its number."""

        def come(rank: int) -> Any:
            try:
                return self.ranks[rank].gather(name, 10 * rank, name, timeout)
            except PeerError as error:
                return str(error)

        with ThreadPoolExecutor(SIZE) as threads:
            return list(threads.map(come, ranks))

    def call(self) -> socket.socket:
        """A stranger's connection."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENT)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.rendezvous.close()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """One whose rendezvous waits for a rank that gets no processor for a while, as a rank waits for it."""
    monkeypatch.setattr(admission, "HANDSHAKE_LIMIT", PATIENT)
    monkeypatch.setattr(client, "GRACE", PATIENT)
    made = Job()
    yield made
    made.close()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    admission.log.addHandler(handler)
    yield lines
    admission.log.removeHandler(handler)


def exactly(link: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count and (more := link.recv(count - len(said))):
        said += more
    return said


def hangs_up(link: socket.socket) -> bool:
    """Whether the other end closes, after whatever it still says."""
    try:
        while link.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


# Ranks


def test_ranks_meet_in_any_order_and_again(job: Job) -> None:
    for number in range(3):
        assert job.gather(f"meeting {number}", [2, 0, 1]) == [[0, 10, 20]] * 3
    wait_until(lambda: not job.rendezvous._gathered)  # nothing is kept of what everybody has


def test_missing_ranks_are_named(job: Job) -> None:
    (errors,) = job.gather("model", [1], timeout=0.2)
    assert errors == "ranks 0, 2 did not come to 'model' within 0.2 s"


def while_two_wait(job: Job, ranks: list[int], do: Callable[[], None]) -> list[Any]:
    """The errors of two ranks that would wait for hours for the third, if something else did not happen meanwhile."""

    def wait_and_do() -> None:
        wait_until(lambda: len(job.rendezvous._waiting) == 2)
        do()

    thread = threading.Thread(target=wait_and_do)
    thread.start()
    errors = job.gather("data", ranks, timeout=10_000.0)
    thread.join()
    return errors


def test_a_rank_that_ends_is_reported_at_once(job: Job) -> None:
    job.gather("first", [0, 1, 2])
    errors = while_two_wait(job, [0, 1], job.ranks[2].close)
    assert errors == ["rank 2 ended or was killed before 'data'; see its own output"] * 2


def test_a_rendezvous_that_ends_is_reported_at_once(job: Job) -> None:
    job.gather("first", [0, 1, 2])
    for errors in while_two_wait(job, [1, 2], job.rendezvous.close):
        assert "rank 0, which serves the rendezvous, has gone" in errors


def test_nobody_opens_the_rendezvous() -> None:
    with closing(socket.socket()) as silent:  # it has a port, which nobody else gets, and does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        lonely = RendezvousClient(1, lambda: RendezvousAddress("127.0.0.1", port, SECRET), 0.3)
        with pytest.raises(
            PeerError, match=rf"rank 0 did not open the rendezvous at 127.0.0.1:{port} within 0.3 s"
        ):
            lonely.gather("model", None, "model", 0.3)


def test_threads_of_a_rank_do_not_hold_each_other_up(job: Job) -> None:
    """One thread of rank 0 waits for 'a' and another for 'b'; the others come to them the other way round."""
    with ThreadPoolExecutor(6) as threads:
        names = ["a", "b", "b", "a", "b", "a"]
        met = threads.map(lambda i: job.ranks[i // 2].gather(names[i], i // 2, names[i], PATIENT), range(6))
        assert list(met) == [[0, 1, 2]] * 6


def test_the_store_is_one_that_torch_understands(job: Job) -> None:
    inner = RendezvousStore(job.ranks[0])  # torch does not keep it alive
    store = dist.PrefixStore("inner", inner)
    value = bytes(range(256))
    store.set("key", value.decode("latin-1"))
    store.set("other", "汉字")
    assert store.get("other") == "汉字".encode()
    assert store.check(["key"])
    assert not store.check(["key", "none"])
    assert [store.add("count", 2), store.add("count", 3)] == [2, 5]
    assert store.delete_key("key")
    late = threading.Timer(0.1, lambda: RendezvousStore(job.ranks[1]).set("inner/late", value))
    late.start()
    store.wait(["late"])
    assert store.get("late") == value
    late.join()


# Strangers


def test_strangers_are_turned_away_and_logged_and_ranks_meet_all_the_same(
    job: Job, logged: list[str]
) -> None:
    says = {
        "nothing": b"",
        "little": b"x",
        "HTTP": b"GET / HTTP/1.1\r\nHost: there\r\n\r\n" + b" " * INTRODUCTION_BYTES,
        "a request": struct.pack(">I", 30) + b'{"op": "set", "key": "a"}'.ljust(INTRODUCTION_BYTES),
        "a lot": secrets.token_bytes(1 << 20),
    }
    links = []
    for said in says.values():
        link = job.call()
        try:
            link.sendall(said)
        except OSError:
            assert said == says["a lot"]  # it was turned away before it had said it all
        links.append(link)
    assert job.gather("meeting", [0, 1, 2]) == [[0, 10, 20]] * 3
    assert all(map(hangs_up, links[2:]))
    for link in links:
        link.close()
    wait_until(lambda: len(logged) == len(says))
    assert all(line.startswith("rendezvous: 127.0.0.1:") for line in logged)
    reasons = Counter(line.partition(" was turned away: ")[2] for line in logged)
    assert reasons == {
        "it does not know the job's secret": 3,
        "it hung up before it was served": 2,
    }
    assert not job.rendezvous._values


def test_a_silent_stranger_is_turned_away(logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HANDSHAKE_LIMIT", 0.1)
    with closing(listen_here(0)) as listener, closing(Rendezvous(listener, SIZE, SECRET)):
        with socket.create_connection(listener.getsockname(), PATIENT) as silent:
            assert hangs_up(silent)
        wait_until(lambda: logged)
    assert logged[0].endswith("was turned away: it was silent or slow for 0.1 s")


def test_a_wrong_secret_is_turned_away(job: Job, logged: list[str]) -> None:
    stranger = job.client(1, b"of another job")
    with pytest.raises(
        RefusedError, match="belongs to another job and turned rank 1 away: give each job a port"
    ):
        stranger.gather("meeting", None, "meeting", PATIENT)
    wait_until(lambda: logged)  # the server logs after it has answered
    assert "it does not know the job's secret" in logged[0]
    assert job.gather("meeting", [0, 1, 2]) == [[0, 10, 20]] * 3


def test_a_second_process_for_one_rank_is_turned_away(job: Job, logged: list[str]) -> None:
    job.gather("meeting", [0, 1, 2])
    for rank in (1, SIZE):
        with pytest.raises(RefusedError, match=f"turned rank {rank} away"):
            job.client(rank).gather("meeting", None, "meeting", PATIENT)
    wait_until(lambda: logged)
    assert "rank 1 is here already" in logged[0]


def test_what_was_overheard_is_of_no_use(job: Job) -> None:
    """Somebody between a rank and the rendezvous passes everything on, and later says the same again."""
    between, overheard = listen_here(0), []

    def pass_on() -> None:
        link, _ = between.accept()
        with link, job.call() as inner:
            link.sendall(exactly(inner, GREETING_BYTES))
            overheard.append(exactly(link, INTRODUCTION_BYTES))
            inner.sendall(overheard[0])
            link.sendall(exactly(inner, len(YES) + 32))

    thread = threading.Thread(target=pass_on)
    thread.start()
    victim = RendezvousClient(
        0, lambda: RendezvousAddress("127.0.0.1", between.getsockname()[1], SECRET), PATIENT
    )
    with pytest.raises(PeerError):
        victim.gather("meeting", None, "meeting", 0.1)
    thread.join()
    between.close()
    with job.call() as stranger:
        exactly(stranger, GREETING_BYTES)
        stranger.sendall(overheard[0])
        assert exactly(stranger, 4) == b"NO.\n"


def test_a_rank_tells_nothing_to_a_rendezvous_that_does_not_know_the_secret() -> None:
    heard = b""

    def pretend(listener: socket.socket) -> None:
        nonlocal heard
        link, _ = listener.accept()
        with link:
            link.sendall(MAGIC + bytes(32))
            heard = exactly(link, INTRODUCTION_BYTES)
            link.sendall(YES + bytes(32))
            heard += link.recv(1000)

    with closing(listen_here(0)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        rank = RendezvousClient(
            1, lambda: RendezvousAddress("127.0.0.1", listener.getsockname()[1], SECRET), PATIENT
        )
        with pytest.raises(RefusedError, match="does not know this job's secret: nothing is sent to it"):
            rank.gather("meeting", "confidential", "meeting", PATIENT)
        thread.join()
    assert len(heard) == INTRODUCTION_BYTES
    assert SECRET not in heard


def test_another_program_on_the_port() -> None:
    with closing(listen_here(0)) as listener:

        def answer() -> None:
            link, _ = listener.accept()
            with link:
                link.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 9)
                hangs_up(link)

        thread = threading.Thread(target=answer)
        thread.start()
        rank = RendezvousClient(
            1, lambda: RendezvousAddress("127.0.0.1", listener.getsockname()[1], SECRET), PATIENT
        )
        with pytest.raises(RefusedError, match="is no rendezvous of vpipe: give the job another port"):
            rank.gather("meeting", None, "meeting", PATIENT)
        thread.join()


def test_a_flood_of_strangers_keeps_nobody_out(job: Job, logged: list[str]) -> None:
    flood = [job.call() for _ in range(admission.AT_ONCE + 40)]
    assert job.gather("meeting", [0, 1, 2]) == [[0, 10, 20]] * 3
    for link in flood:
        link.close()
    wait_until(lambda: len(job.rendezvous._connected) == SIZE)
    wait_until(lambda: len(logged) >= admission.LOGGED)
    assert len(logged) == admission.LOGGED  # and the disk is not filled
    assert logged[-1].endswith("further ones are not logged")


def test_more_ranks_than_strangers_are_kept_may_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has to make room for others while it proves who it is tries again."""
    monkeypatch.setattr(admission, "AT_ONCE", 4)
    size, listener = 40, listen_here(0)
    where = RendezvousAddress("127.0.0.1", listener.getsockname()[1], SECRET)
    with closing(Rendezvous(listener, size, SECRET)), ThreadPoolExecutor(size) as threads:
        ranks = [RendezvousClient(rank, lambda: where, PATIENT) for rank in range(size)]
        met = list(threads.map(lambda rank: rank.gather("all", rank._me.rank, "all", PATIENT), ranks))
    assert met == [list(range(size))] * size


def test_a_message_that_is_too_large_is_refused_by_both_ends(job: Job, logged: list[str]) -> None:
    with pytest.raises(PeerError, match=r"has \d+ bytes: at most 16777216 are sent"):
        job.ranks[0].gather("meeting", "x" * LARGEST, "meeting", PATIENT)
    job.gather("meeting", [0, 1, 2])
    job.ranks[1]._own.link.sendall(struct.pack(">I", LARGEST + 1))
    wait_until(lambda: logged)
    assert "it announced a message of 16777217 bytes" in logged[0]


@draws(60)
@given(noise=st.lists(st.binary(max_size=300), min_size=1, max_size=3))
def test_noise(job: Job, noise: list[bytes]) -> None:
    with job.call() as stranger:
        try:
            for part in noise:
                stranger.sendall(part)
        except OSError:
            return
        if sum(map(len, noise)) >= INTRODUCTION_BYTES:
            assert hangs_up(stranger)
    assert job.rendezvous._task.thread.is_alive()


def test_even_a_rank_may_only_ask_what_there_is_to_ask(job: Job, logged: list[str]) -> None:
    job.gather("meeting", [0, 1, 2])
    for request in ([], {"op": "eval", "key": "1"}, {"op": "gather"}, {"op": "set", "key": {}, "value": 1}):
        rank = job.client(0)
        rank._me = job.ranks[0]._me
        raw = json.dumps(request).encode()
        rank._connect().sendall(struct.pack(">I", len(raw)) + raw)
        with pytest.raises(PeerError):
            rank.change("check", "x")
    wait_until(lambda: len(logged) == 4)
    assert all("it sent no valid request" in line for line in logged)
    assert job.gather("again", [0, 1, 2]) == [[0, 10, 20]] * 3


class HastyStore(RendezvousStore):
    """Torch's barrier looks every 10 s, this store lets it look more often; `looks` counts them."""

    looks = 0

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.looks += 1
        super().wait(keys, timedelta(seconds=0.05))


def test_a_rank_that_is_late_at_torchs_barrier_is_waited_for(job: Job) -> None:
    early, late = HastyStore(job.ranks[0]), HastyStore(job.ranks[1])

    def come(rank: int, store: RendezvousStore) -> None:
        distributed_c10d._store_based_barrier(
            rank, store, "ours", 2, timedelta(seconds=PATIENT), timedelta(seconds=PATIENT)
        )

    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(come, 0, early)
        wait_until(lambda: early.looks > 2 or waiting.done())
        threads.submit(come, 1, late).result(PATIENT)
        waiting.result(PATIENT)


def test_a_rank_that_has_ended_is_not_waited_for_at_torchs_barrier(job: Job) -> None:
    store = RendezvousStore(job.ranks[0])
    job.ranks[1].close()
    with pytest.raises(PeerError, match="rank 1 ended or was killed"):
        distributed_c10d._store_based_barrier(0, store, "ours", 2, timedelta(seconds=PATIENT))


# Ports and interfaces


def test_two_jobs_one_port(job: Job) -> None:
    """Row 12: whoever starts the second is errors so, by the launcher or by its rank 0."""
    with pytest.raises(
        ConfigError, match=f"port is {job.port}: it cannot be used .* another job or program has it"
    ):
        listen_here(job.port)
    with pytest.raises(
        PeerError, match=f"port {job.port} of 127.0.0.1 is taken: another job or program listens"
    ):
        _listener("127.0.0.1", job.port)


def test_a_socket_that_a_container_did_not_pass_on_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LISTENER, "987654")
    with closing(_listener("127.0.0.1", 0)) as listener:
        assert listener.getsockname()[1]


def test_nobody_listens_on_other_interfaces(job: Job) -> None:
    assert job.listener.getsockname()[0] == "127.0.0.1"
    with closing(_listener("localhost", 0)) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


@pytest.mark.parametrize("address", ["192.0.2.1", "nowhere.invalid"])
def test_an_address_that_is_not_ours(address: str) -> None:
    with pytest.raises(
        PeerError, match=f"MASTER_ADDR is '{address}', where rank 0 cannot listen .*: give an address"
    ):
        _listener(address, 0)
