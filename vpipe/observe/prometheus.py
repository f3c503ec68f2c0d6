"""An endpoint for Prometheus on the loopback interface: `prometheus_port` of a run's configuration switches it on.

It reads what all ranks last said of themselves (`vpipe.record.status`) when it is asked; nothing is counted for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from vpipe.errors import ConfigError
from vpipe.observe.figures import TIMES
from vpipe.record.status import Status, read_statuses

ADDRESS = "127.0.0.1"
CONTENT = "text/plain; version=0.0.4; charset=utf-8"

Value = Callable[[Status], float | None]
METRICS: tuple[tuple[str, str, str, Value], ...] = (
    ("vpipe_updates_total", "counter", "Updates made.", lambda status: status.updates),
    ("vpipe_loss", "gauge", "Loss of the last updates.", lambda status: status.loss),
    (
        "vpipe_samples_per_second",
        "gauge",
        "Samples a second, mean so far.",
        lambda status: status.samples_per_s,
    ),
    ("vpipe_memory_bytes", "gauge", "Memory of the process.", lambda status: status.memory),
    (
        "vpipe_peak_memory_bytes",
        "gauge",
        "The most that the process held.",
        lambda status: status.peak_memory,
    ),
    ("vpipe_sent_bytes_total", "counter", "Bytes sent.", lambda status: status.totals.get("bytes_sent")),
    (
        "vpipe_received_bytes_total",
        "counter",
        "Bytes received.",
        lambda status: status.totals.get("bytes_received"),
    ),
    (
        "vpipe_waiting_seconds",
        "gauge",
        "How long the rank has been waiting for another.",
        lambda status: status.waiting.seconds if status.waiting else 0.0,
    ),
)
"""Name, kind, help, and a rank's value."""


def exposition(statuses: Iterable[Status]) -> str:
    """The text format, version 0.0.4."""
    return "".join(f"{line}\n" for line in _lines(list(statuses)))


def _lines(statuses: list[Status]) -> Iterator[str]:
    for name, kind, told, value in METRICS:
        yield from (f"# HELP {name} {told}", f"# TYPE {name} {kind}")
        for status in statuses:
            if (number := value(status)) is not None:
                yield f'{name}{{rank="{status.rank}"}} {number:.10g}'
    yield "# HELP vpipe_seconds_total Where a rank's time went, without filling the pipeline and evaluations."
    yield "# TYPE vpipe_seconds_total counter"
    for status in statuses:
        for kind in TIMES:
            if kind in status.totals:
                yield f'vpipe_seconds_total{{rank="{status.rank}",kind="{kind}"}} {status.totals[kind]:.10g}'
    for name, told, values in (
        ("vpipe_minibatches_in_flight", "Minibatches between forward and backward.", "in_flight"),
        ("vpipe_weight_versions", "Versions of the weights that are held.", "versions"),
    ):
        yield from (f"# HELP {name} {told}", f"# TYPE {name} gauge")
        for status in statuses:
            for stage, count in zip(status.stages, getattr(status, values), strict=False):
                yield f'{name}{{rank="{status.rank}",stage="{stage}"}} {count}'


class Endpoint:
    """Serves `/metrics` of one run until it is closed."""

    def __init__(self, folder: Path, port: int) -> None:
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
                """The log of the rank is for other things."""

        try:
            self._server = ThreadingHTTPServer((ADDRESS, port), Answer)
        except OSError as error:
            raise ConfigError(
                f"prometheus_port is {port}: it cannot be used ({error.strerror}): give another, or 0 for none"
            ) from None
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="vpipe prometheus", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
