"""Common ground of the parts of the GPU benchmark: the model, cases, one case's run on all ranks, its prediction."""

from __future__ import annotations

import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers as hf
from gpu_models import SUBJECTS
from torch import Tensor, nn

import vpipe.pipeline.layout
import vpipe.profile.device
import vpipe.profile.model
import vpipe.stage.module
from vpipe import Pipeline
from vpipe.communication import ProcessWorld, World
from vpipe.cost import Plan, Profile, Tie
from vpipe.errors import OutOfMemoryError, VPipeError
from vpipe.graph import ModelGraph, capture
from vpipe.graph.materialise import materialise
from vpipe.observe.figures import figures_of
from vpipe.pipeline.captured import captured
from vpipe.profile.contention import profile_shared_device
from vpipe.profile.measured_stage import clock_of, seconds
from vpipe.profile.model import MeasuredModel
from vpipe.profile.outside import OutsideMemory
from vpipe.record.status import TIMES
from vpipe.simulate import simulate
from vpipe.stage.precision import skeleton
from vpipe.system.device_memory import forget_peak, peak_memory

ISSUED, ISSUED_ROUNDS = 400, 9
"""Kernels that tell how quick a host is: fewer than a GPU takes before they are done."""
RECORDED = 40
"""Minibatches after which every CUDA graph has been recorded, of three updates at least."""
BRIEF = 12
"""Minibatches of a run that only tells whether a case fits."""
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


NOISE = 2**20
"""Random numbers of which quick matrices are made."""


class Settings(NamedTuple):
    """The options of `gpu.py`."""

    json: str
    device: str
    precision: str
    tf32: bool
    model: str
    """One of `gpu_models.py`."""
    tiny: bool
    layers: int
    batch: int
    length: int
    warm: int
    """Minibatches before the clock starts."""
    measured: int
    """Minibatches that are timed, at least."""
    began: float
    """When the benchmark did, by the clock that all processes share."""
    seconds: float
    parts: tuple[str, ...]
    minibatches: tuple[int, ...]
    cuda_graphs: bool | str = False
    """auto: as `cuda_graphs: auto` of a run."""
    least: int = 4
    """Updates that are timed, at least."""
    quick: bool = False
    """Profiles are measured in less time, and without the memory that ranks have beside their allocator."""
    compile: bool = False
    """Of the part `predictions`; others say themselves what is compiled."""
    schedules: tuple[str, ...] = ()
    """Of the part `targets`."""


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
    layers: int | None = None
    """Of the model, if not the requested ones."""
    compile: bool = False
    brief: bool = False
    """Whether it fits is all that is asked."""


class Pace(NamedTuple):
    """Of one rank in a case."""

    rate: float
    """Samples a second of the whole pipeline; 0 for a brief run."""
    peak: int
    """Bytes that the allocator had given out at most."""
    spent: dict[str, float]
    """Milliseconds of a minibatch, by the GPU's clock."""
    retries: int
    """Times that the allocator had to give memory back to find some, from the warm pipeline on."""


class Bench:
    def __init__(self, world: ProcessWorld, settings: Settings) -> None:
        self.world, self.settings = world, settings
        self.file = Path(settings.json)
        self.device = torch.device(settings.device)
        self.precision, self.batch, self.layers = settings.precision, settings.batch, settings.layers
        self.subject = SUBJECTS[settings.model]
        self.deadline = settings.began + settings.seconds
        self.total = (
            torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0
        )
        self.cap: int | None = None  # found when it is first needed
        self._models: dict[int, nn.Module] = {}
        self._graphs: dict[tuple[int, int], ModelGraph] = {}  # layers and samples
        self._batches: dict[int, list[dict[str, Tensor]]] = {}
        # Capturing takes longer than most cases, and there are few models. To train, a graph of any size will do;
        # a profile tells bytes of it.
        vpipe.pipeline.layout.captured = self._capture_of(self.batch)  # type: ignore[attr-defined]
        vpipe.profile.model.captured = self._capture_of(None)  # type: ignore[attr-defined]
        if settings.quick:
            vpipe.profile.device.measure_outside = lambda device, nccl: OutsideMemory()  # type: ignore[attr-defined]
            vpipe.stage.module.materialise = materialise_quickly  # type: ignore[attr-defined]

    def model(self, layers: int) -> nn.Module:
        """Without weights: every rank makes those of its own stages."""
        if layers not in self._models:
            with torch.device("meta"):
                self._models[layers] = self.subject.build(layers, tiny=self.settings.tiny)
        return self._models[layers]

    @property
    def blocks(self) -> int:
        return len(self.graph(self.layers, self.batch).blocks)

    def graph(self, layers: int, size: int) -> ModelGraph:
        if (layers, size) not in self._graphs:
            if size != self.batch:
                self._graphs[layers, size] = of_size(self.graph(layers, self.batch), size / self.batch)
            else:
                model, dtype, began = self.model(layers), DTYPES[self.precision], time.monotonic()
                whole = model if dtype is None else skeleton(model, dtype)
                self._graphs[layers, size] = capture(whole, self.batches(size)[0], keep=True)
                spent, all_in_all = time.monotonic() - began, time.monotonic() - self.settings.began
                self.tell(case=f"captured in {spent:.1f} s, {all_in_all:.1f} s after the start")
        return self._graphs[layers, size]

    def _capture_of(self, size: int | None) -> Callable[..., ModelGraph]:
        """What stands in for `captured`: with so many samples, or as many as the batch has."""

        def known(model: nn.Module, batch: Any, *others: Any) -> ModelGraph:
            if isinstance(model, hf.PreTrainedModel):
                return self.graph(model.config.num_hidden_layers, size or len(batch["labels"]))
            return captured(model, batch, *others)

        return known

    def batches(self, size: int) -> list[dict[str, Tensor]]:
        if size not in self._batches:
            config: Any = self.model(self.layers).config
            drawing = (torch.Generator().manual_seed(seed) for seed in range(4))
            self._batches[size] = [
                self.subject.batch(config, size, self.settings.length, generator) for generator in drawing
            ]
        return self._batches[size]

    def data(self, size: int, count: int) -> Iterator[dict[str, Tensor]]:
        return (self.batches(size)[number % 4] for number in range(count))

    def optimizer(self, parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 1e-4, fused=True)

    def profile(self, size: int, *, compiled: bool = False) -> Profile:
        """Rank 0's, while all compute."""
        self.begin(None)
        began = time.monotonic()
        measured = MeasuredModel(
            self.model(self.layers),
            self.batches(size)[0],
            optimizer=self.optimizer,
            precision=self.precision,
            compile="inductor" if compiled else None,
            cuda_graphs=self.settings.cuda_graphs,
            place=self.device,
        )
        name = f".profile{size}{'c' if compiled else ''}.json"
        seconds = 1.5 if self.settings.quick else 3.0
        made = profile_shared_device(self.world, measured, self.file.with_suffix(name), seconds)
        peak = self.peak() / 2**30
        self.tell(
            case=f"profile, {time.monotonic() - began:.1f} s",
            batch=size,
            compile=compiled,
            issuing_us=self.issuing(),
            peak_gib=round(peak, 2),
        )
        return made

    def issuing(self) -> float:
        """Microseconds that it takes the slowest host to issue a kernel, while all do.

        Where the host is the limit, a prediction is of the pace that it had when the profile was measured.
        """
        one, taken = torch.zeros(1, device=self.device), []
        self.world.all_gather("issuing", None)
        for _ in range(ISSUED_ROUNDS):
            start = time.perf_counter()
            for _ in range(ISSUED):
                one.add_(1)
            taken.append((time.perf_counter() - start) / ISSUED)
            one.item()
        return round(1e6 * max(self.world.all_gather("issued", median(taken))), 2)

    def tell(self, **row: Any) -> None:
        if self.world.rank == 0:
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)

    def begin(self, cap: int | None) -> None:
        """Nothing of earlier cases is left, and from now on a rank may have so many bytes."""
        gc.collect()  # what an earlier case has left in cycles
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()  # all ranks have closed the others' memory since they met after that case
            torch.cuda.empty_cache()
            forget_peak(self.device)
            torch.cuda.set_per_process_memory_fraction(cap / self.total if cap else 1.0)

    def peak(self) -> int:
        """Bytes that the allocator had given out at most; 0 on the CPU, where nobody counts."""
        return peak_memory(self.device) if self.device.type == "cuda" else 0

    def updates(self, minibatches: int) -> tuple[int, int]:
        """Updates of so many minibatches before the clock starts, and those that are timed."""
        # The second update is the first that the device checks itself.
        warm = max(2, -(-self.settings.warm // minibatches))
        if self.settings.cuda_graphs:
            warm = max(warm, 3, -(-RECORDED // minibatches))
        return warm, max(self.settings.least, -(-self.settings.measured // minibatches))

    def pace(self, case: Case, world: World, *, meet: bool = False) -> Pace:
        """What this rank measures in a case; with `meet` all ranks wait for each other before the clock starts."""
        self.begin(case.cap)
        options: dict[str, Any] = {"chunks": case.chunks} if case.chunks else {}
        if case.minibatches is not None:
            options["update_interval" if case.schedule == "2bw" else "minibatches"] = case.minibatches
        with Pipeline(
            self.model(case.layers or self.layers),
            self.batches(case.batch)[0],
            optimizer=self.optimizer,
            schedule=case.schedule,
            partition=case.partition,
            policies=case.policies,
            replicas=case.replicas,
            precision=self.precision,
            compile=case.compile,
            cuda_graphs=self.settings.cuda_graphs,
            on_nonfinite="stop",  # as `vpipe train` has it
            device=self.device,
            world=world,
            timeout=300 if case.compile else 60,
            **options,
        ) as pipe:
            per_update = pipe.runtime.routes.schedule.update_interval
            warm, measured = self.updates(per_update)
            updates = max(2, -(-BRIEF // per_update)) if case.brief else warm + measured
            marks, figures = [], []
            clock = clock_of(self.device) if self.device.type == "cuda" else time.perf_counter
            for _ in pipe.train(self.data(case.batch, per_update * updates)):
                # On a GPU by its own clock: the host is ahead of it, by more or by less.
                marks.append(clock())
                if len(marks) == warm:
                    if meet:
                        self.world.all_gather("warm", None)
                    figures.append(figures_of(pipe))
            late = pipe.runtime.losses.late
            peak = self.peak()
            figures.append(figures_of(pipe))
        if case.brief:
            return Pace(0.0, peak, {}, 0)
        # The last losses come all at once, when the pipeline has been drained.
        first, last = warm, len(marks) - 1 - late
        rate = (last - first) * per_update * case.batch / seconds((marks[first], marks[last]))
        spent = figures[1].since(figures[0])
        # The GPU is some minibatches behind its host: its shares are known, not how many they are of.
        scale = 1e3 * case.batch / rate / spent.clock
        spent_ms = {part: round(scale * getattr(spent, part), 3) for part in TIMES}
        return Pace(rate, peak, spent_ms, int(spent.retries))

    def run(self, case: Case, profile: Profile | None, limits: dict[str, float]) -> float | None:
        """One case on all ranks: its pace, None if it does not fit. What does not fit ends it on every rank."""
        began = time.monotonic()
        row: dict[str, Any] = {"case": case.name, "schedule": case.schedule, "batch": case.batch}
        row |= {"minibatches": case.minibatches, "partition": case.partition, "replicas": case.replicas}
        row |= {"cap": case.cap, "policies": None if case.policies is None else Counter(case.policies)}
        row |= {"of_each_block": None if case.policies is None else "".join(own[0] for own in case.policies)}
        row |= {"layers": case.layers or self.layers, "compile": case.compile, "issuing_us": self.issuing()}
        row |= {"cuda_graphs": self.settings.cuda_graphs}
        predicted = {} if profile is None or case.partition is None else self.prediction(case, profile)
        pace: Pace | None = None
        try:
            if self.device.type == "cpu" and case.cap and max(predicted["predicted_bytes"]) > case.cap:
                raise OutOfMemoryError(
                    "predicted to need more than the cap, which nothing enforces on the CPU"
                )
            pace = self.pace(case, ProcessWorld(timeout=60))
        except (torch.OutOfMemoryError, VPipeError) as error:
            row["error"] = str(error).splitlines()[0][:100]
        paces = self.world.all_gather("pace", pace)
        row["peak_bytes"] = [0 if found is None else found[1] for found in paces]
        row["fits"] = fits = None not in paces
        rate = None if pace is None else pace.rate
        if fits and rate:
            row |= {"samples_per_s": rate, "spent_ms": [found[2] for found in paces]}
            row["allocator_retries"] = [found[3] for found in paces]
            kind = "minibatch" if case.minibatches is None else "step"
            if case.batch == self.batch:
                row |= shares(rate, limits, kind)
            if predicted:
                row["off"] = predicted["predicted"] / rate - 1
        if all(row["peak_bytes"]) and predicted:
            pairs = zip(predicted["predicted_bytes"], row["peak_bytes"], strict=True)
            row["memory_off"] = [expected / measured - 1 for expected, measured in pairs]
        self.tell(**row, **predicted, seconds=round(time.monotonic() - began, 1))
        return rate if fits else None

    def prediction(self, case: Case, profile: Profile) -> dict[str, Any]:
        """What the simulator says: samples a second, and bytes of each rank."""
        assert case.partition is not None
        if case.layers is not None:
            profile = with_layers(profile, case.layers)
        interval = case.minibatches if case.schedule == "2bw" else None
        per_update = None if case.schedule == "2bw" else case.minibatches
        written = Plan(
            case.partition,
            case.policies or ("keep",) * sum(case.partition),
            case.schedule,
            case.replicas or (),
            per_update,
            case.chunks,
            interval,
            batch_size=case.batch,
        )
        result = simulate(profile, written, None, per_update or 64)
        period = case.batch / result.samples_per_second
        return {
            "predicted": result.samples_per_second,
            "predicted_bytes": [rank.memory.total for rank in result.ranks],
            "predicted_ms": [round(1e3 * period * rank.compute, 3) for rank in result.ranks],
        }

    def in_time(self, deadline: float | None = None) -> bool:
        """Rank 0's word for all: whether there is time for a further case."""
        until = self.deadline if deadline is None else min(deadline, self.deadline)
        return self.world.all_gather("time", time.monotonic() < until)[0]


def with_sizes(settings: Settings) -> Settings:
    """With the model's own layers and length where none are requested."""
    subject = SUBJECTS[settings.model]
    return settings._replace(
        layers=settings.layers or subject.layers, length=settings.length or subject.length
    )


def materialise_quickly(
    model: nn.Module, names: Iterable[str], seed: int, device: torch.device
) -> dict[str, Tensor]:
    """Matrices of the same random numbers over and over: the model's own take a second for each 100 million."""
    large = {name: p for name, p in model.named_parameters() if p.is_meta and p.dim() > 1}
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(NOISE).normal_(0.0, 0.02, generator=generator)
    names = list(names)
    made = materialise(model, [name for name in names if name not in large], seed, device)
    for name in filter(large.__contains__, names):
        size = large[name].numel()
        made[name] = noise.repeat(-(-size // NOISE))[:size].view(large[name].shape).to(device)
    return made


def shares(rate: float, limits: dict[str, float], kind: str) -> dict[str, float]:
    """Of four times one rank alone, and of four ranks that compute at once with no word between them."""
    if kind not in limits:
        return {}
    return {"of_limit": rate / limits[kind], "of_together": rate / limits[f"{kind}, together"]}


def of_size(graph: ModelGraph, scale: float) -> ModelGraph:
    """The captured graph for minibatches of another size: of what a profile reads, only bytes between blocks differ."""
    made = copy(graph)
    made.blocks = tuple(replace(block, cut_bytes=round(scale * block.cut_bytes)) for block in graph.blocks)
    return made


def with_layers(profile: Profile, layers: int) -> Profile:
    """The profile of the same model with another number of layers: each is two blocks, the head is one.

    The first layer's blocks differ, having the embedding before them.
    """
    blocks = (*profile.blocks[:2], *profile.blocks[2:4] * (layers - 1), profile.blocks[-1])
    last = len(profile.blocks) - 1
    tied = [
        Tie(tie.bytes, tuple(2 * layers if block == last else block for block in tie.blocks))
        for tie in profile.tied
    ]
    return replace(profile, blocks=blocks, tied=tuple(tied), other_sizes=())
