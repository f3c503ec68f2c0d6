"""The server of the rendezvous: rank 0 keeps values that the ranks of a job exchange at the start, for nobody else.

One thread serves all ranks. A caller first proves that it knows the job's secret (`handshake`); until then nothing
that it sends is interpreted, and soon it is turned away. Its requests are JSON with their length in front:

    {"op": "gather", "key": ..., "value": ..., "timeout": ...}    everybody's value, when all have come
    {"op": "get", "key": ..., "timeout": ...}                      a value, when a rank has set it
    {"op": "set" | "add" | "check" | "delete", ...}                as their names say

A rank whose connections have ended is gone: a rank that waits for it is answered so at once.
"""

import json
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vpipe.communication.rendezvous.handshake import (
    CHALLENGE,
    INTRODUCTION_BYTES,
    Introduction,
    check_proof,
    greeting,
    refusal,
)

LENGTH = struct.Struct(">I")
LARGEST = 16 << 20
"""Bytes of a message at most."""
HANDSHAKE_LIMIT = 5.0
"""Seconds that a caller has to prove that it belongs to the job."""
STRANGERS = 64
"""Callers that have not proved it yet, at most; for a further one the oldest has to go."""
LOGGED = 20
"""Strangers that are logged at most: more could fill the disk."""

log = logging.getLogger("vpipe.rendezvous")


@dataclass(eq=False)
class _Caller:
    link: socket.socket
    address: str
    came: float
    challenge: bytes
    who: Introduction | None = None
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Waiting:
    """A request that cannot be answered yet."""

    caller: _Caller
    rank: int
    op: str
    key: str
    deadline: float


class Rendezvous:
    """Serves `size` ranks on the socket until it is closed."""

    def __init__(self, listener: socket.socket, size: int, secret: bytes) -> None:
        self._size = size
        self._secret = secret
        self._values: dict[str, str] = {}
        self._gathered: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self._callers: list[_Caller] = []
        self._waiting: list[_Waiting] = []
        self._processes: dict[int, bytes] = {}  # rank ▶ the process that it is
        self._turned_away = 0
        self._listener = listener
        self._stopper, self._stopped = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        for end in (listener, self._stopped):
            self._selector.register(end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="vpipe rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopper.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._serve_once():
                pass
        finally:
            for end in (self._listener, self._stopped, *(caller.link for caller in self._callers)):
                end.close()
            self._selector.close()

    def _serve_once(self) -> bool:
        for event, mask in self._selector.select(self._pause()):
            if event.fileobj is self._stopped:
                return False
            if event.fileobj is self._listener:
                self._accept()
            elif event.data in self._callers:  # it may have gone while another one was served
                if mask & selectors.EVENT_WRITE:
                    self._flush(event.data)
                if mask & selectors.EVENT_READ:
                    self._read(event.data)
        now = time.monotonic()
        for caller in [c for c in self._callers if c.who is None and now - c.came > HANDSHAKE_LIMIT]:
            self._turn_away(
                caller, f"it did not prove within {HANDSHAKE_LIMIT:g} s that it belongs to the job"
            )
        self._answer_waiting(now)
        return True

    def _pause(self) -> float | None:
        """Until the next deadline."""
        times = [waiting.deadline for waiting in self._waiting]
        times += [caller.came + HANDSHAKE_LIMIT for caller in self._callers if caller.who is None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    # Callers

    def _accept(self) -> None:
        try:
            link, address = self._listener.accept()
        except OSError:
            return  # it went again, or there are no descriptors left: the next caller may be accepted
        link.setblocking(False)
        caller = _Caller(link, _shown(address), time.monotonic(), secrets.token_bytes(CHALLENGE))
        strangers = [known for known in self._callers if known.who is None]
        if len(strangers) >= STRANGERS:
            self._turn_away(strangers[0], "too many others are waiting")
        self._callers.append(caller)
        self._selector.register(link, selectors.EVENT_READ, caller)
        self._send(caller, greeting(caller.challenge))

    def _turn_away(self, caller: _Caller, why: str, answer: bytes = b"") -> None:
        self._turned_away += 1
        if self._turned_away <= LOGGED:
            more = "; further ones are not logged" if self._turned_away == LOGGED else ""
            log.warning("rendezvous: %s was turned away: %s%s", caller.address, why, more)
        with suppress(OSError):
            caller.link.send(answer)
        self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        self._callers.remove(caller)
        self._waiting = [waiting for waiting in self._waiting if waiting.caller is not caller]
        self._selector.unregister(caller.link)
        caller.link.close()

    def _read(self, caller: _Caller) -> None:
        wanted = (1 << 16) if caller.who else INTRODUCTION_BYTES - len(caller.received)
        try:
            more = caller.link.recv(wanted)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            if caller.who is None:
                self._turn_away(caller, "it hung up before it had proved that it belongs to the job")
            else:
                self._drop(caller)
            return
        caller.received += more
        if caller.who is not None:
            self._take_messages(caller)
        elif len(caller.received) == INTRODUCTION_BYTES:
            self._introduce(caller)

    def _introduce(self, caller: _Caller) -> None:
        checked = check_proof(self._secret, caller.challenge, bytes(caller.received))
        if checked is None:
            self._turn_away(caller, "it does not know the job's secret", refusal())
            return
        who, answer = checked
        if who.rank >= self._size or self._processes.setdefault(who.rank, who.process) != who.process:
            self._turn_away(caller, f"rank {who.rank} is here already, or there is none", refusal())
            return
        caller.who = who
        caller.received.clear()
        self._send(caller, answer)

    def _send(self, caller: _Caller, message: bytes) -> None:
        caller.unsent += message
        self._flush(caller)

    def _flush(self, caller: _Caller) -> None:
        with suppress(OSError):  # full: go on later; broken: reading will find it
            del caller.unsent[: caller.link.send(caller.unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.unsent else 0)
        self._selector.modify(caller.link, events, caller)

    # Requests

    def _take_messages(self, caller: _Caller) -> None:
        while len(caller.received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(caller.received)
            if length > LARGEST:
                self._turn_away(caller, f"it announced a message of {length} bytes")
                return
            if len(caller.received) < LENGTH.size + length:
                return
            message = bytes(caller.received[LENGTH.size : LENGTH.size + length])
            del caller.received[: LENGTH.size + length]
            try:
                self._take(caller, json.loads(message))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                self._turn_away(caller, f"it sent no valid request: {error!r}")
                return

    def _take(self, caller: _Caller, request: dict[str, Any]) -> None:
        assert caller.who is not None
        op, key = request["op"], request["key"]
        if op in ("gather", "get"):
            if op == "gather":
                self._gathered[key][caller.who.rank] = request["value"]
            deadline = time.monotonic() + float(request["timeout"])
            self._waiting.append(_Waiting(caller, caller.who.rank, op, key, deadline))
        elif op == "set":
            self._values[key] = request["value"]
            self._send(caller, framed({"value": None}))
        elif op == "add":
            self._values[key] = str(int(self._values.get(key, "0")) + int(request["value"]))
            self._send(caller, framed({"value": int(self._values[key])}))
        elif op == "check":
            self._send(caller, framed({"value": key in self._values}))
        elif op == "delete":
            self._send(caller, framed({"value": self._values.pop(key, None) is not None}))
        else:
            raise ValueError(op)

    def _answer_waiting(self, now: float) -> None:
        present = {caller.who.rank for caller in self._callers if caller.who is not None}
        gone = self._processes.keys() - present
        # Rank 0 comes last: when it has its answer, it may end, and this thread with it.
        for waiting in sorted(self._waiting, key=lambda waiting: waiting.rank, reverse=True):
            answer = self._ready(waiting, gone, now)
            if answer is not None:
                self._waiting.remove(waiting)
                self._send(waiting.caller, framed(answer))
        for key in [key for key, values in self._gathered.items() if len(values) == self._size]:
            del self._gathered[key]  # all have been answered

    def _ready(self, waiting: _Waiting, gone: set[int], now: float) -> dict[str, Any] | None:
        if waiting.op == "get":
            missing = set(range(self._size)) - {waiting.rank}  # only the caller knows whose value it is
            if waiting.key in self._values:
                return {"value": self._values[waiting.key]}
        else:
            values = self._gathered[waiting.key]
            missing = set(range(self._size)) - values.keys()
            if not missing:
                return {"value": [values[rank] for rank in range(self._size)]}
        if missing & gone:
            return {"gone": sorted(missing & gone)}
        return {"missing": sorted(missing)} if now >= waiting.deadline else None


def framed(message: Any) -> bytes:
    """A message as it travels."""
    written = json.dumps(message).encode()
    return LENGTH.pack(len(written)) + written


def _shown(address: Any) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a local process"
