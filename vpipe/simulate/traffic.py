"""The traffic between hosts: what each network card carries for a minibatch and for an update."""

from __future__ import annotations

from typing import NamedTuple

from vpipe.cost import Plan, Profile, for_batch_size
from vpipe.schedule import Schedule
from vpipe.simulate.arrange import arrange
from vpipe.simulate.network import IN, OUT, Network
from vpipe.simulate.stage_cost import stage_costs


class HostTraffic(NamedTuple):
    ranks: tuple[int, ...]
    sent: float
    """Bytes of activations and their gradients to other hosts, a minibatch of the pipeline; on average, where replicas
    take turns."""
    received: float
    reduced: float
    """Bytes that replicas add up with those of other hosts, an update, out of the card; as many come in."""
    seconds: float
    """How long the card is busy for a minibatch, with its share of an update, in the busier direction."""


def host_traffic(profile: Profile, plan: Plan, schedule: Schedule | None = None) -> tuple[HostTraffic, ...]:
    """Of each host with ranks of the plan; nothing, if all of them are on one."""
    if profile.hosts is None:
        return ()
    of_hosts, profile = profile.hosts.ranks, for_batch_size(profile, plan.batch_size or profile.batch_size)
    arranged = arrange(plan, schedule, plan.minibatches)
    network = Network(arranged, profile, stage_costs(profile, plan, fresh=False))
    hosts = {profile.host_of(rank) for rank in range(arranged.num_ranks)}
    if len(hosts) == 1:
        return ()
    cards = [(way, host) for way in (OUT, IN) for host in hosts]
    carried, busy = dict.fromkeys(cards, 0.0), dict.fromkeys(cards, 0.0)
    reduced = dict.fromkeys(hosts, 0.0)
    for ends in network.routes:
        for phases in ends.values():
            for route in phases:
                for line in route.lines if len(route.lines) > 1 else ():
                    carried[line] += route.size / len(phases)
                    busy[line] += route.seconds / len(phases)
    for (_, rank), found in network.reductions.items():
        for line in found.route.lines:
            busy[line] += found.route.seconds / arranged.update_interval
        reduced[profile.host_of(rank)] += found.route.size
    return tuple(
        HostTraffic(
            tuple(rank for rank in of_hosts[host] if rank < arranged.num_ranks),
            carried[OUT, host],
            carried[IN, host],
            reduced[host],
            max(busy[OUT, host], busy[IN, host]),
        )
        for host in sorted(hosts)
    )
