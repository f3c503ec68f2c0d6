"""Connections between ranks in a crowd of strangers (row 27 of docs/reliability.md). Ranks are threads."""

import logging
import multiprocessing
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.waiting import wait_until
from vpipe.communication import admission, heartbeat
from vpipe.communication.handshake import Introduction, TurnedAwayError, introduce
from vpipe.communication.heartbeat import connect_heartbeat
from vpipe.communication.peers import connect_peers
from vpipe.communication.shared_memory import connect_all
from vpipe.errors import PeerError
from vpipe.system.deadline import Deadline

SIZE = 3
PATIENT = 100.0
"""Seconds that nothing takes which goes well, on however busy a machine."""
NOBODY = 65534
Gather = Callable[[str, Any], list[Any]]


@pytest.fixture
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    admission.log.addHandler(handler)
    yield lines
    admission.log.removeHandler(handler)


def meet(
    connect: Callable[[int, Gather], dict[int, socket.socket]], strangers: Callable[[list[Any]], object]
) -> list[dict[int, socket.socket]]:
    """The connections of each rank; the strangers learn where the ranks listen before any rank calls another."""
    values: dict[int, Any] = {}

    def done() -> None:
        strangers([values[rank][0] for rank in range(SIZE)])

    barrier = threading.Barrier(SIZE, done)

    def of(rank: int) -> dict[int, socket.socket]:
        def gather(name: str, mine: Any) -> list[Any]:
            values[rank] = mine
            barrier.wait(PATIENT)
            return [values[each] for each in range(SIZE)]

        return connect(rank, gather)

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(of, range(SIZE)))


def near(rank: int, gather: Gather) -> dict[int, socket.socket]:
    return connect_all(rank, [peer for peer in range(SIZE) if peer != rank], gather, PATIENT)


def between_hosts(rank: int, gather: Gather) -> dict[int, socket.socket]:
    made: Any = connect_heartbeat(rank, ["here"] * SIZE, ("127.0.0.1", 1), gather, PATIENT)
    return made


def talk(links: list[dict[int, socket.socket]]) -> None:
    """Each connection leads to the rank that it is said to lead to."""
    for rank, mine in enumerate(links):
        assert sorted(mine) == [peer for peer in range(SIZE) if peer != rank]
        for peer, link in mine.items():
            link.settimeout(PATIENT)
            link.sendall(b"%d to %d" % (rank, peer))
    for rank, mine in enumerate(links):
        for peer, link in mine.items():
            assert link.recv(100) == b"%d to %d" % (peer, rank)
            link.close()


def call(address: Any) -> socket.socket:
    if isinstance(address, str):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(PATIENT)
        link.connect(address)
        return link
    return socket.create_connection(tuple(address), PATIENT)


@pytest.mark.parametrize("says", [None, b"", b"x", b"x" * 500], ids=["silent", "nothing", "little", "noise"])
def test_strangers_do_not_delay_ranks_of_one_host(says: bytes | None, logged: list[str]) -> None:
    """None of them ends before the ranks have met: each would have cost the handshake's limit."""
    with ExitStack() as stack:

        def crowd(addresses: list[Any]) -> None:
            for address in addresses * 50:
                link = stack.enter_context(call(address))
                if says is not None:
                    link.sendall(says)

        talk(meet(near, crowd))


def test_strangers_do_not_delay_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "Heartbeat", lambda rank, links, hosts, limit: links)
    links: list[socket.socket] = []
    talk(meet(between_hosts, lambda addresses: links.extend(map(call, addresses * 50))))
    for link in links:
        link.close()


def be_another_user(address: str, links: int, said: Connection) -> None:
    """The answer to a call from a process of another user."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    heard = b""
    for link in [call(address) for _ in range(links)]:
        with suppress(ConnectionResetError), link:
            heard += link.recv(100)
    said.send(heard)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_is_turned_away_by_the_kernels_word(logged: list[str]) -> None:
    """It gets no answer, not even a greeting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen(socket.SOMAXCONN)
        work = admission.serve_members(listener, b"key", "a socket", lambda who: "", lambda who, link: None)
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        address = listener.getsockname().decode()
        stranger = context.Process(target=be_another_user, args=(address, 100, there), daemon=True)
        stranger.start()
        with closing(admission.BackgroundTask(work, "test")):
            assert here.poll(PATIENT)
            assert here.recv() == b""
        stranger.join()
    assert len(logged) == admission.LOGGED
    assert f" of user {NOBODY} was turned away: it belongs to user {NOBODY}, this job to user 0" in logged[0]


def test_who_knows_the_protocol_and_not_the_key_is_not_let_in(logged: list[str]) -> None:
    welcomed: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        work = admission.serve_members(
            listener, b"key", "a socket", lambda who: "", lambda who, link: welcomed.append(who.rank)
        )
        with closing(admission.BackgroundTask(work, "test")):
            for key in (b"guessed", b"key"):
                with call(listener.getsockname().decode()) as link:
                    try:
                        introduce(link, key, Introduction(2, bytes(16)), Deadline(PATIENT))
                    except TurnedAwayError:
                        assert key == b"guessed"
            wait_until(lambda: welcomed and logged)
    assert welcomed == [2]
    assert [line.partition("was ")[2] for line in logged] == [
        "turned away: it does not know the job's secret"
    ]


def test_an_impostor_in_a_ranks_place_is_told_nothing() -> None:
    """Somebody who listens where a rank listened learns no key and gets no connection."""
    heard = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()

        def pretend() -> None:
            nonlocal heard
            link, _ = listener.accept()
            with link:
                link.send(b"vpipe handshake 2\n" + bytes(32))
                heard = link.recv(1000)
                link.send(b"YES\n" + bytes(32))
                heard += link.recv(1000)

        thread = threading.Thread(target=pretend)
        thread.start()
        others = [[listener.getsockname().decode(), b"key".hex()], ["", ""]]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
            own.bind("")
            own.listen()
            expected = r"in place of rank 0 \(test\) does not know the key: nothing is sent"
            with pytest.raises(PeerError, match=expected):
                connect_peers(1, [0], own, "test", lambda name, mine: others, PATIENT)
        thread.join()
    assert b"key" not in heard
    assert len(heard) == 84


def test_a_rank_that_has_gone_is_named_at_once_and_one_that_never_calls_at_the_limit() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
        own.bind("")
        own.listen()
        gone = [["\0vpipe-nobody-listens-here", b"key".hex()], ["", ""]]
        with pytest.raises(PeerError, match=r"rank 0 \(test\) has gone: it ended or was killed"):
            connect_peers(1, [0], own, "test", lambda name, mine: gone, PATIENT)
        with pytest.raises(
            PeerError, match=r"ranks \[1, 2\] did not connect to rank 0 within 0.1 s \(test\)"
        ):
            connect_peers(0, [1, 2], own, "test", lambda name, mine: [mine], 0.1)


def test_a_flood_takes_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more than a quarter of the limit, whatever AT_ONCE says."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (40, hard))
    served = 0

    async def hold(link: socket.socket) -> bool:
        nonlocal served
        served += 1
        try:
            await admission.asyncio.sleep(PATIENT)
        finally:
            served -= 1
        return False

    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        log = admission.CallerLog("a socket")
        task = admission.BackgroundTask(admission.serve_callers(listener, hold, log, PATIENT, 1000), "test")
        before = len(os.listdir("/proc/self/fd"))
        links = [call(listener.getsockname()) for _ in range(50)]
        wait_until(lambda: log._count == 40)
        assert served == 10
        wait_until(lambda: len(os.listdir("/proc/self/fd")) == before + 50 + 10)
        task.close()
        for link in links:
            link.close()
    assert served == 0
