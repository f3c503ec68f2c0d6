"""A rank's side of the rendezvous: connections to it, and requests."""

import errno
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet

from vpipe.communication.handshake import (
    ImpostorError,
    Introduction,
    NoHandshakeError,
    RefusedError,
    TurnedAwayError,
    introduce,
)
from vpipe.communication.peers import CONNECT_LIMIT
from vpipe.communication.rendezvous.server import LARGEST, LENGTH, framed
from vpipe.communication.sockets import receive_exactly
from vpipe.errors import PeerError
from vpipe.system.deadline import Deadline

GRACE = 10.0
"""Seconds that an answer may be late; then rank 0, which gives it, is taken for stuck."""
IDLE_WAIT = 60.0
"""Seconds between two questions of a rank that waits for the end of the run."""
RETRY = 0.1
_END = "the end of the run"
_REFUSED = {
    NoHandshakeError: "what answers at {place} is no rendezvous of vpipe: give the job another port",
    TurnedAwayError: "the rendezvous at {place} belongs to another job and turned rank {rank} away: "
    "give each job a port of its own, and all ranks of a job the same VPIPE_SECRET",
    ImpostorError: "what answers at {place} does not know this job's secret: nothing is sent to it",
}


class RendezvousAddress(NamedTuple):
    host: str
    port: int
    secret: bytes

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class LateError(PeerError):
    """A value is not there yet; it may still come."""


class RendezvousClient:
    """Each thread has a connection of its own, so that one that waits does not hold up another.

    `find` is called for each attempt to connect: it may still give the address of an earlier attempt of the job.
    """

    def __init__(self, rank: int, find: Callable[[], RendezvousAddress], timeout: float) -> None:
        self.timeout = timeout
        self._me = Introduction(rank, secrets.token_bytes(16))
        self._find = find
        self._own = threading.local()
        self._links: WeakSet[socket.socket] = WeakSet()  # a thread that ends takes its own with it

    def gather(self, key: str, value: Any, what: str, timeout: float) -> list[Any]:
        """Everybody's value, in order of rank; `what` names the occasion in messages."""
        values = self._request(what, timeout, op="gather", key=key, value=json.dumps(value))
        return [json.loads(written) for written in values]

    def get(self, key: str, timeout: float) -> str:
        """A value, once a rank has set it."""
        return self._request(f"the value of {key!r}", timeout, LateError, op="get", key=key)

    def change(self, op: str, key: str, value: Any = None) -> Any:
        """`set`, `add`, `check` or `delete`."""
        return self._request(f"{op} {key!r}", 0.0, op=op, key=key, value=value)

    def come_as_idle(self) -> None:
        self.change("set", f"idle/{self._me.rank}", "here")

    def wait_for_idle(self, rank: int, timeout: float) -> None:
        """Until an idle rank has come: where it finds the rendezvous may be forgotten then."""
        try:
            self.get(f"idle/{rank}", timeout)
        except LateError:
            raise PeerError(
                f"rank {rank}, which the plan leaves idle, did not come to the rendezvous within {timeout:g} s"
            ) from None

    def tell_end(self) -> None:
        """Let the idle ranks know that the run has ended as it should. For rank 0, before its process ends."""
        self.change("set", _END, "well")
        self.change("check", _END)  # when this is answered, the idle ranks have been

    def wait_for_end(self) -> None:
        """Until rank 0 tells that the run has ended; raises if it ends without that."""
        while True:
            try:
                self.get(_END, IDLE_WAIT)
                return
            except LateError:
                continue

    def close(self) -> None:
        for link in list(self._links):
            link.close()

    def _request(self, what: str, timeout: float, late: type[PeerError] = PeerError, **request: Any) -> Any:
        message = framed(request | {"timeout": timeout})
        if len(message) > LARGEST:
            raise PeerError(
                f"this rank's message for {what!r} has {len(message)} bytes: at most {LARGEST} are sent"
            )
        link: socket.socket = self._own.link if hasattr(self._own, "link") else self._connect()
        try:
            link.settimeout(timeout + GRACE)
            link.sendall(message)
            deadline = Deadline(timeout + GRACE)
            (length,) = LENGTH.unpack(receive_exactly(link, LENGTH.size, deadline))
            answer = json.loads(receive_exactly(link, length, deadline))
        except TimeoutError:
            raise PeerError(f"rank 0, which serves the rendezvous, did not answer at {what!r}") from None
        except OSError as error:
            raise PeerError(
                f"rank 0, which serves the rendezvous, has gone: it ended or was killed before {what!r} ({error}); "
                "see its own output"
            ) from None
        if "gone" in answer:
            raise PeerError(
                f"{_ranks(answer['gone'])} ended or was killed before {what!r}; see its own output"
            )
        if "missing" in answer:
            raise late(f"{_ranks(answer['missing'])} did not come to {what!r} within {timeout:g} s")
        return answer["value"]

    def _connect(self) -> socket.socket:
        """Rank 0 may still be starting: until the timeout, it is tried again."""
        deadline = Deadline(self.timeout)
        while True:
            place = self._find()
            try:
                link = self._try(place, deadline)
            except OSError as error:
                if error.errno == errno.EMFILE:
                    raise  # it is this rank that cannot
                if not deadline.left():
                    raise PeerError(
                        f"rank 0 did not open the rendezvous at {place} within {self.timeout:g} s: {error}"
                    ) from None
                time.sleep(RETRY)
            except RefusedError:
                if self._find() == place:
                    raise
                # It was the address of an earlier attempt, whose port another program has by now.
            else:
                self._own.link = link
                self._links.add(link)
                return link

    def _try(self, place: RendezvousAddress, deadline: Deadline) -> socket.socket:
        link = socket.create_connection(
            (place.host, place.port), max(RETRY, min(CONNECT_LIMIT, deadline.left()))
        )
        try:
            if link.getsockname() == link.getpeername():
                raise ConnectionRefusedError("no server listens there")  # a port that called itself
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            introduce(link, place.secret, self._me, deadline)
        except OSError:
            link.close()
            raise
        except RefusedError as error:
            link.close()
            raise type(error)(_REFUSED[type(error)].format(place=place, rank=self._me.rank)) from None
        return link


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
