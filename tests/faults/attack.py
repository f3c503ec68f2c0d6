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
from pathlib import Path
from signal import SIG_DFL, SIGCONT, SIGINT, SIGKILL, SIGQUIT, SIGTERM, Signals, default_int_handler, signal
from typing import Any

from tests.end_to_end.command import alive
from tests.faults.hosts import two_hosts
from tests.faults.outside import LAUNCHER, Job, TorchrunJob, gone, isolate, open_sockets, send, within
from tests.faults.runs import final_weights, half_done, shared_memory
from tests.faults.strikes import (
    DECKS,
    GLOO,
    MOMENTS,
    SHARED,
    A,
    B,
    Blow,
    Strike,
    agents,
    as_tables,
    expected_codes,
    explained,
    fells,
    harmless,
)
from tests.faults.undisturbed import HANG, TABLE, References, lineage, make_folder, ranks_of
from vpipe.schedule import KINDS

BEGIN, END = "<!-- measured by make attack: {} -->\n", "<!-- end of attack: {} -->\n"


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
        struck: dict[str, list[Signals]] = {blow.target: [] for blow in hit}
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
            if not self._complete and not all(code in expected_codes(hit) for code in job.codes):
                strike.wrong.append(f"exit codes {job.codes}: {output[-800:]!r}")
        elif not hit:
            strike.outcome = "no process to strike"

    def go_on(self) -> None:
        """Start it again, if it has ended before its time."""
        self._note_stops()
        if self.job.ended and not self._complete:
            self.job = self._start("--resume", "auto")

    def _note_stops(self) -> None:
        stops = re.findall(r"asked it to end\): it has made (\d+) of", self.job.output())
        self.asked += [int(updates) for updates in stops]

    @property
    def _complete(self) -> bool:
        """Whether it has ended well, now or before: struck after its last checkpoint, it has nothing left to do."""
        return set(self.job.codes) == {0} or "there is nothing to train" in self.job.output()

    def finish(self, reference: Callable[[tuple[int, ...]], dict[str, str]]) -> None:
        """Let it end; what is wrong then is in `wrong`."""
        for _ in range(5):
            if not self.job.wait_for_end(2 * HANG):
                self.wrong.append(f"it does not end: {self.job.alive()}; {self.job.output()[-800:]!r}")
                return
            if self._complete:
                break
            self.go_on()
        self._note_stops()
        if not self._complete:
            self.wrong.append(f"it ended with {self.job.codes}: {self.job.output()[-800:]!r}")
            return
        asked = lineage(self.folder, self.asked)
        last = max(self.folder.glob("runs/2*/checkpoints/step-*"), key=lambda step: step.name).parents[1]
        if final_weights(last) != reference(asked):
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
    strikes: int,
) -> tuple[list[Strike], dict[tuple[str, str], list[list[str]]]]:
    """The strikes, and what was wrong with each run in the end, by schedule and channel.

    `strikes`: at one run. `isolated`: sockets and shared memory that are left can be of nobody else.
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
                for _ in range(min(strikes, rounds - len(found))):
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--strikes", type=int, default=6, help="at one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules", nargs="*", default=[*KINDS, TABLE])
    parser.add_argument("--channels", nargs="*", default=[SHARED, GLOO], choices=[SHARED, GLOO])
    parser.add_argument("--minutes", type=float, default=600.0, help="no run begins later")
    parser.add_argument("--docs", type=Path)
    arguments = parser.parse_args()
    for number in (SIGINT, SIGQUIT):  # which a shell lets its background processes ignore, and these theirs
        signal(number, default_int_handler if number == SIGINT else SIG_DFL)
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
            arguments.strikes,
        )
    tables = as_tables(found, ends)
    print(tables)
    minutes = (time.monotonic() - began) / 60
    wrong = sum(bool(strike.wrong) for strike in found) + sum(bool(w) for runs in ends.values() for w in runs)
    print(
        f"{len(found)} strikes at {sum(map(len, ends.values()))} runs in {minutes:.0f} minutes, {wrong} went wrong"
    )
    for channel in arguments.channels if arguments.docs else ():
        begin, end = BEGIN.format(channel), END.format(channel)
        some = [strike for strike in found if strike.channel == channel]
        before, _, rest = arguments.docs.read_text().partition(begin)
        after = rest.partition(end)[2]
        tables = as_tables(some, {place: runs for place, runs in ends.items() if place[1] == channel})
        arguments.docs.write_text(before + begin + tables + end + after)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
