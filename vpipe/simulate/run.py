"""One simulated run: the events of the walk, with each rank's memory, its host link and, if wanted, a timeline."""

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


def run(
    schedule: Schedule,
    device: DeviceCost,
    costs: Sequence[StageCost],
    cost: Callable[[Action], float],
    network: Network,
    steady: SteadyPart,
    timeline: bool,
) -> tuple[list[Totals], Timeline | None]:
    """The totals of each rank, and the timeline if it is wanted. `cost`: seconds of an action."""
    ledgers: list[Ledger] = []
    hosts: dict[int, HostLink] = {}
    swapping = shares(schedule, costs, device.shared_by)
    for rank in range(schedule.num_ranks):
        held = {stage: costs[stage] for stage in schedule.stages_of(rank)}
        if rank in swapping:
            ledger = TimedLedger(held, timeline)
            hosts[rank] = HostLink(device, swapping[rank], ledger)
            ledgers.append(ledger)
        else:
            ledgers.append(Ledger(held, timeline))

    def hold(rank: int, action: Action, start: float) -> float:
        return hosts[rank].hold(action, start) if rank in hosts else start

    events: list[Event] = []
    plain, notes = not hosts and not timeline, [ledger.note for ledger in ledgers]
    for event in walk(schedule, cost, transit=network.transit, hold=hold if hosts else None, by_start=False):
        rank = event[0]
        notes[rank](event)
        if rank == steady.rank:
            steady.note(event)
        if plain:
            continue
        if rank in hosts:
            hosts[rank].note(event)
        if timeline:
            events.append(event)
    for host in hosts.values():
        host.close()
    totals = [ledger.totals() for ledger in ledgers]
    if not timeline:
        return totals, None
    samples = tuple(tuple(ledger.samples or ()) for ledger in ledgers)
    return totals, Timeline(tuple(events), samples, tuple(sorted(network.rules.edges)))


def action_seconds(
    seconds: Sequence[Mapping[Op, float]], network: Network, factors: Mapping[Action, float]
) -> Callable[[Action], float]:
    """How long each action takes: its operation, times its factor, and the copying of what it sends."""
    if not factors and not network.busy:
        return lambda action: seconds[action[0]][action[1]]
    return lambda action: (
        seconds[action.stage][action.op] * factors.get(action, 1.0) + network.sending(action)
    )
