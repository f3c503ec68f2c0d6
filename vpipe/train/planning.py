"""The plan of a run: the model is profiled, unless it was before, and planned for the ranks of the run.

`vpipe plan CONFIG` shows it; with `partition: auto` the run uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.config.file import AUTO
from vpipe.cost import (
    GivenHosts,
    Profile,
    Slowdown,
    StaleTraining,
    named_or_table,
    read_profile,
    with_hosts,
    write_plan,
    write_profile,
)
from vpipe.errors import ConfigError, VPipeError
from vpipe.plan import PlanResult, plan
from vpipe.plan.report import about_loss, headline
from vpipe.schedule import Schedule, kind_of
from vpipe.system import user_cache
from vpipe.system.console import announce, inform
from vpipe.system.environment import PROFILE_NAME
from vpipe.system.files import is_folder, read_text
from vpipe.system.host_memory import cores
from vpipe.system.start import Phases
from vpipe.system.units import read_bytes
from vpipe.train.compression import compressed_profile

if TYPE_CHECKING:
    from vpipe.config import RunConfig

MEASURED = (
    "model_type", "model", "hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size", "dropout",
    "batch_size", "sequence_length", "optimizer_groups", "precision", "compile", "cuda_graphs",
    "chunked_loss",
)  # fmt: skip
"""The keys that a profile depends on."""
METHOD = 8
"""The number of the way in which profiles are measured: the cache finds none of another one."""
WORTH = 1.02
"""How many times as fast another number of stages than the requested one must be."""
ONE_HOST = GivenHosts()
PLAN, PROFILE = "plan.json", "profile.json"
"""In the folder of a run that was planned for itself."""
PROFILES = "profiles"
"""Where they are kept for all runs of the user."""


def write_run_plan(
    config: RunConfig,
    path: Path,
    phases: Phases | None = None,
    profile: Profile | None = None,
    *,
    all_ranks: bool = False,
    inform: Callable[[str], None] = inform,
) -> str:
    """Plan the run and write the plan, with the profile that it is made from beside it; a line about the plan.

    `inform` gets what the user has to know besides: that the plan differs from what was asked for, and why.
    """
    phases = phases or Phases("launch")
    phases.begin("profile")
    profile = profile or cached_profile(config)
    phases.begin("plan")
    training = stale_training(config)
    found = plan_run(config, profile, training=training, all_ranks=all_ranks, inform=inform)
    if config.chosen_schedule == AUTO:
        others = "asynchronous" if found.synchronous else "other"
        reason = about_loss(found) or f"no {others} schedule is predicted to reach a loss sooner"
        if found.synchronous and config.optimizer is None:
            reason += (
                f"; it trains with optimizer {config.chosen_optimizer}, by which schedules were compared"
            )
        inform(f"{config.source}: schedule auto: {headline(found)}; {reason}")
    write_plan(found.to_plan(), path)
    write_profile(profile, path.with_name(PROFILE))  # the report makes its predictions from it
    layout = "; ".join(
        f"{sum(stage.slice.stop - stage.slice.start for stage in position.stages)} on "
        f"rank{'s' * (len(position.ranks) > 1)} {', '.join(map(str, position.ranks))}"
        for position in found.positions
    )
    return f"partition: auto: blocks: {layout}; {found.samples_per_second:.4g} samples/s predicted"


def plan_run(
    config: RunConfig,
    profile: Profile | None = None,
    *,
    ranks: int | None = None,
    stages: int | None = None,
    memory: str | None = None,
    schedule: str | None = None,
    minibatches: int | None = None,
    batch_size: int | str | None = None,
    chunks: int | None = None,
    hosts: GivenHosts = ONE_HOST,
    training: StaleTraining | None = None,
    all_ranks: bool = False,
    inform: Callable[[str], None] = inform,
) -> PlanResult:
    """The best plan for the configured run, with what is given here in place of the file's own.

    A table that is given here is found from where we stand, the file's own from the file. `training` is what `auto`
    weighs the samples of stale schedules by; None: not at all. The file's `stages` hold too, unless another
    layout of as many ranks is worth more: then the plan has that, and a line says so.
    """
    directory = Path() if schedule else config.source.parent
    chosen = named_or_table(schedule or config.chosen_schedule, directory)
    memory = memory or config.gpu_memory
    if isinstance(chosen, Schedule):
        ranks = ranks or chosen.num_ranks
    elif chosen == AUTO or kind_of(chosen).synchronous:
        minibatches = minibatches or config.minibatches
    # What an update takes is part of a profile, and which optimizer makes the updates may depend on the schedule.
    named = chosen if isinstance(chosen, Schedule) else None if chosen == AUTO else kind_of(chosen)
    trained = config.under(synchronous=named is not None and named.synchronous)
    if profile is None:
        profile = cached_profile(of_one_host(trained, hosts.ranks[0]) if hosts.ranks else trained)
    elif profile.optimizer not in ("", trained.optimizer) and not config.optimizer_groups:
        inform(
            f"{config.source}: the profile has the updates of optimizer {profile.optimizer}, but the run has "
            f"{trained.optimizer}, whose updates take another time"
        )
    profile = compressed_profile(with_hosts(profile, hosts), config)
    announce(f"{config.source}: searching for a plan")
    find = partial(
        plan,
        ranks=config.ranks if ranks is None else ranks,
        memory=None if memory is None else read_bytes(memory),
        schedule=chosen,
        minibatches=minibatches,
        batch_size=batch_size,
        chunks=chunks,
        training=training,
        all_ranks=all_ranks,
    )
    try:
        found = find(profile, stages=stages)
    except VPipeError:
        if config.cuda_graphs != AUTO or not profile.device.graphs:
            raise
        profile = replace(profile, device=replace(profile.device, graphs=False))  # there is no room for them
        found = find(profile, stages=stages)
    if stages is None and ranks is None and config.stages not in (None, len(found.replicas)):
        found = _with_own_stages(config, found, partial(find, profile, stages=config.stages), inform)
    if chosen == AUTO != config.chosen_schedule and found.synchronous and config.optimizer is None:
        optimizer = config.stale_defaults[0]
        inform(
            f"{config.source}: schedules were compared by optimizer {optimizer}, since the file names none: name it "
            "for a run with this plan, which has adamw otherwise"
        )
    return found


def _with_own_stages(
    config: RunConfig, found: PlanResult, find: Callable[[], PlanResult], inform: Callable[[str], None]
) -> PlanResult:
    """The plan with the file's `stages`, unless the one without is worth more; a line says which, and why."""
    layout = " x ".join(map(str, (len(found.replicas), found.replicas[0])))
    if len(set(found.replicas)) > 1:
        layout = f"{len(found.replicas)} stages of {', '.join(map(str, found.replicas))}"
    try:
        own = find()
    except VPipeError:
        gain = "so many do not fit"
    else:
        ratio = found.samples_per_second / own.samples_per_second
        if ratio < WORTH:
            return own
        gain = f"{ratio:.2f} times as fast by prediction, {found.samples_per_second:.4g} samples/s predicted"
    inform(
        f"{config.source}: stages is {config.stages}, but the plan has {layout} replicas: {gain}; `vpipe plan "
        f"{config.source} --ranks {config.ranks} --stages {config.stages}` writes a plan with {config.stages}"
    )
    return found


def stale_training(config: RunConfig, measured: tuple[Slowdown, ...] = ()) -> StaleTraining:
    """How the run would train under an asynchronous schedule, whatever schedule it has."""
    optimizer, remedies = config.stale_defaults
    return StaleTraining(optimizer, remedies.predict, measured)


def of_one_host(config: RunConfig, own: Sequence[int]) -> RunConfig:
    """The run without the ranks of other hosts: what a profile of this host depends on."""
    machines = None if config.machines is None else [config.machines[rank] for rank in own]
    alone = dict.fromkeys(("replicas", "placement", "partition", "links", "module"))
    return config.model_copy(update=alone | {"machines": machines, "stages": len(own), "compress": "none"})


def cached_profile(config: RunConfig, measure: Callable[[RunConfig], Profile] | None = None) -> Profile:
    """The profile of the configured model on this machine: one that was measured before, or a new one."""
    name = profile_name(config)
    profile = kept_profile(name)
    if profile is None:
        from vpipe.train.profiling import profile_config

        profile = (measure or profile_config)(config)
        keep_profile(name, profile)
    return profile


def kept_profile(name: str) -> Profile | None:
    file = user_cache.find(PROFILES, name)
    if file is not None:
        with suppress(ConfigError):  # of another version, or damaged: it is measured again
            return read_profile(file)
    return None


def keep_profile(name: str, profile: Profile) -> None:
    user_cache.keep(PROFILES, name, lambda path: write_profile(profile, path))


def _own_work(config: RunConfig) -> list[str]:
    """The user's own model and batch, captured: their code may have changed since a profile was made."""
    from vpipe.graph import capture
    from vpipe.train.workload import build_workload

    work = build_workload(config, "meta")
    graph = capture(work.model, work.batch, work.loss_fn)
    shapes = {name: list(tensor.shape) for name, tensor in graph.batch_fields(work.batch).items()}
    return [graph.fingerprint, json.dumps(shapes)]


def profile_name(config: RunConfig) -> str:
    """Of the file, by a hash of all that the profile depends on: the model, the minibatch, the machine.

    A rank takes that of its launcher, whose environment is the user's own.
    """
    if PROFILE_NAME in os.environ:
        return os.environ[PROFILE_NAME]
    settings = config.model_dump(mode="json", include=set(MEASURED))
    settings |= {"optimizer": config.chosen_optimizer, "predict": config.remedies.predict}
    if config.code:
        settings |= {"code": _own_work(config), "python_path": None}
    elif config.model is not None:
        path = config.path(config.model)
        settings["model"] = read_text(path / "config.json" if is_folder(path) else path)
    machine = [METHOD, platform.node(), platform.machine(), version("torch"), config.ranks, config.machines]
    # The same machine has other costs for a process that may use less of it.
    machine += [cores(), *(os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"))]
    return f"{hashlib.sha256(json.dumps([settings, machine], sort_keys=True).encode()).hexdigest()[:16]}.json"
