"""Profiles, plans, and the files of both."""

from vpipe.cost.convergence import (
    Slowdown,
    StaleTraining,
    read_slowdowns,
    sample_factor,
    write_convergence,
)
from vpipe.cost.costs import (
    BlockCost,
    DeviceCost,
    HostCost,
    OtherSize,
    Profile,
    Tie,
    all_reduce_seconds,
    bucket_count,
)
from vpipe.cost.files import GivenHosts, read_any_profile, read_profile, with_hosts, with_links, write_profile
from vpipe.cost.held_bytes import backward_bytes, forward_bytes, held_bytes, input_bytes, update_bytes
from vpipe.cost.links import Hosts, LinkCost
from vpipe.cost.pipedream import read_pipedream_graph
from vpipe.cost.plan_file import Plan, named_or_table, read_plan, write_plan
from vpipe.cost.policies import KEEP, POLICIES, RECOMPUTE, SWAP, MemoryPolicy
from vpipe.cost.scaling import as_scheduled, for_batch_size
from vpipe.cost.sharing import SharedRanks, shared_ranks, taking_turns

__all__ = [
    "KEEP",
    "POLICIES",
    "RECOMPUTE",
    "SWAP",
    "BlockCost",
    "DeviceCost",
    "GivenHosts",
    "HostCost",
    "Hosts",
    "LinkCost",
    "MemoryPolicy",
    "OtherSize",
    "Plan",
    "Profile",
    "SharedRanks",
    "Slowdown",
    "StaleTraining",
    "Tie",
    "all_reduce_seconds",
    "as_scheduled",
    "backward_bytes",
    "bucket_count",
    "for_batch_size",
    "forward_bytes",
    "held_bytes",
    "input_bytes",
    "named_or_table",
    "read_any_profile",
    "read_pipedream_graph",
    "read_plan",
    "read_profile",
    "read_slowdowns",
    "sample_factor",
    "shared_ranks",
    "taking_turns",
    "update_bytes",
    "with_hosts",
    "with_links",
    "write_convergence",
    "write_plan",
    "write_profile",
]
