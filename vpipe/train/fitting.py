"""When memory has run out: a plan for what there really was, as keys for the configuration.

What a rank's tensors could have is what they held when it failed and what was still free, less what the process held
beside them. If a profile of the model is known, it is planned for that; if what the rank needed is more than the
profile foresees, the profile is trusted that much less. Whatever goes wrong here, the user at least gets advice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from vpipe.config import RunConfig
from vpipe.cost import Plan, Profile
from vpipe.errors import OutOfMemoryError, VPipeError
from vpipe.observe.held_bytes import optimizer_of, weights_of
from vpipe.pipeline import Pipeline
from vpipe.plan import PlanResult, plan
from vpipe.runtime.out_of_memory import memory_now
from vpipe.simulate import simulate
from vpipe.system.units import read_bytes
from vpipe.train.planning import known_profile

SECONDS = 10.0
"""That planning may take: the other ranks wait to hear what happened."""


def held_beside(pipe: Pipeline) -> int:
    """Bytes of this process that are no tensors of its stages: interpreter, libraries, data. Before it trains."""
    tensors = sum(weights_of(stage) + optimizer_of(stage) for stage in pipe.runtime.stages.values())
    return max(0, (memory_now().held or 0) - tensors)


def what_would_fit(
    error: OutOfMemoryError, config: RunConfig, pipe: Pipeline, running: Plan, cache: Path, beside: int
) -> str:
    """How to go on: keys that would fit, or what is missing, or the commands that tell."""
    room = _room(error, config, beside)
    if room is None:
        return (
            "partition: auto with gpu_memory set to what there is chooses cuts and recomputation that fit, or says "
            "what is missing; recompute: true needs the least"
        )

    def planned() -> str | None:
        profile = known_profile(config, cache, pipe.layout.graph.plan_fingerprint)
        if profile is None or len(profile.blocks) != len(pipe.layout.graph.blocks):
            return None
        memory, trusted = _trusted(
            profile, running, pipe.rank, room, (error.held or 0) - beside, error.wanted
        )
        try:
            keys = yaml.safe_dump(
                _keys(_plan(profile, config, running, pipe.world.size, memory), config),
                default_flow_style=None,
                sort_keys=False,
                width=10_000,
            )
        except VPipeError as nothing:
            return f"{trusted}{nothing}"
        return f"{trusted}by its profile it would fit with these keys in {config.source}:\n{keys.rstrip()}"

    return _within(SECONDS, planned) or (
        f"it had about {room:,} bytes for tensors: `vpipe plan {config.source} --memory {room} -o fits.json` (and the "
        "--set of this run) chooses cuts and recomputation that fit, or says what is missing; then train with "
        "`--set partition=fits.json`"
    )


def _room(error: OutOfMemoryError, config: RunConfig, beside: int) -> int | None:
    """What the tensors of this rank could have, at most what the configuration allows."""
    if error.held is None or error.free is None:
        return None
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = error.free // neighbours  # the other ranks of the host need some too
    if error.wanted is not None and error.wanted <= free:
        free = 0  # it is in pieces, or something else forbids it
    room = max(1, error.held - beside + free)
    return room if config.gpu_memory is None else min(room, read_bytes(config.gpu_memory))


def _trusted(
    profile: Profile, running: Plan, rank: int, room: int, held: int, wanted: int | None
) -> tuple[int, str]:
    """The memory to plan for, and why: where the run needed twice what was foreseen, another plan will too."""
    foreseen = simulate(profile, running).ranks[rank].memory.total
    needed = held + (wanted or 0)
    if needed <= foreseen or not foreseen:
        return room, f"it had about {room:,} bytes for tensors: "
    return max(1, room * foreseen // needed), (
        f"it had about {room:,} bytes for tensors and needed {needed / foreseen:.3g} times what its profile foresees, "
        "which is allowed for: "
    )


def _plan(profile: Profile, config: RunConfig, running: Plan, ranks: int, memory: int) -> PlanResult:
    """The run with other cuts and policies; if nothing fits, with smaller minibatches."""

    def with_size(size: int | str) -> PlanResult:
        return plan(profile, ranks, memory, running.schedule, running.minibatches, size, config.chunks)

    try:
        return with_size(config.batch_size)
    except VPipeError as nothing:
        try:
            return with_size("auto")
        except VPipeError:
            raise nothing from None


def _keys(found: PlanResult, config: RunConfig) -> dict[str, Any]:
    """The plan as keys of a configuration, which go before those that it has."""
    planned = found.to_plan()
    keys: dict[str, Any] = {
        "schedule": planned.schedule,
        "partition": list(planned.partition),
        "policies": list(planned.policies),
    }
    if config.replicas is not None or max(planned.replicas) > 1:
        keys |= {"stages": len(planned.replicas), "replicas": list(planned.replicas)}
    for key in ("minibatches", "chunks", "update_interval"):
        if getattr(planned, key) is not None:
            keys[key] = getattr(planned, key)
    return keys | {"batch_size": planned.batch_size}


def _within(seconds: float, work: Callable[[], str | None]) -> str | None:
    """What `work` returns; None if it fails or takes longer, in a thread that nobody waits for then."""
    found: list[str | None] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception:  # whatever it is: the user is to hear of the memory
            found.append(None)

    thread = Thread(target=run, daemon=True, name="what would fit")
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
