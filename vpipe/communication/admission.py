"""Callers of a listening socket: one thread serves them side by side, a few at a time and each for a short time.

    queue of the kernel ─▶ accept ─▶ at most `at_once` callers, each for `limit` seconds ─▶ admitted, or answered
                            │                   │
                            ▼                   ▼
                     another user's      silent, wrong, or the oldest when one more comes: turned away and logged

Every socket of vpipe that accepts callers is served by `serve_callers`: the rendezvous, the sockets between ranks and
the endpoint for Prometheus. A caller that holds its connection open delays nobody, and a flood takes no more than
`at_once` descriptors and no further thread.
"""

import asyncio
import logging
import os
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from vpipe.communication.handshake import (
    CHALLENGE,
    INTRODUCTION_BYTES,
    Introduction,
    check_proof,
    greeting,
    refusal,
)

HANDSHAKE_LIMIT = 5.0
"""Seconds that a caller has to prove that it belongs to the job."""
AT_ONCE = 128
"""Callers that are served at a time, at most; for a further one the oldest has to go."""
LOGGED = 20
"""Callers turned away that are logged at most: more could fill the disk."""
RETRY = 0.05
"""Seconds to wait when no caller can be accepted, or called."""
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_CROWDED = "too many others are waiting"

log = logging.getLogger("vpipe.sockets")


class TurnedAway(Exception):
    """The reason why a caller is not served, for the log."""


class CallerLog:
    """The callers that a socket has turned away."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0

    def add(self, caller: str, why: str) -> None:
        self._count += 1
        if self._count <= LOGGED:
            more = "; further ones are not logged" if self._count == LOGGED else ""
            log.warning("%s: %s was turned away: %s%s", self._name, caller, why, more)


class BackgroundTask:
    """A coroutine that runs in a thread of its own until it ends or is closed."""

    def __init__(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(work)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.thread.join()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        finally:
            self._loop.close()


async def serve_callers(
    listener: socket.socket,
    serve: Callable[[socket.socket], Coroutine[Any, Any, bool]],
    turned_away: CallerLog,
    limit: float,
    at_once: int,
) -> None:
    """Serve each caller, until cancelled. `serve` returns whether it keeps the connection; otherwise it is closed."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    listener.listen(socket.SOMAXCONN)
    at_once = min(at_once, max(2, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
    callers: dict[asyncio.Task[bool], None] = {}  # the oldest first

    def dismiss_oldest() -> None:
        oldest = next(iter(callers))
        del callers[oldest]
        oldest.cancel()

    async def serve_for_a_while(link: socket.socket) -> bool:
        return await asyncio.wait_for(serve(link), limit)

    def begin(link: socket.socket) -> None:
        who = shown(link)
        task = loop.create_task(serve_for_a_while(link))

        def end(task: asyncio.Task[bool]) -> None:
            dismissed = callers.pop(task, task) is task
            if task.cancelled():
                if dismissed:
                    turned_away.add(who, _CROWDED)
            elif isinstance(error := task.exception(), asyncio.TimeoutError):
                turned_away.add(who, f"it was silent or slow for {limit:g} s")
            elif isinstance(error, OSError):
                turned_away.add(who, "it hung up before it was served")
            elif isinstance(error, TurnedAway):
                turned_away.add(who, str(error))
            elif error is not None:
                log.error("a caller could not be served", exc_info=error)
            elif task.result():
                return
            link.close()

        task.add_done_callback(end)
        callers[task] = None

    try:
        while True:
            try:
                link, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left
                if callers:
                    dismiss_oldest()
                await asyncio.sleep(RETRY)
                continue
            if (stranger := other_user(link)) is not None:
                turned_away.add(
                    shown(link), f"it belongs to user {stranger}, this job to user {os.geteuid()}"
                )
                link.close()
            else:
                link.setblocking(False)
                if len(callers) >= at_once:
                    dismiss_oldest()
                begin(link)
            await asyncio.sleep(
                0
            )  # one at a time: ranks of a large job are admitted before many more have come
    finally:
        left = list(callers)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def serve_members(
    listener: socket.socket,
    key: bytes,
    name: str,
    check: Callable[[Introduction], str],
    welcome: Callable[[Introduction, socket.socket], object],
) -> None:
    """Admit the callers that prove to know the key, until cancelled.

    `check` returns why one that does is turned away nevertheless, or ""; `welcome` is given the others' connections.
    """
    loop = asyncio.get_running_loop()

    async def examine(link: socket.socket) -> bool:
        challenge = secrets.token_bytes(CHALLENGE)
        link.send(greeting(challenge))
        proof = b""
        while len(proof) < INTRODUCTION_BYTES:
            more = await loop.sock_recv(link, INTRODUCTION_BYTES - len(proof))
            if not more:
                raise ConnectionResetError
            proof += more
        checked = check_proof(key, challenge, proof)
        why = "it does not know the job's secret" if checked is None else check(checked[0])
        if checked is None or why:
            link.send(refusal())
            raise TurnedAway(why)
        who, answer = checked
        link.send(answer)
        welcome(who, link)
        return True

    await serve_callers(listener, examine, CallerLog(name), HANDSHAKE_LIMIT, AT_ONCE)


def other_user(link: socket.socket) -> int | None:
    """The user at the other end of a Unix socket, if it is not ours; the kernel vouches for it."""
    user = _CREDENTIALS.unpack(_credentials(link))[1] if link.family == socket.AF_UNIX else os.geteuid()
    return None if user == os.geteuid() else user


def shown(link: socket.socket) -> str:
    """The other end, for messages."""
    if link.family == socket.AF_UNIX:
        process, user, _ = _CREDENTIALS.unpack(_credentials(link))
        return f"process {process} of user {user}"
    try:
        host, port, *_ = link.getpeername()
    except OSError:
        return "a caller that has gone"
    return f"{host}:{port}"


def _credentials(link: socket.socket) -> bytes:
    return link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
