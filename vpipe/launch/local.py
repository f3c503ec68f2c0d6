"""The ranks of one host as child processes: started together, watched, and ended together.

The children are given torchrun's environment, so that a rank does not know who started it. Each leads a session of
its own: a Ctrl-C of the terminal reaches the launcher alone, which passes it on once, and what a rank has started can
be killed with it. No child outlives the launcher, however it ends.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vpipe.errors import ConfigError, NotWrittenError, RankFailedError, VPipeError
from vpipe.launch.forked import ForkedRank, RankStart, can_fork
from vpipe.launch.helpers import HelperWatch, end_helper, helping
from vpipe.launch.mps import sharing
from vpipe.launch.place import PLACED
from vpipe.launch.rank import ASKED, LAUNCHED, LAUNCHER
from vpipe.launch.signals import LauncherSignals, ending_at_once, handling_signals
from vpipe.launch.watch import Child, FailedRank, FailureLog, LauncherWatch, Ranks
from vpipe.record.whereabouts import VARIABLE, shared_page
from vpipe.system.best_effort import BestEffort, LogFile
from vpipe.system.environment import COMPILE_THREADS, LISTENER, MOST_COMPILE_THREADS, SECRET
from vpipe.system.faults import ATTEMPT
from vpipe.system.host_memory import usable_cores
from vpipe.system.start import VARIABLE as PHASES
from vpipe.system.start import Phases

GRACE = 3.0
"""Seconds that the others have to end once a rank has failed."""
POLL = 0.02
TAIL = 20
"""Lines of its log that are shown when a rank dies and reports no error."""
_DONE = b"done"
_CLEANUP = "the cleanup process"


class MeetingPlace(NamedTuple):
    """Where the ranks meet; `listener` is for rank 0 to inherit, if it is started here."""

    address: str
    port: int
    secret: str
    listener: socket.socket | None


class RanksEnded(NamedTuple):
    """How the ranks of a host, or of all hosts, have ended."""

    codes: Mapping[int, int | None]
    """Exit codes; None: it was killed when all had to end at once."""
    failed: FailedRank | None
    error: VPipeError | None
    """What to raise for the rank that failed."""
    found: float
    """When it was found, or when all had ended."""


def run_ranks_here(ranks: Ranks, attempt: int = 0, log: FailureLog | None = None) -> None:
    """Run the ranks to their end. Raises the error of the first that failed: RankFailedError if it is no mistake."""
    log = log or FailureLog(ranks.folder)
    with listen_here(ranks.port) as listener, handling_signals() as signals:
        meeting = MeetingPlace("127.0.0.1", listener.getsockname()[1], secrets.token_hex(32), listener)
        recovered = partial(log.recovered, attempt) if attempt else None
        ended = run_children(ranks, meeting, signals, attempt, log, recovered)
    conclude(ended, signals, attempt, log)


def run_children(
    ranks: Ranks,
    meeting: MeetingPlace,
    signals: LauncherSignals,
    attempt: int,
    log: FailureLog,
    on_training: Callable[[], None] | None = None,
    each: Callable[[LauncherWatch], FailedRank | None] = lambda watch: None,
    report: Callable[[FailedRank], object] = lambda failed: None,
) -> RanksEnded:
    """Run the ranks of this host to their end.

    `each` is called again and again, and may return a rank that failed on another host; `report` gets the one that
    failed, before the others are ended.
    """
    with ExitStack() as stack:
        page, descriptor = stack.enter_context(shared_page(ranks.count))
        children = stack.enter_context(_started(ranks, meeting, descriptor, attempt, log.effort))
        watch = LauncherWatch(children, page, ranks, on_training)
        failed = _wait(watch, signals, each)
        found, error = log.now(), None
        if failed is not None:
            page.verdict = f"rank {failed.rank} failed: {failed.how}".partition("\n")[0]
            report(failed)
            _end(watch, failed, log.effort)
            error = _failure(failed, watch)
        return RanksEnded({rank: child.poll() for rank, child in children.items()}, failed, error, found)


def conclude(ended: RanksEnded, signals: LauncherSignals, attempt: int, log: FailureLog) -> None:
    """Raise for what ended the run, if it is not complete."""
    failed = ended.failed
    if signals.to_end and (failed is None or failed.kind is not NotWrittenError):
        if code := _exit_code(ended.codes.values(), signals.to_end[0]):
            raise SystemExit(code)
        return  # all was done when the signal came
    if failed is not None:
        assert ended.error is not None
        if failed.kind is RankFailedError:
            log.failed(attempt, failed, ended.found)
        raise ended.error
    if any(ended.codes.values()):
        raise SystemExit(ASKED)  # the ranks themselves were signalled


def listen_here(port: int) -> socket.socket:
    """A socket of the loopback interface, for the ranks to meet at: from now on the port is this job's."""
    try:
        return socket.create_server(("127.0.0.1", port), backlog=socket.SOMAXCONN)
    except OSError as error:
        raise ConfigError(
            f"port is {port}: it cannot be used ({error.strerror}): another job or program has it; give another, "
            "or 0 for any"
        ) from None


@contextmanager
def _cleanup_process() -> Iterator[Callable[[int], object]]:
    """A process that outlives the launcher; yields the function that gives it a process group to kill then.

    The kernel kills the ranks when the launcher dies, but not what the ranks have started. The cleanup process reads
    the ranks' process groups from a pipe of which only the launcher has the writing end. When the pipe ends, so has
    the launcher, and whatever is left in those groups is killed.
    """
    reading, writing = os.pipe()  # neither is inherited by a program that is started
    child = os.fork()
    if child == 0:
        _clean_up(reading)
    try:
        with helping(child, _CLEANUP, "what the ranks have started may outlive a launcher that is killed"):
            yield lambda group: os.write(writing, b"%d\n" % group)
        os.write(writing, _DONE)  # the groups are gone, their numbers may soon be those of others
    finally:
        os.close(reading)
        os.close(writing)
        end_helper(child, _CLEANUP, lambda: os.waitpid(child, os.WNOHANG)[0] == child)


def _clean_up(reading: int) -> None:
    """All that the cleanup process does: system calls only, because it is a fork of a process with threads."""
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        # The socket is rank 0's and ends with it; the writing end is the launcher's.
        os.closerange(3, reading)
        os.closerange(reading + 1, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        groups = b""
        while part := os.read(reading, 4096):
            groups += part
        for group in () if groups.endswith(_DONE) else groups.split():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(int(group), signal.SIGKILL)
    finally:
        os._exit(0)


@contextmanager
def _started(
    ranks: Ranks, meeting: MeetingPlace, page: int, attempt: int, effort: BestEffort
) -> Iterator[dict[int, Child]]:
    """The children, of which none is left when we leave."""
    children: dict[int, Child] = {}
    with _cleanup_process() as kill_later, ExitStack() as files:
        here = ranks.here
        devices = [{}] * len(here) if ranks.gpus is None else files.enter_context(sharing(ranks.gpus))
        forked = ranks.prepare is not None and _prepared(ranks, ranks.prepare, devices[0])
        environment = _environment(ranks, meeting) | {ATTEMPT: str(attempt), VARIABLE: str(page)}
        try:
            for number, rank in enumerate(here):
                log = _open_log(ranks.log(rank), effort)
                files.callback(os.close, log)
                own = {"RANK": str(rank), "LOCAL_RANK": str(number), **devices[number]}
                inherited = [page]
                if rank == 0 and meeting.listener is not None:
                    own[LISTENER] = str(meeting.listener.fileno())
                    inherited.append(meeting.listener.fileno())
                # The first rank writes to the user's terminal.
                output = log if rank or ranks.quiet else None
                start = RankStart(ranks.arguments, environment | own, ranks.directory, output, log, inherited)
                child = ForkedRank(start) if forked else new_interpreter(ranks.interpreter, start)
                children[rank] = child
                kill_later(child.pid)
            if meeting.listener is not None:
                meeting.listener.close()
            yield children
        finally:
            for child in children.values():
                _kill(child)


def new_interpreter(interpreter: Sequence[str], start: RankStart) -> Child:
    return subprocess.Popen(
        [*interpreter, "-m", "vpipe", *start.arguments],
        env=start.environment,
        cwd=start.directory,
        stdin=subprocess.DEVNULL,
        stdout=start.stdout,
        stderr=start.stderr,
        start_new_session=True,
        pass_fds=start.kept,
    )


def _prepared(ranks: Ranks, prepare: Callable[[Phases], object], devices: Mapping[str, str]) -> bool:
    """Prepare this process for its forks, with the environment in which they import; False: it cannot be forked."""
    # Libraries start no threads then. The ranks set their own number.
    own = {**_shares(ranks), **devices, "OMP_NUM_THREADS": "1"}
    before = dict(os.environ)
    os.environ.update(own)
    try:
        with ending_at_once():
            prepare(ranks.phases or Phases("launch"))
    finally:
        os.environ.clear()
        os.environ.update(before)
    return can_fork()


def _open_log(path: Path, effort: BestEffort) -> int:
    """The rank's log; one that cannot be written goes nowhere."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    with effort.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it before a restart
        return os.open(path, flags, 0o666)
    return os.open(os.devnull, flags)


def _environment(ranks: Ranks, meeting: MeetingPlace) -> dict[str, str]:
    if ranks.phases is not None:
        ranks.phases.end()
    return {
        **_shares(ranks),
        **os.environ,
        "WORLD_SIZE": str(ranks.count),
        "LOCAL_WORLD_SIZE": str(len(ranks.here)),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        SECRET: meeting.secret,
        LAUNCHED: str(ranks.folder.absolute()),
        LAUNCHER: str(os.getpid()),
        PHASES: json.dumps(ranks.phases.seconds if ranks.phases else {}),
        PLACED: "1",
        **ranks.variables,
    }


def _shares(ranks: Ranks) -> dict[str, str]:
    """Each rank's share of the cores, for libraries."""
    share = max(1, usable_cores() // len(ranks.here))
    return {"OMP_NUM_THREADS": str(share), COMPILE_THREADS: str(min(share, MOST_COMPILE_THREADS))}


def _wait(
    watch: LauncherWatch, signals: LauncherSignals, each: Callable[[LauncherWatch], FailedRank | None]
) -> FailedRank | None:
    """Until all have ended, one has failed, or a second signal to end came; the rank that failed, if one has."""
    children = watch.children
    passed_on, saves = 0, 0
    helpers = HelperWatch(watch.ranks.heartbeat_limit)
    while any(child.poll() is None for child in children.values()) and len(signals.to_end) < 2:
        failed = watch.failed_rank() or each(watch)
        if failed is not None:
            return failed
        if passed_on < len(signals.to_end):
            passed_on += 1
            _send(children.values(), signal.SIGTERM)
        if saves < signals.to_save:
            saves += 1
            # A rank that does not handle the signal yet would die of it.
            _send([child for rank, child in children.items() if watch.page.beat(rank)], signal.SIGUSR1)
        helpers.look()
        time.sleep(POLL)
    return watch.failed_rank()


def _send(children: Iterable[Child], number: signal.Signals) -> None:
    for child in children:
        child.send_signal(number)  # nothing happens to one that has ended


def _exit_code(codes: Iterable[int | None], number: int) -> int:
    """The code that all ranks ended with; as a shell has it if they were killed."""
    different = set(codes)
    code = different.pop() if len(different) == 1 else None
    return code if code is not None and code >= 0 else 128 + number


def _end(watch: LauncherWatch, failed: FailedRank, effort: BestEffort) -> None:
    """The others read which rank failed and end; one that does not is killed, and its log says why."""
    children = watch.children
    if failed.rank in children:
        _kill(children[failed.rank])  # stopped, it would not notice anything
    deadline = time.monotonic() + GRACE
    while any(child.poll() is None for child in children.values()) and time.monotonic() < deadline:
        time.sleep(POLL)
    for rank, child in children.items():
        if child.poll() is None:
            _kill(child)
            last = LogFile(watch.ranks.log(rank), effort)
            last.line(f"error: stopped because {watch.page.verdict}")
            last.close()


def _kill(child: Child) -> None:
    """The process and all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait()


def _failure(failed: FailedRank, watch: LauncherWatch) -> VPipeError:
    if failed.kind is not RankFailedError:
        return failed.kind(*failed.how.split("\n", 1))
    verdict = watch.page.verdict
    if failed.rank not in watch.children:  # it is on another host, whose launcher has its log
        return RankFailedError(verdict)
    output = watch.output(failed.rank)
    start = output.rfind("Traceback (most recent call last):")
    if start >= 0:
        return RankFailedError(verdict, output[start:].rstrip())
    tail = "\n".join(f"  | {line}" for line in output.splitlines()[-TAIL:])
    return RankFailedError(f"{verdict}; the end of {watch.ranks.log(failed.rank)}:", tail)
