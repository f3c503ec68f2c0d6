"""Strikes: signals to processes of a run from outside, what must become of it then, and the tables of what did."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from signal import SIGABRT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGSEGV, SIGSTOP, SIGTERM, Signals
from statistics import median

from tests.faults.outside import CLEANUP, LAUNCHER

SHARED, GLOO = "shared memory", "gloo"
LIMIT = 3.0
"""The ranks' `heartbeat_limit`, in seconds."""
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
    names += ["stopped (SIGSTOP)"] * (SIGSTOP in signals)
    if SIGINT in signals:
        names += ["KeyboardInterrupt", "Aborted", f"ended with exit code {128 + SIGINT}"]
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
