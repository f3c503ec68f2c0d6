"""The agent of a host: the program that the launcher of a run starts on each of its hosts (`launch/remote.py`).

It starts and watches the ranks of its host as the launcher of one host does, and reports over its standard output. If
the launcher ends, or is not heard any more, it kills them.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from vpipe.errors import VPipeError
from vpipe.launch.facts import host_facts
from vpipe.launch.local import MeetingPlace, run_children
from vpipe.launch.measure import measure
from vpipe.launch.mps import gpus_of
from vpipe.launch.place import rank_directory, rank_interpreter
from vpipe.launch.signals import handling_signals
from vpipe.launch.watch import FailedRank, FailureLog, LauncherWatch, Ranks
from vpipe.launch.wire import Wire
from vpipe.observe.results import REPORT
from vpipe.observe.trace import TRACE
from vpipe.record.run_folder import make_folder
from vpipe.record.status import status_path
from vpipe.system.start import Phases, process_began
from vpipe.train.carried import CONFIG
from vpipe.train.checks import check_paths
from vpipe.train.host_orders import (
    CONNECT_LIMIT,
    check_modules,
    examine,
    forget_callers,
    listen,
    reach,
    reaching,
    serve,
    write_files,
)

WAIT = 0.5
FLUSH_LIMIT = 5.0
"""Seconds that the last messages have to leave."""
PUMP = 0.1
"""Seconds between two looks at logs and output."""
SHOWN = 2.0
"""Seconds between two looks at the status of each rank."""
CHUNK = 64 << 10
LARGEST = 32 << 20
"""Bytes of a file of the run's folder that is sent back at the end."""


MADE = (TRACE, REPORT)


class LauncherLost(Exception):
    """The launcher ended, or is not heard any more."""


class HostAgent:
    def __init__(self, wire: Wire, out: int) -> None:
        """`out` is the reading end of the pipe that rank 0 writes to."""
        self.wire = wire
        self._out = out
        self._limit = 60.0
        self._names = "", ""
        self._pumped = self._shown = 0.0
        self._statuses: dict[Path, float] = {}
        """Those of the ranks, for `vpipe top` on the launcher's host, and when each was written that was sent last."""
        self._sent: dict[Path, int] = {}
        """The logs that are sent back, and how much of each was."""

    def serve(self) -> None:
        self.wire.start_heartbeat(self._limit)
        self.wire.send(hello=host_facts())
        try:
            order = self._await("job", self._examine)
            with tempfile.TemporaryDirectory(prefix="vpipe-host-") as folder, handling_signals() as signals:
                ranks, shared = self._answer("ready", lambda: self._prepare(order, Path(folder)))
                meeting = self._meet()
                if not shared:
                    self._sent = {ranks.log(rank): _size(ranks.log(rank)) for rank in ranks.here}
                    self._statuses = {status_path(ranks.folder, rank): 0.0 for rank in ranks.here}

                def each(watch: LauncherWatch) -> FailedRank | None:
                    for message in self._receive():
                        if "end" in message:
                            signals.to_end.append(signal.SIGTERM)
                        if "save" in message:
                            signals.to_save += 1
                        if "verdict" in message:
                            rank, how = message["verdict"]
                            return FailedRank(rank, how)
                    self._pump()
                    return None

                ended = run_children(
                    ranks,
                    meeting,
                    signals,
                    order["attempt"],
                    FailureLog(ranks.folder),
                    lambda: self.wire.send(training=True),
                    each,
                    lambda failed: self.wire.send(
                        failed=[failed.rank, self._as_written(failed.how), failed.kind.exit_code]
                    ),
                )
                while self._pump(last=True):
                    self.wire.flush(FLUSH_LIMIT)
                if not shared:
                    self._send_files(ranks.folder)
                self.wire.send(
                    ended={"codes": ended.codes, "error": self._as_written(str(ended.error or ""))}
                )
        finally:
            self.wire.flush(FLUSH_LIMIT)

    def _as_written(self, text: str) -> str:
        """With the user's own name of the configuration in place of that of the copy here."""
        return text.replace(*self._names)

    def _receive(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        messages = self.wire.receive(seconds)
        if not messages and (self.wire.ended or self.wire.silence(self._limit) > self._limit):
            raise LauncherLost
        return messages

    def _await(self, key: str, other: Callable[[dict[str, Any]], None]) -> Any:
        """The next order of this kind; `other` gets those before it."""
        while True:
            for message in self._receive(WAIT):
                if key in message:
                    return message[key]
                if "end" in message or "verdict" in message:
                    raise LauncherLost
                other(message)

    def _examine(self, message: dict[str, Any]) -> None:
        """Orders of `vpipe doctor --machines`. A mistake is an answer: others may follow."""
        try:
            if "examine" in message:
                self.wire.send(examined=examine(message["examine"]))
            if "serve" in message:
                listener, where = listen(message["serve"], 0)
                threading.Thread(target=serve, args=(listener,), daemon=True).start()
                self.wire.send(serving=where)
            if "measure" in message:
                address, port = message["measure"]
                with (
                    reaching(address, port),
                    socket.create_connection((address, port), CONNECT_LIMIT) as link,
                ):
                    self.wire.send(measured=measure(link))
        except VPipeError as error:
            self.wire.send(mistake=str(error).partition("\n")[0])

    def _answer(self, key: str, work: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """What `work` returns, of which the second part is the answer; a mistake is the answer too."""
        try:
            made, answer = work()
        except VPipeError as error:
            self.wire.send(mistake=self._as_written(str(error).partition("\n")[0]))
            raise LauncherLost from None  # it ends the run
        self.wire.send(**{key: answer})
        return made, answer

    def _prepare(self, order: dict[str, Any], files: Path) -> tuple[Ranks, bool]:
        """The ranks to start, and whether the run's folder is the launcher's own."""
        os.environ.update(order["environment"])
        with suppress(OSError):
            os.chdir(order["cwd"])  # else it stays where ssh has put it
        self._names = str(files / CONFIG), order["source"]
        config = write_files(order["files"], files)
        check_paths(config)
        check_modules(config)
        folder, own = Path(order["folder"]), order["ranks"]
        make_folder(folder)
        self._limit = config.heartbeat_limit
        arguments = [order["command"], str(files / CONFIG), *order["options"]]
        ranks = Ranks(
            arguments,
            config.ranks,
            folder,
            order["stages"],
            directory=rank_directory(config),
            interpreter=rank_interpreter(config, arguments),
            heartbeat_limit=config.heartbeat_limit,
            patience=config.timeout,
            gpus=gpus_of(config, own),
            phases=Phases("launch", process_began(), order["phases"]),
            own=own,
        )
        return ranks, (folder / order["marker"]).exists()

    def _meet(self) -> MeetingPlace:
        """The place where the ranks meet, which the host of rank 0 opens and the others try."""
        listener: socket.socket | None = None
        while True:
            for message in self._receive(WAIT):
                if "listen" in message:
                    names, port = message["listen"]
                    listener, _ = self._answer("listening", lambda: listen(names, port))  # noqa: B023
                if "reach" in message:
                    where = message["reach"]
                    self._answer("reached", lambda: reach(where))  # noqa: B023
                if "start" in message:
                    if listener is not None:
                        forget_callers(listener)
                    address, port, secret = message["start"]
                    return MeetingPlace(address, port, secret, listener)
                if "end" in message:
                    raise LauncherLost

    def _pump(self, last: bool = False) -> bool:
        """Send what rank 0 has printed, and what is new in the logs; whether there was any."""
        now = time.monotonic()
        if not last and (now - self._pumped < PUMP or self.wire.full):
            return False
        self._pumped = now
        if now - self._shown > SHOWN:
            self._shown = now
            self._send_statuses()
        found = False
        with suppress(BlockingIOError):
            if part := os.read(self._out, CHUNK):
                self.wire.send(out=part.decode("latin-1"))
                found = True
        for path, sent in self._sent.items():
            with suppress(OSError), path.open("rb") as file:
                file.seek(sent)
                if part := file.read(CHUNK):
                    self._sent[path] = sent + len(part)
                    self.wire.send(log=[int(path.name.rpartition(".")[2]), part.decode("latin-1")])
                    found = True
        return found

    def _send_statuses(self) -> None:
        for path, sent in self._statuses.items():
            with suppress(OSError):
                if (changed := path.stat().st_mtime) != sent:
                    self._statuses[path] = changed
                    self._send_file(path)

    def _send_file(self, path: Path) -> None:
        self.wire.send(file=[path.name, b64encode(path.read_bytes()).decode()])

    def _send_files(self, folder: Path) -> None:
        """The figures that the ranks of this host have left; what is made of them is made anew."""
        with suppress(OSError):  # an evaluation has removed it
            for path in sorted(folder.iterdir()):
                wanted = path.is_file() and path not in self._sent and path.name not in MADE
                if wanted and path.stat().st_size <= LARGEST:
                    self._send_file(path)
                    self.wire.flush(FLUSH_LIMIT)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def take_wire() -> tuple[Wire, int]:
    """The wire that this process was started with; from now on standard output is a pipe, whose other end is given."""
    reading, writing = os.dup(0), os.dup(1)
    out, into = os.pipe()
    os.set_blocking(out, False)
    os.dup2(into, 1)
    os.close(into)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.write(writing, b"\n")  # ends what a login script may have printed
    return Wire(reading, writing), out


def main() -> NoReturn:
    agent = HostAgent(*take_wire())
    with suppress(LauncherLost):
        agent.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
