"""The profile of a model: each kind of block on the bench, each block's bytes, the device, the link."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.communication import HOST
from vpipe.cost import DeviceCost, LinkCost, Profile
from vpipe.graph import ModelGraph, StageGraph, capture
from vpipe.profile.bench import Bench, run_round, run_rounds
from vpipe.profile.block_costs import Kept, block_costs, kept_in, optimizer_ratio, ties
from vpipe.profile.contention import company as kept_company
from vpipe.profile.cuda_graph_bench import TapedBench
from vpipe.profile.device import SLACK, measure_adding, measure_device
from vpipe.profile.kinds import Shape, shapes
from vpipe.profile.links import measure_link
from vpipe.profile.swapping import measure_swapping
from vpipe.profile.times import Calls, Times
from vpipe.runtime import count_samples
from vpipe.stage.precision import cast, compute_dtype, skeleton
from vpipe.system.device import check_cuda_graphs
from vpipe.weights import OptimizerFactory

MEMBERS = 2
"""Blocks of a kind that are measured: with one alone, its weights would never leave the caches."""
RUN = 4
"""Blocks that are measured in one go as well, on a GPU: what a call takes beyond them is not theirs."""
LEAST_ROUNDS, MOST_ROUNDS = 5, 25


def profile_model(
    model: nn.Module,
    example_batch: Any,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    optimizer: OptimizerFactory,
    precision: str = "fp32",
    compile: str | None = None,
    cuda_graphs: bool = False,
    seconds: float = 5.0,
    device: DeviceCost | None = None,
    link: LinkCost | None = None,
    company: int = 0,
    place: torch.device = HOST,
) -> Profile:
    """Measure the model on this machine, on the CPU or a GPU (`place`), with minibatches like `example_batch`.

    The model may be on `meta`: only one or two blocks of each kind are ever built. Rounds of measurements go on
    for about `seconds`, while so many processes as `company` says do the same work: the other ranks of this host.
    `compile` names a backend of torch.compile for the blocks; with `cuda_graphs` a GPU's are played from those.
    `device` and `link` are measured as well, unless they are given.
    """
    bench = ModelBench(
        model,
        example_batch,
        loss_fn,
        optimizer=optimizer,
        precision=precision,
        compile=compile,
        cuda_graphs=cuda_graphs,
        place=place,
    )
    return bench.measure(seconds, device, link, company)


class ModelBench:
    """One or two blocks of each of a model's kinds, to be measured round by round.

    On a GPU kinds come as often as in the model, for they share its power and, with other ranks, its memory; and some
    blocks run in one go as well. There a block alone may take the host longer to issue than the GPU to compute: what
    that takes for each call is the action's (`DeviceCost.overhead`), not each block's.
    """

    def __init__(
        self,
        model: nn.Module,
        example_batch: Any,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        optimizer: OptimizerFactory,
        precision: str = "fp32",
        compile: str | None = None,
        cuda_graphs: bool = False,
        place: torch.device = HOST,
        in_one_go: int | None = None,
    ) -> None:
        """`in_one_go`: how many blocks run so as well; None: some on a GPU, none on the CPU."""
        self.graphs = cuda_graphs
        self._bench = TapedBench if cuda_graphs else Bench
        if cuda_graphs:
            check_cuda_graphs(place)
        self.place = place
        self.compiled = compile is not None
        if in_one_go is None:
            in_one_go = RUN if place.type == "cuda" else 0
        self.dtype = dtype = compute_dtype(precision)
        self.graph = capture(model if dtype is None else skeleton(model, dtype), example_batch, loss_fn)
        fields = self.graph.batch_fields(example_batch)
        fields = {name: cast(tensor, dtype).to(place) for name, tensor in fields.items()}
        self.batch_size = int(count_samples(fields))
        self.shapes = shapes(self.graph)
        with torch.random.fork_rng(devices=[]):
            self.kinds, self._kept, values = _set_up(
                self.graph, self.shapes, model, optimizer, dtype, fields, place, compile, self._bench
            )
            run = None
            if min(in_one_go, len(self.shapes)) > 1:
                stage = _commonest(self.graph, self.shapes, in_one_go)
                own = {name: fields[name] for name in stage.fields}
                run = self._bench(stage, model, optimizer, dtype, values, own, place, compile)
        self.run = run
        singles = [bench for own in self.kinds.values() for bench in own]
        self.everything = singles if run is None else [*singles, run]
        for bench in self.everything:
            bench.begin()
        self._rounds = self.rounds_as_often()

    def measure(
        self,
        seconds: float = 5.0,
        device: DeviceCost | None = None,
        link: LinkCost | None = None,
        company: int = 0,
    ) -> Profile:
        """Rounds for so many seconds, in `company`, and the device and the link, unless they are given."""
        if self.compiled:
            self.round()  # before the company comes
        if self.place.type == "cuda":
            self.work_for(seconds / 4)
            self.forget()
            self.work_for(seconds)
            self.swap()
        else:
            with kept_company(company, self.round), torch.random.fork_rng(devices=[]):
                run_rounds(self.everything, LEAST_ROUNDS, MOST_ROUNDS, seconds)
        return self.profile(device or measure_device(self.place), link or measure_link(self.place))

    def work_for(self, seconds: float) -> None:
        """Rounds in which kinds come as often as in the model: so long, and until all have had their turn."""
        end = perf_counter() + seconds
        for whole in self._rounds:
            if whole and perf_counter() > end:
                return

    def swap(self) -> None:
        """What swapping takes the host, of every kind. On a CPU copies do not run beside computing: nothing."""
        if self.place.type != "cuda":
            return
        with torch.random.fork_rng(devices=[]):
            measure_swapping(bench for own in self.kinds.values() for bench in own[:1])

    def round(self) -> None:
        with torch.random.fork_rng(devices=[]):
            run_round(self.everything)

    def begin_at(self, share: float) -> None:
        """Let these rounds begin behind this share of them, for company that is not to keep step."""
        self._rounds = self.rounds_as_often(share)

    def rounds_as_often(self, share: float = 0.0) -> Iterator[bool]:
        """Rounds without end; True where each kind has come as often as the model has it."""
        own = {kind: len(benches) for kind, benches in self.kinds.items()}
        together = Counter(self._kinds_of(self.run) if self.run else ())
        count = Counter(shape.kind for shape in self.shapes)
        often = {kind: -(-count[kind] // (own[kind] + together[kind])) for kind in own}
        rounds = [
            [
                bench
                for bench in self.everything
                if max(often[kind] for kind in self._kinds_of(bench)) > number
            ]
            for number in range(max(often.values()))
        ]
        first = round(share * len(rounds))
        for number in cycle([*range(first, len(rounds)), *range(first)]):
            with torch.random.fork_rng(devices=[]):
                run_round(rounds[number])
            yield number == (first or len(rounds)) - 1

    def _kinds_of(self, bench: Bench) -> Sequence[str]:
        return [self.shapes[number].kind for number in bench.stage.blocks]

    def forget(self) -> None:
        """The rounds so far."""
        for bench in self.everything:
            bench.laps.clear()

    def profile(self, device: DeviceCost, link: LinkCost) -> Profile:
        """Of all rounds."""
        calls = Calls()
        if self.run is not None:
            calls = Calls.beyond([self.kinds[kind] for kind in self._kinds_of(self.run)], self.run)
        times = {kind: Times(own, calls) for kind, own in self.kinds.items()}
        return Profile(
            blocks=block_costs(self.graph, self.shapes, times, self._kept),
            device=replace(
                device,
                overhead=device.overhead + (calls.forward + calls.backward) / 2,
                adding=measure_adding(self.place, self.dtype, self.graphs) if ties(self.graph) else 0.0,
                graphs=self.graphs,
                slack=SLACK if self.graphs else 0,
            ),
            link=link,
            batch_size=self.batch_size,
            optimizer_ratio=optimizer_ratio(self.everything),
            fingerprint=self.graph.plan_fingerprint,
            tied=ties(self.graph),
        )


def _set_up(
    graph: ModelGraph,
    found: list[Shape],
    model: nn.Module,
    optimizer: OptimizerFactory,
    dtype: torch.dtype | None,
    fields: Mapping[str, Tensor],
    place: torch.device = HOST,
    compile: str | None = None,
    make: type[Bench] = Bench,
) -> tuple[dict[str, list[Bench]], dict[str, Kept], dict[str, Tensor]]:
    """Benches for each kind, with the inputs that the blocks before made for them; and all these values."""
    benches: dict[str, list[Bench]] = defaultdict(list)
    kept: dict[str, Kept] = {}
    values: dict[str, Tensor] = {}
    for stage, shape in zip(graph.stages((1,) * len(found)), found, strict=True):
        same = benches[shape.kind]
        if len(same) < MEMBERS:
            own = {name: fields[name] for name in stage.fields}
            bench = make(stage, model, optimizer, dtype, values, own, place, compile)
            saved, made = bench.saved_bytes()
            values.update({name: made[name].detach() for name in shape.outputs})
            known = {**bench.inputs, **bench.free, **made}
            if shape.kind not in kept:
                left = bench.deferred_bytes(), *bench.working_bytes(), bench.update_bytes()
                kept[shape.kind] = kept_in(shape, saved, known, *left)
            bench.discard()
            same.append(bench)
        else:
            # What a block of the same kind made will do: only its type matters to those that read it.
            values.update(zip(shape.outputs, (values[n] for n in _outputs_of(same[-1], found)), strict=True))
    return benches, kept, values


def _commonest(graph: ModelGraph, found: Sequence[Shape], length: int) -> StageGraph:
    """The so many consecutive blocks whose kinds the model has most of."""
    count = Counter(shape.kind for shape in found)
    length = min(length, len(found))
    starts = range(len(found) - length + 1)
    start = max(starts, key=lambda start: sum(count[shape.kind] for shape in found[start : start + length]))
    parts = [part for part in (start, length, len(found) - start - length) if part]
    return graph.stages(parts)[1 if start else 0]


def _outputs_of(bench: Bench, found: list[Shape]) -> tuple[str, ...]:
    return found[bench.stage.index].outputs
