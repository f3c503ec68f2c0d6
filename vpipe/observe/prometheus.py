"""The endpoint for Prometheus on the loopback interface, switched on by `prometheus_port` of a run's configuration.

It reads the last statuses of all ranks (`vpipe.record.status`) when it is asked; nothing is counted for it. It answers
anybody on this host, a few at a time and each for a short time.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from vpipe.communication.admission import BackgroundTask, CallerLog, TurnedAway, serve_callers
from vpipe.errors import ConfigError
from vpipe.record.status import TIMES, Status, read_statuses

ADDRESS = "127.0.0.1"
CONTENT = "text/plain; version=0.0.4; charset=utf-8"
AT_ONCE = 16
"""Connections at a time; for a further one the oldest has to go."""
LIMIT = 5.0
"""Seconds that a connection lasts at most."""
LONGEST = 8192
"""Bytes of a request that are read at most."""
FRESH = 0.5
"""Seconds for which an answer is given again."""

Values = Callable[[Status], Iterable[tuple[str, float | None]]]


def _one(read: Callable[[Status], float | None]) -> Values:
    return lambda status: [("", read(status))]


def _per_stage(read: Callable[[Status], Iterable[int]]) -> Values:
    return lambda status: [
        (f',stage="{stage}"', count) for stage, count in zip(status.stages, read(status), strict=False)
    ]


def _seconds(status: Status) -> Iterator[tuple[str, float | None]]:
    return ((f',kind="{kind}"', status.totals.get(kind)) for kind in TIMES)


METRICS: tuple[tuple[str, str, str, Values], ...] = (
    ("updates_total", "counter", "Updates made.", _one(lambda s: s.updates)),
    ("loss", "gauge", "Loss of the last updates.", _one(lambda s: s.loss)),
    ("samples_per_second", "gauge", "Samples a second, mean so far.", _one(lambda s: s.samples_per_s)),
    ("tokens_per_second", "gauge", "Tokens a second, mean so far.", _one(lambda s: s.tokens_per_s)),
    ("mfu", "gauge", "Share of the cards' peak that the model's products use.", _one(lambda s: s.mfu)),
    ("memory_bytes", "gauge", "Memory of the rank's GPU, or of its process.", _one(lambda s: s.memory)),
    ("peak_memory_bytes", "gauge", "The most of that memory so far.", _one(lambda s: s.peak_memory)),
    ("sent_bytes_total", "counter", "Bytes sent.", _one(lambda s: s.totals.get("bytes_sent"))),
    ("received_bytes_total", "counter", "Bytes received.", _one(lambda s: s.totals.get("bytes_received"))),
    (
        "waiting_seconds",
        "gauge",
        "Time that the rank has been waiting for another.",
        _one(lambda s: s.waiting.seconds if s.waiting else 0.0),
    ),
    ("seconds_total", "counter", "A rank's time, without filling the pipeline and evaluations.", _seconds),
    ("minibatches_in_flight", "gauge", "Minibatches in flight.", _per_stage(lambda s: s.in_flight)),
    ("weight_versions", "gauge", "Weight versions that are held.", _per_stage(lambda s: s.versions)),
)
"""Name, kind, help, and a rank's values with their further labels."""


def exposition(statuses: list[Status]) -> str:
    """The text format, version 0.0.4."""
    lines = []
    for name, kind, meaning, values in METRICS:
        lines += [f"# HELP vpipe_{name} {meaning}", f"# TYPE vpipe_{name} {kind}"]
        for status in statuses:
            for labels, number in values(status):
                if number is not None:
                    lines.append(f'vpipe_{name}{{rank="{status.rank}"{labels}}} {number:.10g}')
    return "".join(f"{line}\n" for line in lines)


class PrometheusEndpoint:
    """Serves `/metrics` of one run on the loopback interface, from a thread, until it is closed."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._made = -FRESH
        self._text = ""
        try:
            self._listener = socket.create_server((ADDRESS, port))
        except OSError as error:
            raise ConfigError(
                f"prometheus_port is {port}: it cannot be used ({error.strerror}): give another, or 0 for none"
            ) from None
        self.port: int = self._listener.getsockname()[1]
        work = serve_callers(self._listener, self._answer, CallerLog("prometheus_port"), LIMIT, AT_ONCE)
        self._task = BackgroundTask(work, "vpipe prometheus")

    def close(self) -> None:
        self._task.close()
        self._listener.close()

    async def _answer(self, link: socket.socket) -> bool:
        """One request, and the connection is closed: HTTP/1.0."""
        loop = asyncio.get_running_loop()
        request = b""
        while b"\r\n\r\n" not in request and b"\n\n" not in request:
            more = await loop.sock_recv(link, LONGEST - len(request))
            if not more:
                raise ConnectionResetError
            request += more
            if len(request) == LONGEST:
                raise TurnedAway(f"its request has more than {LONGEST} bytes")
        method, _, rest = request.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", "only GET\n"
        elif path not in ("/", "/metrics"):
            status, body = "404 Not Found", "see /metrics\n"
        else:
            status, body = "200 OK", self._exposition()
        written = body.encode()
        head = f"HTTP/1.0 {status}\r\nContent-Type: {CONTENT}\r\nContent-Length: {len(written)}\r\n\r\n"
        await loop.sock_sendall(link, head.encode() + (b"" if method == "HEAD" else written))
        return False

    def _exposition(self) -> str:
        """Made once for all who ask within a moment: a flood of requests costs the training little."""
        now = time.monotonic()
        if now - self._made >= FRESH:
            self._made, self._text = now, exposition(read_statuses(self._folder))
        return self._text
