"""The server of the rendezvous: rank 0 keeps values that the ranks of a job exchange at the start, for nobody else.

One thread serves all ranks. A caller first proves that it knows the job's secret (`handshake`); until then nothing
that it sends is interpreted, and soon it is turned away. Its requests are JSON with their length in front:

    {"op": "gather", "key": ..., "value": ..., "timeout": ...}    everybody's value, when all have come
    {"op": "get", "key": ..., "timeout": ...}                      a value, when a rank has set it
    {"op": "set" | "add" | "check" | "delete", ...}                as their names say

A rank whose connections have ended is gone: a rank that waits for it is answered so at once.
"""

import asyncio
import json
import logging
import secrets
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vpipe.communication.rendezvous.handshake import (
    CHALLENGE,
    INTRODUCTION_BYTES,
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
QUEUE = 128
"""Callers that the kernel keeps for us until they are accepted."""
LOGGED = 20
"""Strangers that are logged at most: more could fill the disk."""

CROWDED = "too many others are waiting"

log = logging.getLogger("vpipe.rendezvous")


class _TurnedAway(Exception):
    """The reason why a caller is not served, for the log."""


@dataclass(eq=False)
class _Waiting:
    """A request that cannot be answered yet."""

    caller: asyncio.StreamWriter
    rank: int
    op: str
    key: str


class Rendezvous:
    """Serves `size` ranks on the socket until it is closed."""

    def __init__(self, listener: socket.socket, size: int, secret: bytes) -> None:
        self._size = size
        self._secret = secret
        self._values: dict[str, str] = {}
        self._gathered: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self._callers: dict[asyncio.StreamReader, int | None] = {}  # the rank of each; None: a stranger
        self._waiting: list[_Waiting] = []
        self._processes: dict[int, bytes] = {}  # rank ▶ the process that it is
        self._turned_away = 0
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="vpipe rendezvous", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self._serve(listener))
        finally:
            self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        # Accept one caller at a time: ranks of a large job are introduced before many more have come.
        server = await asyncio.start_server(self._serve_caller, sock=listener, backlog=1)
        listener.listen(QUEUE)
        await self._closing.wait()
        server.close()
        self._waiting.clear()
        for reader in self._callers:
            reader.feed_eof()
        while self._callers:
            await asyncio.sleep(0)  # until all connections are closed

    # Callers

    async def _serve_caller(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = _shown(writer.get_extra_info("peername"))
        try:
            rank = await self._introduction(reader, writer)
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > LARGEST:
                    raise _TurnedAway(f"it announced a message of {length} bytes")
                self._take(writer, rank, await reader.readexactly(length))
        except _TurnedAway as error:
            self._log_stranger(address, str(error))
        except (OSError, asyncio.IncompleteReadError):  # it has gone
            if self._callers.get(reader) is None and not self._closing.is_set():
                self._log_stranger(address, "it hung up before it had proved that it belongs to the job")
        finally:
            self._callers.pop(reader, None)
            writer.close()
            self._waiting = [waiting for waiting in self._waiting if waiting.caller is not writer]
            self._answer_waiting()

    async def _introduction(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """The rank of a caller, once it has proved that it belongs to the job."""
        strangers = [known for known, rank in self._callers.items() if rank is None]
        if len(strangers) >= STRANGERS:
            del self._callers[strangers[0]]
            strangers[0].set_exception(_TurnedAway(CROWDED))
        self._callers[reader] = None
        challenge = secrets.token_bytes(CHALLENGE)
        writer.write(greeting(challenge))
        try:
            proof = await asyncio.wait_for(reader.readexactly(INTRODUCTION_BYTES), HANDSHAKE_LIMIT)
        except asyncio.TimeoutError:
            raise _TurnedAway(
                f"it did not prove within {HANDSHAKE_LIMIT:g} s that it belongs to the job"
            ) from None
        if reader not in self._callers:
            raise _TurnedAway(CROWDED)  # while its proof arrived; it will try again
        checked = check_proof(self._secret, challenge, proof)
        if checked is None:
            writer.write(refusal())
            raise _TurnedAway("it does not know the job's secret")
        who, answer = checked
        if who.rank >= self._size or self._processes.setdefault(who.rank, who.process) != who.process:
            writer.write(refusal())
            raise _TurnedAway(f"rank {who.rank} is here already, or there is none")
        self._callers[reader] = who.rank
        writer.write(answer)
        return who.rank

    def _log_stranger(self, address: str, why: str) -> None:
        self._turned_away += 1
        if self._turned_away <= LOGGED:
            more = "; further ones are not logged" if self._turned_away == LOGGED else ""
            log.warning("rendezvous: %s was turned away: %s%s", address, why, more)

    # Requests

    def _take(self, caller: asyncio.StreamWriter, rank: int, message: bytes) -> None:
        try:
            request = json.loads(message)
            op, key = request["op"], request["key"]
            if op in ("gather", "get"):
                if op == "gather":
                    self._gathered[key][rank] = request["value"]
                waiting = _Waiting(caller, rank, op, str(key))
                self._waiting.append(waiting)
                self._loop.call_later(float(request["timeout"]), self._answer_waiting, waiting)
            else:
                caller.write(framed({"value": self._change(op, key, request["value"])}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _TurnedAway(f"it sent no valid request: {error!r}") from None
        self._answer_waiting()

    def _change(self, op: str, key: str, value: Any) -> Any:
        if op == "set":
            self._values[key] = value
            return None
        if op == "add":
            self._values[key] = str(int(self._values.get(key, "0")) + int(value))
            return int(self._values[key])
        if op == "check":
            return key in self._values
        if op == "delete":
            return self._values.pop(key, None) is not None
        raise ValueError(op)

    def _answer_waiting(self, late: _Waiting | None = None) -> None:
        """Answer the requests for which all has come, or a rank never will, or whose time is up."""
        gone = self._processes.keys() - set(self._callers.values())
        # Rank 0 comes last: when it has its answer, it may end, and this thread with it.
        for waiting in sorted(self._waiting, key=lambda waiting: waiting.rank, reverse=True):
            answer = self._ready(waiting, gone, waiting is late)
            if answer is not None:
                self._waiting.remove(waiting)
                waiting.caller.write(framed(answer))
        for key in [key for key, values in self._gathered.items() if len(values) == self._size]:
            del self._gathered[key]  # all have been answered

    def _ready(self, waiting: _Waiting, gone: set[int], late: bool) -> dict[str, Any] | None:
        here: Iterable[int]
        if waiting.op == "get":
            here = (waiting.rank,)  # only the caller knows whose value it is
            if waiting.key in self._values:
                return {"value": self._values[waiting.key]}
        else:
            values = self._gathered[waiting.key]
            here = values
            if len(values) == self._size:
                return {"value": [values[rank] for rank in range(self._size)]}
        if not gone and not late:
            return None
        missing = set(range(self._size)).difference(here)
        if missing & gone:
            return {"gone": sorted(missing & gone)}
        return {"missing": sorted(missing)} if late else None


def framed(message: Any) -> bytes:
    """A message as it travels."""
    written = json.dumps(message).encode()
    return LENGTH.pack(len(written)) + written


def _shown(address: Any) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a local process"
