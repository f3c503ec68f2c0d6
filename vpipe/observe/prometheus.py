"""The endpoint for Prometheus on the loopback interface, switched on by `prometheus_port` of a run's configuration.

It reads the last statuses of all ranks (`vpipe.record.status`) on each request; nothing is counted for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from vpipe.errors import ConfigError
from vpipe.record.status import TIMES, Status, read_statuses

ADDRESS = "127.0.0.1"
CONTENT = "text/plain; version=0.0.4; charset=utf-8"

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


def serve(folder: Path, port: int) -> ThreadingHTTPServer:
    """Serve `/metrics` of one run in a thread, until it is shut down."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] not in ("/", "/metrics"):
                self.send_error(404)
                return
            body = exposition(read_statuses(folder)).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Answer)
    except OSError as error:
        raise ConfigError(
            f"prometheus_port is {port}: it cannot be used ({error.strerror}): give another, or 0 for none"
        ) from None
    threading.Thread(target=server.serve_forever, name="vpipe prometheus", daemon=True).start()
    return server
