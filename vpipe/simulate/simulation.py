"""The simulation: a schedule walked with the costs of a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from vpipe.cost import Plan, Profile, as_scheduled, for_batch_size, shared_ranks
from vpipe.schedule import Action, Event, Op, Schedule, walk
from vpipe.schedule.facts import fresh_gradients, makes_versions, splits_backward
from vpipe.schedule.steady import SteadyPart
from vpipe.simulate.arrange import arrange, check_fit
from vpipe.simulate.host import HostLink, shares
from vpipe.simulate.memory import Ledger, RankMemory, TimedLedger, Totals, cuda_graph_memory, fixed_memory
from vpipe.simulate.network import Network
from vpipe.simulate.stage_cost import StageCost, stage_costs

if TYPE_CHECKING:
    from vpipe.simulate.contention import Contention

ITERATIONS = 3
"""Simulations after which times that ranks share change by less than a hundredth."""

F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741


@dataclass(frozen=True)
class RankPrediction:
    """One rank: shares of its time, and its memory at its peak."""

    rank: int
    stages: tuple[int, ...]
    compute: float
    """Forward, backward and update."""
    sending: float
    """Messages that the rank copies itself."""
    bubble: float
    """Waiting: for others, for messages, for swapped data."""
    memory: RankMemory
    most_activations: int
    """Bytes, which need not be there at the rank's peak."""
    pace: float
    """How many times as long it takes as its device alone would, because its host launches work more slowly."""


@dataclass(frozen=True)
class Timeline:
    """All events, in order on each rank, and each rank's memory after every change of it."""

    events: tuple[Event, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...]
    edges: tuple[tuple[int, int], ...]
    """(producer, reader) pairs of stages."""


@dataclass(frozen=True)
class Simulation:
    schedule: str
    synchronous: bool
    minibatches: int
    batch_size: int
    update_interval: int
    step_time: float
    """Seconds between two updates. Synchronous: from a rank's first action to its last, on the slowest rank,
    since each rank begins the next update when its own part of this one is done."""
    samples_per_second: float
    steady: bool
    """Asynchronous: whether there was a steady part; else `step_time` holds filling and draining too."""
    makespan: float
    """From the first start to the last end."""
    ranks: tuple[RankPrediction, ...]
    in_flight: tuple[int, ...]
    """For each stage the most minibatches between F and backward on a rank of it."""
    versions: tuple[int, ...]
    """For each stage the most live versions of the weights."""
    timeline: Timeline | None

    @property
    def bubble(self) -> float:
        return sum(rank.bubble for rank in self.ranks) / len(self.ranks)


def simulate(
    profile: Profile,
    plan: Plan,
    schedule: Schedule | str | None = None,
    minibatches: int | None = None,
    *,
    timeline: bool = False,
) -> Simulation:
    """Predict time, bubble and memory of a plan without running it.

    Args:
        profile: The costs of the model's blocks, from `vpipe.profile`.
        plan: The plan: `to_plan()` of what `vpipe.plan` returns, or from a file.
        schedule: Another schedule than the plan's.
        minibatches: Another number of minibatches than the plan's: those of one update of a synchronous schedule, or
            those of a whole run of an asynchronous one.
        timeline: Keep all events and each rank's memory over time, which are otherwise used and forgotten.
    """
    check_fit(profile, plan)
    profile = for_batch_size(profile, plan.batch_size or profile.batch_size)
    arranged = arrange(plan, schedule, minibatches)
    if profile.hosts is not None:
        profile.hosts.check(arranged.num_ranks)
    split = splits_backward(arranged)
    profile = as_scheduled(profile, split, arranged.update_interval)
    fresh = fresh_gradients(arranged) and not profile.device.graphs
    costs = stage_costs(profile, plan, fresh)
    contention = None
    if shared := shared_ranks(profile, arranged.num_ranks):
        from vpipe.simulate.contention import contention_of  # numpy comes with it

        for _ in range(ITERATIONS):
            before = _Run(profile, arranged, costs, split, contention)
            found = before.result(timeline=True).timeline
            assert found is not None
            contention = contention_of(found.events, arranged.num_ranks, shared, before.seconds, contention)
    return _Run(profile, arranged, costs, split, contention).result(timeline)


class _Run:
    """The state of one simulation."""

    def __init__(
        self,
        profile: Profile,
        schedule: Schedule,
        costs: list[StageCost],
        split: bool,
        contention: Contention | None,
    ) -> None:
        self.profile = profile
        self.split = split
        self.contention = contention
        self.schedule = schedule
        self.costs = costs
        self.network = Network(schedule, profile, costs)
        self.seconds = [dict.fromkeys(Op, 0.0) | cost.seconds for cost in costs]
        for stage in range(schedule.num_stages):
            self.seconds[stage][Op.REDUCE] = self.network.near[stage]
            self.seconds[stage][Op.STEP] += profile.exchange_seconds(costs[stage].exchanged)
            if costs[stage].version and makes_versions(schedule, stage):
                self.seconds[stage][Op.STEP] += costs[stage].version
        self.total = schedule.minibatches or 0
        self.computing = [sum(one[op] for op in ((F, I, W) if split else (F, B))) for one in self.seconds]
        self.paces = [self.pace_of(rank) for rank in range(schedule.num_ranks)]
        self.steady = SteadyPart(schedule, [self.steady_work_of(rank) for rank in range(schedule.num_ranks)])

    def held(self, rank: int) -> dict[int, StageCost]:
        return {stage: self.costs[stage] for stage in self.schedule.stages_of(rank)}

    def own(self, rank: int, stage: int) -> int:
        """How many minibatches of a stage a rank runs."""
        ranks = self.schedule.placement[stage]
        return len(range(ranks.index(rank), self.total, len(ranks)))

    def work_of(self, rank: int) -> float:
        """A rank's compute in the whole run: each of its minibatches once forward and backward, all updates."""
        updates = -(-self.total // self.schedule.update_interval)
        work = 0.0
        for stage in self.schedule.stages_of(rank):
            work += self.own(rank, stage) * self.computing[stage] + updates * self.seconds[stage][Op.STEP]
        return work * self.mean_factor(rank)

    def steady_work_of(self, rank: int) -> float:
        """Its compute for one of the pipeline's minibatches, of which its replicas do the others."""
        updates = [one[Op.STEP] for one in self.seconds]
        return self.per_minibatch(rank, self.computing, updates) * self.mean_factor(rank)

    def per_minibatch(self, rank: int, minibatches: Sequence[float], updates: Sequence[float]) -> float:
        """A rank's part of times of stages for one of the pipeline's minibatches."""
        total = 0.0
        for stage in self.schedule.stages_of(rank):
            total += minibatches[stage] / len(self.schedule.placement[stage])
            total += updates[stage] / self.schedule.update_interval
        return total

    def pace_of(self, rank: int) -> float:
        """`RankPrediction.pace`."""
        updates = [one[Op.STEP] for one in self.seconds]
        device = self.per_minibatch(rank, self.computing, updates) * self.shared_factor(rank)
        minibatches = [cost.launching for cost in self.costs]
        host = self.per_minibatch(rank, minibatches, [cost.launching_update for cost in self.costs])
        return max(1.0, host / device) if device else 1.0

    def shared_factor(self, rank: int) -> float:
        return 1.0 if self.contention is None else self.contention.means[rank]

    def mean_factor(self, rank: int) -> float:
        return self.shared_factor(rank) * self.paces[rank]

    def steady_load_of(self, rank: int) -> float:
        """The same with the messages that it copies itself, once the run is over."""
        return self.steady_work_of(rank) + self.network.copying[rank] / self.steady_turns(rank)

    def steady_turns(self, rank: int) -> int:
        """The pipeline's minibatches that its own stand for."""
        stage = self.schedule.stages_of(rank)[0]
        return max(1, self.own(rank, stage) * len(self.schedule.placement[stage]))

    def result(self, timeline: bool) -> Simulation:
        schedule, total = self.schedule, self.total
        totals, recorded = self.run(timeline)
        makespan = max(rank.end for rank in totals)
        steady = None if schedule.synchronous else self.steady.seconds_per_minibatch()
        if steady is None:
            longest = max(rank.end - rank.begin for rank in totals)
            period = (longest if schedule.synchronous else makespan) / total
        else:
            # A short steady part may seem quicker than the busiest rank, copying included, can be for long.
            period = max(steady, *(self.steady_load_of(rank) for rank in range(schedule.num_ranks)))
        return Simulation(
            schedule=schedule.name,
            synchronous=schedule.synchronous,
            minibatches=total,
            batch_size=self.profile.batch_size,
            update_interval=schedule.update_interval,
            step_time=period * schedule.update_interval,
            samples_per_second=self.profile.batch_size / period if period else inf,
            steady=steady is not None,
            makespan=makespan,
            ranks=tuple(
                self.figures(rank, found, period, steady is not None) for rank, found in enumerate(totals)
            ),
            in_flight=self.most([rank.in_flight for rank in totals]),
            versions=self.most([rank.live for rank in totals]),
            timeline=recorded,
        )

    def run(self, timeline: bool) -> tuple[list[Totals], Timeline | None]:
        """The totals of each rank, and the timeline if it is wanted."""
        ledgers: list[Ledger] = []
        hosts: dict[int, HostLink] = {}
        swapping = shares(self.schedule, self.costs, self.profile.device.shared_by)
        for rank in range(self.schedule.num_ranks):
            if rank in swapping:
                ledger = TimedLedger(self.held(rank), timeline)
                hosts[rank] = HostLink(self.profile.device, swapping[rank], ledger)
                ledgers.append(ledger)
            else:
                ledgers.append(Ledger(self.held(rank), timeline))

        def hold(rank: int, action: Action, start: float) -> float:
            return hosts[rank].hold(action, start) if rank in hosts else start

        events: list[Event] = []
        plain, notes = not hosts and not timeline, [ledger.note for ledger in ledgers]
        for event in walk(
            self.schedule,
            self.action_seconds(),
            transit=self.network.transit,
            shared=self.network if self.network.shared else None,
            hold=hold if hosts else None,
            by_start=False,
        ):
            rank = event[0]
            notes[rank](event)
            if rank == self.steady.rank:
                self.steady.note(event)
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
        return totals, Timeline(tuple(events), samples, tuple(sorted(self.network.rules.edges)))

    def action_seconds(self) -> Callable[[Action], float]:
        """How long each action takes: its operation, times its factor, and the copying of what it sends."""
        network = self.network
        seconds = [
            {op: took if op is Op.REDUCE else took * self.paces[ranks[0]] for op, took in own.items()}
            for own, ranks in zip(self.seconds, self.schedule.placement, strict=True)
        ]
        if self.contention is None and not network.busy:
            return lambda action: seconds[action[0]][action[1]]
        factors = self.contention.factors if self.contention else {}
        return lambda action: (
            seconds[action.stage][action.op] * factors.get(action, 1.0) + network.sending(action)
        )

    def figures(self, rank: int, found: Totals, period: float, steady: bool) -> RankPrediction:
        """`period`: seconds of a minibatch, with filling and draining or, if `steady`, without."""
        stages = self.schedule.stages_of(rank)
        work, turns = self.work_of(rank) / self.total, self.total
        if steady:
            work, turns = self.steady_work_of(rank), self.steady_turns(rank)
        compute = work / period if period else 0.0
        sending = self.network.copying[rank] / turns / period if period else 0.0
        fixed = fixed_memory(self.held(rank), self.profile.optimizer_ratio, self.buffers(rank))
        # A stage that swaps runs eagerly.
        if self.profile.device.graphs and not any(self.costs[stage].swapped for stage in stages):
            memory = cuda_graph_memory(fixed, self.held(rank), found, self.profile.device, self.split)
        else:
            memory = fixed._replace(
                activations=found.activations,
                gradients=fixed.gradients + found.gradients,
                versions=found.versions,
            )
        bubble = max(0.0, 1 - compute - sending)
        return RankPrediction(
            rank, stages, compute, sending, bubble, memory, found.most_activations, self.paces[rank]
        )

    def buffers(self, rank: int) -> int:
        """Two messages for each cut to another rank, each way; gradients of shared parameters; what libraries hold."""
        total = self.profile.device.workspace
        rules, lag = self.network.rules, self.schedule.lag if self.profile.tied else 0
        stages = self.schedule.stages_of(rank)
        here = {block for stage in stages for block in range(*self.costs[stage].blocks)}
        apart = any(not here.issuperset(tie.blocks) for tie in self.profile.tied)
        for stage in stages:
            cost, ranks = self.costs[stage], self.schedule.placement[stage]
            minibatch = ranks.index(rank)
            total += 2 * cost.received if rules.remote_producers(stage, minibatch) else 0
            total += 2 * cost.sent if rules.remote_readers(stage, minibatch) else 0
            total += self.profile.exchange_buffers(*cost.blocks, lag, apart=apart)
        return total

    def most(self, found: Sequence[Mapping[int, int]]) -> tuple[int, ...]:
        """The most over the ranks of each stage."""
        placement = enumerate(self.schedule.placement)
        return tuple(max(found[rank][stage] for rank in ranks) for stage, ranks in placement)
