"""One of the four ranks of `benchmarks/gpu.py`."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf

import vpipe.layout
import vpipe.profile.model
from vpipe import Pipeline
from vpipe.communication import InProcessHub, ProcessWorld, World
from vpipe.cost import Plan, Profile, read_profile, write_profile
from vpipe.cost.plan_file import recomputed_from_end
from vpipe.errors import OutOfMemoryError, VPipeError
from vpipe.graph import capture
from vpipe.graph.partition import partition_for_ranks
from vpipe.plan import plan
from vpipe.plan.result import PlanResult
from vpipe.profile.model import profile_model
from vpipe.schedule import ASYNCHRONOUS, build
from vpipe.simulate import simulate

LENGTH = 128
DEVICE = torch.device("cuda", 0)
SYNCHRONOUS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
WARM, MEASURED = 16, 64
"""Minibatches before the clock starts, and those that are timed, at least."""


class Case(NamedTuple):
    name: str
    schedule: str
    batch: int
    minibatches: int | None = None
    """Of an update; None: each makes its own."""
    partition: tuple[int, ...] | None = None
    policies: tuple[str, ...] | None = None
    cap: int | None = None
    chunks: int | None = None
    replicas: tuple[int, ...] | None = None


class Bench:
    def __init__(
        self, world: ProcessWorld, file: Path, precision: str, layers: int, batch: int, seconds: float
    ):
        self.world, self.file = world, file
        self.precision, self.batch = precision, batch
        self.deadline = time.monotonic() + seconds
        torch.manual_seed(0)
        settings = hf.BertConfig(
            vocab_size=30522,
            hidden_size=1024,
            num_hidden_layers=layers,
            num_attention_heads=16,
            intermediate_size=4096,
        )
        self.model = hf.BertForMaskedLM(settings)
        self.batches = {
            size: [self.make_batch(size, n) for n in range(4)] for size in (batch // 2, batch, 2 * batch)
        }
        self.total = torch.cuda.get_device_properties(DEVICE).total_memory
        self._capture_once()

    def make_batch(self, size: int, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 30522, (size, LENGTH), generator=generator)
        labels = ids.where(torch.rand(ids.shape, generator=generator) < 0.15, -100)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def _capture_once(self) -> None:
        """Capturing takes longer than most cases, and the model is always the same."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        example = self.batches[self.batch][0]
        made = capture(self.model if dtype is None else vpipe.layout.skeleton(self.model, dtype), example)
        self.blocks = len(made.blocks)
        for module in (vpipe.layout, vpipe.profile.model):
            module.capture = lambda *_: made  # type: ignore[attr-defined]

    def optimizer(self, parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 1e-4, fused=True)

    def profile(self, size: int) -> Profile:
        """All ranks measure at once; that of rank 0 counts."""
        gc.collect()
        torch.cuda.set_per_process_memory_fraction(1.0)
        made = profile_model(
            self.model,
            self.batches[size][0],
            optimizer=self.optimizer,
            precision=self.precision,
            seconds=2.0,
            place=DEVICE,
        )
        torch.cuda.empty_cache()
        file = self.file.with_suffix(f".profile{size}.json")
        if self.world.rank == 0:
            write_profile(made, file)
        self.world.all_gather("profiled", None)
        return read_profile(file)

    def tell(self, **row: Any) -> None:
        if self.world.rank == 0:
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)

    def data(self, size: int, count: int) -> Iterator[dict[str, torch.Tensor]]:
        return (self.batches[size][number % 4] for number in range(count))

    def pace(self, case: Case, world: World) -> tuple[float, int]:
        """Samples a second, and this rank's peak of allocated bytes."""
        gc.collect()  # what an earlier case has left in cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(case.cap / self.total if case.cap else 1.0)
        asynchronous = case.minibatches is None or case.schedule == "2bw"
        per_update = case.minibatches or 1
        options: dict[str, Any] = {"chunks": case.chunks} if case.chunks else {}
        if case.schedule == "2bw":
            options["update_interval"] = per_update
        elif not asynchronous:
            options["minibatches"] = per_update
        warm, measured = -(-WARM // per_update), max(4, -(-MEASURED // per_update))
        with Pipeline(
            self.model,
            self.batches[case.batch][0],
            optimizer=self.optimizer,
            schedule=case.schedule,
            partition=case.partition,
            policies=case.policies,
            replicas=case.replicas,
            precision=self.precision,
            device=DEVICE,
            world=world,
            timeout=60,
            **options,
        ) as pipe:
            marks = []
            for _ in pipe.train(self.data(case.batch, per_update * (warm + measured))):
                marks.append(time.perf_counter())
            late = pipe.runtime.losses.late
            peak = torch.cuda.max_memory_allocated()
        # The last losses come all at once, when the pipeline has been drained.
        first, last = warm, len(marks) - 1 - late
        return (last - first) * per_update * case.batch / (marks[last] - marks[first]), peak

    def run(self, case: Case, profile: Profile | None, limits: dict[str, float]) -> float | None:
        """One case on all ranks. What does not fit ends it on every rank."""
        row: dict[str, Any] = {"case": case.name, "schedule": case.schedule, "batch": case.batch}
        row |= {"minibatches": case.minibatches, "partition": case.partition, "replicas": case.replicas}
        row |= {"cap": case.cap, "policies": None if case.policies is None else Counter(case.policies)}
        try:
            rate, peak = self.pace(case, self.world_again())
            row["samples_per_s"] = rate
        except (torch.OutOfMemoryError, OutOfMemoryError, VPipeError) as error:
            rate, peak = None, 0
            row["error"] = str(error).splitlines()[0][:100]
        row["peak_bytes"] = self.world.all_gather("peak", peak)
        fits = all(self.world.all_gather("fits", rate is not None))
        kind = "minibatch" if case.minibatches is None else "step"
        if fits and rate is not None and kind in limits and case.batch == self.batch:
            row["of_limit"] = rate / limits[kind]
        if profile is not None and case.partition is not None:
            row |= self.foreseen(case, profile, rate)
        self.tell(**row)
        return rate if fits else None

    def foreseen(self, case: Case, profile: Profile, rate: float | None) -> dict[str, Any]:
        assert case.partition is not None
        policies = case.policies or ("keep",) * self.blocks
        interval = case.minibatches if case.schedule == "2bw" else None
        per_update = None if case.schedule == "2bw" else case.minibatches
        written = Plan(
            case.partition,
            policies,
            case.schedule,
            case.replicas or (),
            per_update,
            case.chunks,
            interval,
            case.batch,
        )
        result = simulate(profile, written, None, per_update or 64)
        told: dict[str, Any] = {
            "predicted": result.samples_per_second,
            "foreseen_bytes": [rank.memory.total for rank in result.ranks],
        }
        if rate is not None:
            told["off"] = result.samples_per_second / rate - 1
        return told

    def world_again(self) -> ProcessWorld:
        """Another world of the same job: a pipeline closes its own."""
        return ProcessWorld(timeout=60)

    def in_time(self) -> bool:
        return self.world.all_gather("time", time.monotonic() < self.deadline)[0]

    def limits(self) -> dict[str, float]:
        """Samples a second of four ranks that each train the whole model alone, updates as they are made."""
        found: dict[str, float] = {}
        for kind, count in (("step", 8), ("minibatch", 1)):
            case = Case("limit", "1f1b", self.batch, count)
            alone = 0.0
            if self.world.rank == 0:
                alone = self.pace(case, InProcessHub(1).join(0))[0]
            self.world.all_gather("alone", None)
            together = self.pace(case, InProcessHub(1).join(0))[0]
            rates = self.world.all_gather("together", together)
            found[kind] = 4 * self.world.all_gather("alone", alone)[0]
            row = {"minibatches": count, "batch": self.batch, "samples_per_s": found[kind], "of_limit": 1.0}
            self.tell(case=f"limit, one update a {kind}: four times one rank alone", **row)
            row |= {"samples_per_s": sum(rates), "of_limit": sum(rates) / found[kind]}
            self.tell(case=f"limit, one update a {kind}: four ranks at once, each a whole model", **row)
        return found


def main() -> None:
    file, precision, layers, batch, seconds, parts = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # TF32, as anybody would who trains in float32
    torch.cuda.set_device(DEVICE)
    world = ProcessWorld(timeout=120)
    bench = Bench(world, Path(file), precision, int(layers), int(batch), float(seconds))
    if world.rank == 0:
        Path(file).unlink(missing_ok=True)
    limits = bench.limits() if "schedules" in parts else {}
    profile = bench.profile(int(batch))
    for part in parts.split(","):
        PARTS[part](bench, profile, limits)


def balanced(profile: Profile, case: Case) -> tuple[int, ...]:
    """Cuts that let the busiest rank take as little time as possible, by the profile, updates included."""
    name, per_update = case.schedule, case.minibatches or 1
    schedule = build(name, 4, None if name in ASYNCHRONOUS else per_update, chunks=case.chunks)
    times = [block.forward + block.backward + block.update / per_update for block in profile.blocks]
    return partition_for_ranks([round(1e9 * seconds) for seconds in times], schedule.placement)


def schedules(bench: Bench, profile: Profile, limits: dict[str, float]) -> None:
    cases = [Case("vpipe", "vpipe", bench.batch), Case("2bw", "2bw", bench.batch, 8)]
    for count in (8, 32):
        cases += [
            Case(name, name, bench.batch, count, chunks=2 if name == "interleaved" else None)
            for name in SYNCHRONOUS
        ]
    for case in cases:
        if not bench.in_time():
            return
        bench.run(case._replace(partition=balanced(profile, case)), profile, limits)
    made = plan(profile, 4, profile.device.memory // 4, "vpipe")
    if bench.in_time():
        bench.run(planned(made, "vpipe, as planned", bench.batch), profile, limits)


def planned(made: PlanResult, name: str, batch: int, cap: int | None = None) -> Case:
    return Case(name, "vpipe", batch, None, made.partition, made.policies, cap, replicas=made.replicas)


def guides(bench: Bench, profile: Profile, limits: dict[str, float]) -> None:
    """The guides' table under one cap, and plans of our own for it."""
    per_stage = bench.blocks // 4
    even = (13, 13, 13, 10) if bench.blocks == 49 else (per_stage,) * 3 + (bench.blocks - 3 * per_stage,)
    hand = (12, 13, 13, 11) if bench.blocks == 49 else even
    size = bench.batch
    bench.run(
        Case("PipeDream's setting, whole batch, no cap", "pipedream", size, partition=even), profile, limits
    )
    needed = max(bench.world.all_gather("needed", torch.cuda.max_memory_allocated()))
    cap = int(0.9 * needed)
    some = recomputed_from_end(hand, (0.3, 0.0, 0.0, 0.0))
    best = None
    for scale in (1, 2):
        if not bench.in_time():
            break
        wider = profile if scale == 1 else bench.profile(size * scale)
        try:
            # A tenth for what no plan knows: workspaces of kernels, gradients of activations on their way.
            made = plan(wider, 4, int(0.9 * cap), "vpipe")
        except VPipeError as error:
            bench.tell(case=f"our plan, batch {size * scale}", error=str(error).splitlines()[0][:100])
            continue
        rate = bench.run(planned(made, "our plan", size * scale, cap), wider, limits)
        best = max(filter(None, (best, rate)), default=None)
    rates = {
        "pipedream": bench.run(
            Case("PipeDream's setting, half the batch", "pipedream", size // 2, partition=even, cap=cap),
            profile,
            {},
        ),
        "gpipe": bench.run(
            Case("GPipe's setting", "gpipe", size, 32, even, ("recompute",) * bench.blocks, cap),
            profile,
            limits,
        ),
        "vpipe": bench.run(Case("VPipe's setting", "vpipe", size, None, hand, some, cap), profile, limits),
    }
    if best:
        ratios = {name: best / rate for name, rate in rates.items() if rate}
        bench.tell(case="our plan against the settings", ratios=ratios)
    bench.run(
        Case("PipeDream's setting, whole batch", "pipedream", size, partition=even, cap=cap), profile, limits
    )


PARTS = {"schedules": schedules, "guides": guides}

if __name__ == "__main__":
    main()
