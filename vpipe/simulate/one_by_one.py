"""One event after the other: the run as `walk` gives it, with ledgers, host links and, if asked for, a timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vpipe.cost import DeviceCost
from vpipe.schedule import Action, Event, Op, Schedule, walk
from vpipe.schedule.steady import SteadyPart
from vpipe.simulate.host import HostLink, shares
from vpipe.simulate.memory import Ledger, TimedLedger, Totals
from vpipe.simulate.network import Network
from vpipe.simulate.stage_cost import StageCost


@dataclass(frozen=True)
class Timeline:
    """All events, in order on each rank, and each rank's memory after every change of it."""

    events: tuple[Event, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...]
    edges: tuple[tuple[int, int], ...]
    """(producer, reader) pairs of stages."""


class OneByOne:
    """The state of one run. `seconds`: of each stage's operations; `factors`: by which some are to be multiplied."""

    def __init__(
        self,
        schedule: Schedule,
        device: DeviceCost,
        costs: Sequence[StageCost],
        seconds: Sequence[Mapping[Op, float]],
        network: Network,
        timeline: bool,
        factors: Mapping[Action, float],
    ) -> None:
        self.schedule = schedule
        self.factors = factors
        self.seconds = seconds
        self.network = network
        self.ledgers: list[Ledger] = []
        self.hosts: dict[int, HostLink] = {}
        swapping = shares(schedule, costs, device.shared_by)
        for rank in range(schedule.num_ranks):
            held = {stage: costs[stage] for stage in schedule.stages_of(rank)}
            if rank in swapping:
                ledger = TimedLedger(held, timeline)
                self.hosts[rank] = HostLink(device, swapping[rank], ledger)
                self.ledgers.append(ledger)
            else:
                self.ledgers.append(Ledger(held, timeline))
        self.events: list[Event] | None = [] if timeline else None

    def run(self, steady: SteadyPart) -> list[Totals]:
        ledgers, hosts, events = self.ledgers, self.hosts, self.events
        hold = self.hold if hosts else None
        plain = not hosts and events is None
        for event in walk(
            self.schedule, self.cost(), transit=self.network.transit, hold=hold, by_start=False
        ):
            rank = event[0]
            ledgers[rank].note(event)
            if rank == steady.rank:
                steady.note(event)
            if plain:
                continue
            if rank in hosts:
                hosts[rank].note(event)
            if events is not None:
                events.append(event)
        for host in hosts.values():
            host.close()
        return [ledger.totals() for ledger in ledgers]

    def cost(self) -> Callable[[Action], float]:
        seconds, factors = self.seconds, self.factors
        if factors:
            sending = self.network.sending if self.network.busy else lambda action: 0.0
            return lambda action: (
                seconds[action.stage][action.op] * factors.get(action, 1.0) + sending(action)
            )
        if self.network.busy:
            return lambda action: seconds[action.stage][action.op] + self.network.sending(action)
        return lambda action: seconds[action[0]][action[1]]

    def hold(self, rank: int, action: Action, start: float) -> float:
        return self.hosts[rank].hold(action, start) if rank in self.hosts else start

    def timeline(self) -> Timeline | None:
        if self.events is None:
            return None
        samples = tuple(tuple(ledger.samples or ()) for ledger in self.ledgers)
        return Timeline(tuple(self.events), samples, tuple(sorted(self.network.rules.edges)))
