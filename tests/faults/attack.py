"""Random signals from outside, to every kind of process of real runs, at any moment: `make attack`.

python -m tests.faults.attack [--rounds 200] [--seed 0] [--schedules 1f1b vpipe] [--channels gloo] [--docs PAGE]

A run of each schedule, over each channel, is struck a few times. It restarts by itself or, where its launcher was
struck, is resumed, and must end with the weights of a run that nobody has struck. Over shared memory the ranks are
those of `vpipe train --max-restarts`; over gloo those of torchrun on two hosts (network namespaces).
"""

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from signal import (
    SIGABRT,
    SIGCONT,
    SIGHUP,
    SIGINT,
    SIGKILL,
    SIGQUIT,
    SIGSEGV,
    SIGSTOP,
    SIGTERM,
    Signals,
    signal,
)
from statistics import median
from typing import Any

from tests.end_to_end.command import alive
from tests.faults.hosts import two_hosts
from tests.faults.outside import (
    CLEANUP,
    LAUNCHER,
    Job,
    TorchrunJob,
    gone,
    isolate,
    open_sockets,
    send,
    within,
)
from tests.faults.runs import final_weights, half_done, shared_memory, write_config
from tests.own_schedule import OWN
from vpipe.schedule import KINDS

SHARED, GLOO = "shared memory", "gloo"
LIMIT = 3.0
"""The ranks' `heartbeat_limit`, in seconds."""
HANG = 120.0
"""Seconds within which a run trains again or has ended, whatever else this machine does."""
STRIKES = 6
"""Strikes at one run."""
UPDATES = 60
BEGIN, END = "<!-- measured by make attack -->\n", "<!-- end of attack -->\n"
TABLE = "own.csv"
"""A schedule that a user wrote."""

KILLS = (SIGKILL, SIGSEGV, SIGABRT, SIGQUIT, SIGHUP)
ASKS = (SIGTERM, SIGINT)


@dataclass(frozen=True)
class Blow:
    """One signal to one process; `pause`: seconds after which SIGCONT follows."""

    target: str
    signal: Signals
    pause: float = 0.0

    def __str__(self) -> str:
        return f"{self.signal.name}, SIGCONT" if self.pause else self.signal.name


A, B = "rank A", "rank B"
"""Two ranks that are drawn for each strike."""
BOTH = (
    *((Blow(A, number),) for number in (*KILLS, *ASKS, SIGSTOP)),
    (Blow(A, SIGSTOP, 0.3 * LIMIT),),
    (Blow(A, SIGKILL), Blow(B, SIGKILL)),
    (Blow(A, SIGSTOP), Blow(B, SIGKILL)),
    (Blow(A, SIGSEGV), Blow(B, SIGTERM)),
)
DECKS: dict[str, tuple[tuple[Blow, ...], ...]] = {
    SHARED: (
        *BOTH,
        *((Blow(LAUNCHER, number),) for number in (*KILLS, *ASKS)),
        (Blow(LAUNCHER, SIGSTOP, 2 * LIMIT),),
        (Blow(LAUNCHER, SIGSTOP), Blow(LAUNCHER, SIGKILL)),
        (Blow(LAUNCHER, SIGKILL), Blow(A, SIGSTOP)),
        (Blow(LAUNCHER, SIGTERM), Blow(A, SIGKILL)),
        (Blow(CLEANUP, SIGKILL), Blow(LAUNCHER, SIGKILL)),
        *((Blow(CLEANUP, number), Blow(A, SIGKILL)) for number in (SIGKILL, SIGSTOP, SIGSEGV)),
        (Blow(CLEANUP, SIGTERM),),
    ),
    GLOO: (
        *BOTH,
        *((Blow("agent 0", number),) for number in (SIGTERM, SIGKILL)),
        *((Blow("agent 1", number),) for number in (SIGINT, SIGKILL)),
    ),
}
MOMENTS = ("start", "training", "training", "saving", "restart")


@dataclass
class Strike:
    """What is done at one moment, and what was seen of it."""

    schedule: str
    channel: str
    moment: str
    blows: tuple[Blow, ...]
    found: float | None = None
    gone: float | None = None
    again: float | None = None
    named: bool | None = None
    """Whether a culprit was named, and the right one."""
    outcome: str = ""
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        blows = " and ".join(f"{blow.target} {blow}" for blow in self.blows)
        seconds = " ".join("-" if s is None else f"{s:.1f}" for s in (self.found, self.gone, self.again))
        wrong = "".join(f"\n    WRONG: {text}" for text in self.wrong)
        return (
            f"{self.schedule}, {self.channel}, at {self.moment}: {blows}: {self.outcome} ({seconds} s){wrong}"
        )

    @property
    def what(self) -> tuple[str, str, str]:
        """The row of the table that it counts in."""
        targets = [re.sub(r" (\d+|A|B)$", "", blow.target) for blow in self.blows]
        return self.channel, " and ".join(targets), " and ".join(str(blow) for blow in self.blows)


class Attack:
    """One run of a schedule over a channel, with its restarts, until it has made all its updates."""

    def __init__(
        self, folder: Path, schedule: str, channel: str, drawn: random.Random, hosts: Sequence[str]
    ) -> None:
        self.folder, self.schedule, self.channel, self.drawn = folder, schedule, channel, drawn
        self.hosts = hosts
        self.ranks = ranks_of(schedule, channel)
        self.asked: list[int] = []  # updates after which it was asked to end, and saved
        self.wrong: list[str] = []
        make_folder(folder, schedule, self.ranks)
        self.job = self._start()

    def _start(self, *options: object) -> Job:
        if self.channel == GLOO:
            return TorchrunJob(self.folder, self.hosts, "--resume", "auto")
        return Job(self.folder, "--max-restarts", 1000, *options)

    def strike(self, moment: str, blows: Sequence[Blow]) -> Strike | None:
        """Strike at the next such moment; None if the run has ended well before."""
        if moment != "start" and not self._wait_for(moment):
            return None
        ranks = [f"rank {rank}" for rank in self.drawn.sample(range(self.ranks), 2)]
        drawn = dict(zip((A, B), ranks, strict=True))
        made = tuple(Blow(drawn.get(b.target, b.target), b.signal, b.pause) for b in blows)
        strike = Strike(self.schedule, self.channel, moment, made)
        told, said, attempt = len(self.job.failures), self.job.marks(), self._ranks_alive()
        hit: list[Blow] = []
        if moment == "restart":
            before = Blow(self.drawn.choice(ranks), SIGKILL)
            hit += self._send(before)
            time.sleep(self.drawn.uniform(0.0, 1.5))
        elif moment == "start":
            within(HANG, lambda: self._ranks_alive() or self.job.ended)
            time.sleep(self.drawn.uniform(0.0, 0.8))
        began = time.time()
        for blow in made:
            attempt |= self._ranks_alive()
            hit += self._send(blow)
        self._watch(strike, hit, attempt, began)
        self._judge(strike, hit, told, said, began)
        return strike

    def _wait_for(self, moment: str) -> bool:
        """Until it trains; for `saving`, until a checkpoint is being written. False if it has ended before."""
        job, begun = self.job, self.job.updates_begun()
        if not job.wait(lambda: job.updates_begun() > begun, HANG):
            self.wrong.append(f"it does not train within {HANG:g} s: {job.output()[-500:]!r}")
        if moment == "saving":
            job.wait(lambda: job.runs and half_done(job.runs[-1]), 10.0)
        else:
            time.sleep(self.drawn.uniform(0.0, 1.2))
        return not job.ended

    def _ranks_alive(self) -> set[int]:
        return {number for what, number in self.job.alive().items() if what.startswith("rank")}

    def _send(self, blow: Blow) -> list[Blow]:
        """The blow, if there was such a process to strike."""
        process = self.job.alive().get(blow.target)
        if process is None or not send(blow.signal, [process]):
            return []
        if blow.pause:
            time.sleep(blow.pause)
            send(SIGCONT, [process])
        return [blow]

    def _watch(self, strike: Strike, hit: Sequence[Blow], attempt: set[int], began: float) -> None:
        """Until it trains again, goes on, or has ended; measures how long each takes."""
        job = self.job
        deadly = [blow for blow in hit if not blow.pause and not harmless(blow)]
        if any(blow.target.startswith("agent") for blow in hit):
            job.wait(lambda: job.ended, 3.0)
            send(
                SIGTERM, [n for what, n in job.alive().items() if what.startswith("agent")]
            )  # as its user would
        if deadly:
            if not within(HANG, lambda: gone(attempt) or job.ended):
                strike.wrong.append(
                    f"ranks are left after {HANG:g} s: {job.alive()}; {job.output()[-800:]!r}"
                )
            strike.gone = time.time() - began
        if LAUNCHER in [blow.target for blow in deadly] or any(
            blow.target.startswith("agent") for blow in hit
        ):
            within(HANG, lambda: job.ended)
        begun = job.updates_begun()
        if not job.wait(lambda: job.updates_begun() > begun, HANG):
            strike.wrong.append(f"it neither trains nor ends within {HANG:g} s: {job.alive()}")
        if not job.ended:
            strike.again = time.time() - began if deadly else None
            strike.outcome = "restarts" if deadly else "goes on"
        elif not job.wait_for_end(10.0):
            strike.wrong.append(f"left of it: {job.alive()}")

    def _judge(
        self, strike: Strike, hit: Sequence[Blow], told: int, said: Sequence[int], began: float
    ) -> None:
        job = self.job
        lines = [line for line in job.failures[told:] if "rank" in line]
        output = job.output(said)
        struck = {blow.target: [] for blow in hit}  # type: dict[str, list[Signals]]
        for blow in hit:
            struck[blow.target].append(blow.signal)
        for line in lines:
            if not explained(line["how"], struck.get(f"rank {line['rank']}", [])):
                strike.wrong.append(f"rank {line['rank']} is named: {line['how']}")
        if lines:
            strike.found = max(0.0, lines[-1]["found"] - began)
        if self.channel == GLOO:
            lines = [{"rank": int(rank)} for rank in re.findall(r"stopped because rank (\d+) failed", output)]
            if any(f"rank {line['rank']}" not in struck for line in lines) and not agents(hit):
                strike.wrong.append(f"the wrong rank is named: {output[-600:]!r}")
        if lines:
            strike.named = not strike.wrong
        elif self.channel == SHARED and not job.ended and any(fells(blow) for blow in hit):
            strike.named = False
            strike.wrong.append("no rank is named")
        if "Traceback" in output and SIGINT not in [blow.signal for blow in hit] and not agents(hit):
            strike.wrong.append(f"a traceback: {output[output.index('Traceback') :][:1500]}")
        if job.ended:
            strike.outcome = f"ended with {' and '.join(str(code) for code in job.codes)}"
            if not all(code in expected_codes(hit) for code in job.codes):
                strike.wrong.append(f"exit codes {job.codes}: {output[-800:]!r}")
        elif not hit:
            strike.outcome = "no process to strike"

    def go_on(self) -> None:
        """Start it again, if it has ended before its time."""
        self._note_stops()
        if self.job.ended and set(self.job.codes) != {0}:
            self.job = self._start("--resume", "auto")

    def _note_stops(self) -> None:
        self.asked += [int(n) for n in re.findall(r"asked to end: it has made (\d+) of", self.job.output())]

    def finish(self, reference: Callable[[tuple[int, ...]], dict[str, str]]) -> None:
        """Let it end; what is wrong then is in `wrong`."""
        for _ in range(5):
            if not self.job.wait_for_end(2 * HANG):
                self.wrong.append(f"it does not end: {self.job.alive()}; {self.job.output()[-800:]!r}")
                return
            if set(self.job.codes) == {0}:
                break
            self.go_on()
        self._note_stops()
        last = self.job.runs[-1]
        asked = lineage(self.folder, self.asked)
        if set(self.job.codes) != {0}:
            self.wrong.append(f"it ended with {self.job.codes}: {self.job.output()[-800:]!r}")
        elif final_weights(last) != reference(asked):
            self.wrong.append(f"its weights are not those of an undisturbed run (asked to end after {asked})")
        if half_done(last):
            self.wrong.append(f"a part of a checkpoint is left: {half_done(last)}")
        # torchrun makes folders for logs that it does not remove.
        if left := [
            path.name for path in self.job.temporary.iterdir() if not path.name.startswith("torchelastic_")
        ]:
            self.wrong.append(f"temporary files are left: {left}")

    def close(self) -> None:
        self.job.kill()


def harmless(blow: Blow) -> bool:
    """Whether no rank ends of it."""
    return blow.target == CLEANUP


def fells(blow: Blow) -> bool:
    """Whether it ends a rank that does nothing about it."""
    return blow.target.startswith("rank") and not blow.pause and blow.signal in (*KILLS, SIGSTOP)


def agents(hit: Sequence[Blow]) -> bool:
    return any(blow.target.startswith("agent") for blow in hit)


def explained(how: str, signals: Sequence[Signals]) -> bool:
    """Whether a rank that got these signals fails like this."""
    names = [f"killed by {number.name}" for number in signals]
    names += ["stopped (SIGSTOP)"] * (SIGSTOP in signals) + ["KeyboardInterrupt", "Aborted"] * (
        SIGINT in signals
    )
    return how.startswith(tuple(names))


def expected_codes(hit: Sequence[Blow]) -> set[int]:
    """Exit codes of a launcher after these blows; 0 if it was at its end."""
    codes = {0}
    for blow in hit:
        if blow.target == LAUNCHER:
            codes |= {-blow.signal} if blow.signal in KILLS else set()
            codes |= {75, 128 + blow.signal, -blow.signal} if blow.signal in (*ASKS, SIGHUP) else set()
        elif blow.target.startswith("agent"):
            codes |= {1, -SIGTERM, -blow.signal, 128 + blow.signal, 128 + SIGTERM}
        elif blow.signal in ASKS:
            codes.add(75)
    return codes


def lineage(folder: Path, asked: Sequence[int]) -> tuple[int, ...]:
    """Of the updates after which it was asked to end, those from which it was resumed."""
    logs = [run / "output.log.0" for run in sorted(folder.glob("runs/2*"))]
    text = "".join(log.read_text(errors="replace") for log in logs if log.exists())
    resumed = [int(n) for n in re.findall(r"resumed from \S+ after (\d+) updates", text)]
    kept: list[int] = []
    for number in resumed:
        kept = [other for other in kept if other < number] + [number]
    return tuple(number for number in kept if number in asked)


def ranks_of(schedule: str, channel: str) -> int:
    """Three, but two hosts have a rank each, and the model is too small for six stages."""
    chunked = schedule in KINDS and KINDS[schedule].chunks > 1
    return 2 if channel == GLOO or chunked or schedule == TABLE else 3


def make_folder(folder: Path, schedule: str, ranks: int) -> None:
    folder.mkdir()
    (folder / TABLE).write_text(OWN + "\n")
    keys: dict[str, Any] = {
        "schedule": schedule,
        "max_updates": UPDATES,
        "epochs": 1000,
        "checkpoint_interval": 4,
    }
    keys |= {"print_frequency": 1, "heartbeat_limit": LIMIT, "evaluation_interval": 15}
    write_config(folder, ranks, **keys)


class References:
    """Weights of runs that nobody has struck."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[Any, ...], dict[str, str]] = {}

    def weights(self, schedule: str, ranks: int, asked: tuple[int, ...]) -> dict[str, str]:
        """After all updates. To end and be resumed changes nothing, but where the pipeline is drained for it."""
        if schedule in KINDS and KINDS[schedule].synchronous:
            asked = ()
        key = (schedule, ranks, asked)
        if key not in self._known:
            folder = self.folder / f"clean{len(self._known)}"
            make_folder(folder, schedule, ranks)
            for updates in (*asked, UPDATES):
                job = Job(folder, "--resume", "auto", "--set", f"max_updates={updates}")
                try:
                    assert job.wait_for_end(2 * HANG), job.output()
                    assert job.codes == [0], job.output()
                finally:
                    job.kill()
            self._known[key] = final_weights(job.runs[-1])
        return self._known[key]


def deal(drawn: random.Random, deck: Sequence[Any]) -> Iterator[Any]:
    """Cards without end; each as often as every other."""
    while True:
        yield from drawn.sample(deck, len(deck))


def attack(
    rounds: int,
    seed: int,
    schedules: Sequence[str],
    channels: Sequence[str],
    folder: Path,
    isolated: bool,
    minutes: float,
) -> tuple[list[Strike], dict[tuple[str, str], list[list[str]]]]:
    """The strikes, and what was wrong with each run in the end, by schedule and channel.

    `isolated`: sockets and shared memory that are left can be of nobody else.
    """
    drawn = random.Random(seed)
    cards = {channel: deal(drawn, DECKS[channel]) for channel in channels}
    moments = deal(drawn, MOMENTS)
    places = deal(drawn, [(schedule, channel) for schedule in schedules for channel in channels])
    references = References(folder)
    deadline = time.monotonic() + 60 * minutes
    found: list[Strike] = []
    ends: dict[tuple[str, str], list[list[str]]] = {}
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts()).names if GLOO in channels else []
        number = 0
        while len(found) < rounds and time.monotonic() < deadline:
            number += 1
            schedule, channel = next(places)
            run = Attack(folder / f"run{number}", schedule, channel, drawn, hosts)
            try:
                for _ in range(min(STRIKES, rounds - len(found))):
                    strike = run.strike(next(moments), next(cards[channel]))
                    if strike is None:
                        break
                    found.append(strike)
                    print(f"{len(found)}/{rounds} {strike}", flush=True)
                    run.go_on()
                run.finish(lambda asked: references.weights(schedule, run.ranks, asked))  # noqa: B023
            finally:
                run.close()
            within(5.0, lambda: not open_sockets())
            run.wrong += [f"a socket is left: {name}" for name in open_sockets() if isolated]
            run.wrong += [f"shared memory is left: {name}" for name in shared_memory() if isolated]
            run.wrong += [f"a process is left: {process}" for process in alive(str(run.folder))]
            ends.setdefault((schedule, channel), []).append(run.wrong)
            for text in run.wrong:
                print(f"WRONG: {schedule}, {channel} (run{number}): {text}", flush=True)
    return found, ends


def as_tables(found: Sequence[Strike], ends: dict[tuple[str, str], list[list[str]]]) -> str:
    lines = [
        "| channel | struck | signal | strikes | found after (s) | all gone after (s) | trains again after (s) "
        "| culprit right | as it should |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for what in sorted({strike.what for strike in found}, key=lambda what: (what[0] != SHARED, what[1:])):
        some = [strike for strike in found if strike.what == what]
        named = [strike.named for strike in some if strike.named is not None]
        lines.append(
            f"| {' | '.join(what)} | {len(some)} | {_span([s.found for s in some])} | {_span([s.gone for s in some])} "
            f"| {_span([s.again for s in some])} | {f'{sum(named)} of {len(named)}' if named else ''} "
            f"| {sum(not s.wrong for s in some)} of {len(some)} |"
        )
    lines += [
        "",
        "| schedule | channel | runs | strikes | ended with the weights of a clean run, nothing left |",
    ]
    lines += ["|---|---|---|---|---|"]
    for (schedule, channel), wrong in sorted(ends.items()):
        struck = sum((s.schedule, s.channel) == (schedule, channel) for s in found)
        lines.append(
            f"| {schedule} | {channel} | {len(wrong)} | {struck} | {sum(not w for w in wrong)} of {len(wrong)} |"
        )
    return "\n".join(lines) + "\n"


def _span(values: Sequence[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return ""
    return f"{known[0]:.1f}" if len(known) == 1 else f"{median(known):.1f} (at most {known[-1]:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules", nargs="*", default=[*KINDS, TABLE])
    parser.add_argument("--channels", nargs="*", default=[SHARED, GLOO], choices=[SHARED, GLOO])
    parser.add_argument("--minutes", type=float, default=600.0, help="no run begins later")
    parser.add_argument("--docs", type=Path)
    arguments = parser.parse_args()
    signal(SIGTERM, lambda *_: sys.exit(1))  # nothing is left of an attack that is cut short
    isolated = isolate()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        folder = Path(name).resolve()
        found, ends = attack(
            arguments.rounds,
            arguments.seed,
            arguments.schedules,
            arguments.channels,
            folder,
            isolated,
            arguments.minutes,
        )
    tables = as_tables(found, ends)
    print(tables)
    minutes = (time.monotonic() - began) / 60
    wrong = sum(bool(strike.wrong) for strike in found) + sum(bool(w) for runs in ends.values() for w in runs)
    print(
        f"{len(found)} strikes at {sum(map(len, ends.values()))} runs in {minutes:.0f} minutes, {wrong} went wrong"
    )
    if arguments.docs:
        text = arguments.docs.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        arguments.docs.write_text(before + BEGIN + tables + END + after)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
