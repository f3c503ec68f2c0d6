"""The server of the rendezvous: rank 0 keeps values that the ranks of a job exchange at the start, for nobody else.

One thread serves all ranks. A caller first proves that it knows the job's secret (`admission.py`); until then nothing
that it sends is interpreted, and soon it is turned away. Its requests are JSON with their length in front:

    {"op": "gather", "key": ..., "value": ..., "timeout": ...}    everybody's value, when all have come
    {"op": "get", "key": ..., "timeout": ...}                      a value, when a rank has set it
    {"op": "set" | "add" | "check" | "delete", ...}                as their names say

A rank whose connections have ended is gone: a rank that waits for it is answered so at once.
"""

import asyncio
import json
import socket
import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vpipe.communication.admission import BackgroundTask, CallerLog, TurnedAway, serve_members, shown
from vpipe.communication.handshake import Introduction
from vpipe.system.deadline import Deadline

LENGTH = struct.Struct(">I")
LARGEST = 16 << 20
"""Bytes of a message at most."""


@dataclass(eq=False)
class _Waiting:
    """A request that cannot be answered yet."""

    caller: asyncio.StreamWriter
    rank: int
    op: str
    key: str
    timer: asyncio.Task[None] | None = None


class Rendezvous:
    """Serves `size` ranks on the socket until it is closed, and so many idle ones, which have no values."""

    def __init__(self, listener: socket.socket, size: int, secret: bytes, idle: int = 0) -> None:
        self._size = size
        self._idle = idle
        self._values: dict[str, str] = {}
        self._gathered: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self._connected: dict[asyncio.Task[None], int] = {}  # what serves a connection ▶ the rank at its end
        self._waiting: list[_Waiting] = []
        self._processes: dict[int, bytes] = {}  # rank ▶ the process that it is
        self._turned_away = CallerLog("rendezvous")
        self._task = BackgroundTask(self._serve(listener, secret), "vpipe rendezvous")

    def close(self) -> None:
        self._task.close()

    async def _serve(self, listener: socket.socket, secret: bytes) -> None:
        try:
            with listener:
                await serve_members(listener, secret, "rendezvous", self._check, self._welcome)
        finally:
            for waiting in list(self._waiting):
                self._drop(waiting)
            left = list(self._connected)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await asyncio.sleep(0)  # until all connections are closed

    # Ranks

    def _check(self, who: Introduction) -> str:
        if (
            who.rank >= self._size + self._idle
            or self._processes.setdefault(who.rank, who.process) != who.process
        ):
            return f"rank {who.rank} is here already, or there is none"
        return ""

    def _welcome(self, who: Introduction, link: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._serve_rank(who.rank, link))
        self._connected[task] = who.rank
        task.add_done_callback(self._hung_up)

    def _hung_up(self, task: asyncio.Task[None]) -> None:
        del self._connected[task]
        self._answer_waiting()

    async def _serve_rank(self, rank: int, link: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=link)
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > LARGEST:
                    raise TurnedAway(f"it announced a message of {length} bytes")
                self._take(writer, rank, await reader.readexactly(length))
        except TurnedAway as error:
            self._turned_away.add(shown(link), str(error))
        except (OSError, asyncio.IncompleteReadError):
            pass  # it has gone
        finally:
            for waiting in [waiting for waiting in self._waiting if waiting.caller is writer]:
                self._drop(waiting)
            writer.close()

    # Requests

    def _take(self, caller: asyncio.StreamWriter, rank: int, message: bytes) -> None:
        try:
            request = json.loads(message)
            op, key = request["op"], request["key"]
            if op in ("gather", "get"):
                if op == "gather":
                    if rank >= self._size:
                        raise ValueError(f"rank {rank} is idle")
                    self._gathered[key][rank] = request["value"]
                waiting = _Waiting(caller, rank, op, str(key))
                self._waiting.append(waiting)
                deadline = Deadline(float(request["timeout"]))
                waiting.timer = asyncio.get_running_loop().create_task(self._expire(waiting, deadline))
            else:
                caller.write(framed({"value": self._change(op, key, request["value"])}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TurnedAway(f"it sent no valid request: {error!r}") from None
        self._answer_waiting()

    async def _expire(self, waiting: _Waiting, deadline: Deadline) -> None:
        while left := deadline.slice():
            await asyncio.sleep(left)
        self._answer_waiting(waiting)

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
        gone = self._processes.keys() - set(self._connected.values())
        # Rank 0 comes last: when it has its answer, it may end, and this thread with it.
        for waiting in sorted(self._waiting, key=lambda waiting: waiting.rank, reverse=True):
            answer = self._ready(waiting, gone, waiting is late)
            if answer is not None:
                self._drop(waiting)
                waiting.caller.write(framed(answer))
        for key in [key for key, values in self._gathered.items() if len(values) == self._size]:
            del self._gathered[key]  # all have been answered

    def _drop(self, waiting: _Waiting) -> None:
        self._waiting.remove(waiting)
        if waiting.timer is not None:
            waiting.timer.cancel()

    def _ready(self, waiting: _Waiting, gone: set[int], late: bool) -> dict[str, Any] | None:
        here: Iterable[int]
        if waiting.op == "get":
            here = (waiting.rank,)  # only the caller knows whose value it is
            if waiting.rank >= self._size:
                gone = set()  # ranks also go when the run ends well: it waits for what rank 0 says of that
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
