"""The profile of a model: each kind of block measured, the bytes of each block, the device, the link."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vpipe.communication import HOST
from vpipe.cost import DeviceCost, LinkCost, OtherSize, Profile
from vpipe.errors import BatchError
from vpipe.graph import ModelGraph, StageGraph
from vpipe.pipeline.captured import captured
from vpipe.profile.block_costs import Kept, block_costs, measure_kept, optimizer_ratio, ties
from vpipe.profile.contention import busy_processes
from vpipe.profile.cuda_graph_stage import MeasuredGraphStage
from vpipe.profile.device import SLACK, measure_adding, measure_device
from vpipe.profile.kinds import Shape, shapes
from vpipe.profile.links import measure_link
from vpipe.profile.measured_stage import MeasuredStage
from vpipe.profile.rounds import (
    NO_CALLS,
    CallTimes,
    block_times,
    call_times,
    host_is_slower,
    measure_launching,
    measure_swapping,
    run_round,
    run_rounds,
    run_turns,
)
from vpipe.runtime import count_samples
from vpipe.stage.precision import cast, compute_dtype
from vpipe.system.console import Report, unreported
from vpipe.system.device import AUTO_GRAPHS, check_cuda_graphs
from vpipe.system.host_memory import cores
from vpipe.weights import OptimizerFactory, name_of

MEMBERS = 2
"""Blocks of a kind that are measured: with one alone, its weights would never leave the caches."""
RUN = 4
"""Consecutive blocks that are measured as one stage as well, on a GPU: it gives the cost of a call."""
SMALLER = (2, 4)
"""By what a minibatch is divided for the other sizes that are measured. Compiled blocks are measured with one size:
every other one is compiled again."""
LEAST_ROUNDS, MOST_ROUNDS = 5, 25
LARGEST_SWAPPED = 2**29
"""Bytes that a block keeps, of those that are swapped to be measured. Copying more takes seconds, and much longer than
the host needs to start it."""


class SizedStages(NamedTuple):
    """The stages that are measured with a minibatch of one size: of single blocks, by kind, and of several."""

    fields: dict[str, Tensor]
    kinds: dict[str, list[MeasuredStage]]
    kept: dict[str, Kept]
    run: MeasuredStage | None

    @property
    def stages(self) -> list[MeasuredStage]:
        singles = [single for same in self.kinds.values() for single in same]
        return singles if self.run is None else [*singles, self.run]


class MeasuredModel:
    """One or two blocks of each of a model's kinds, to be measured round by round, with minibatches like the example.

    The model may be on `meta`: only these blocks are ever built. `compile` names a backend of torch.compile for them;
    with `cuda_graphs` those on a GPU replay CUDA graphs, with "auto" if that gains; where graphs find no memory, blocks
    run eagerly.

    On a GPU kinds come as often as in the model, since they share its power and, with other ranks, its memory. There a
    single block may take the host longer to launch than the GPU to compute. A run of consecutive blocks is measured as
    well, so that the cost of a call counts for the action (`DeviceCost.overhead`) and not for each block.
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
        cuda_graphs: bool | str = False,
        chunked_loss: bool = True,
        predict: bool = False,
        place: torch.device = HOST,
        run_length: int | None = None,
    ) -> None:
        """`run_length`: consecutive blocks that are measured as one stage; None: some on a GPU, none on the CPU."""
        check_cuda_graphs(cuda_graphs, place)
        self.place = place
        if run_length is None:
            run_length = RUN if place.type == "cuda" else 0
        self.dtype = dtype = compute_dtype(precision)
        self.graph = captured(model, example_batch, loss_fn, precision, chunked_loss)
        self.shapes = shapes(self.graph)
        batches = list(_of_sizes(self.graph, example_batch, () if compile else SMALLER))
        fields, *smaller = [
            {name: cast(tensor, dtype).to(place) for name, tensor in each.items()} for each in batches
        ]
        self.batch_size = int(count_samples(fields))
        joined: StageGraph | None = None
        if min(run_length, len(self.shapes)) > 1:
            joined = _commonest(self.graph, self.shapes, run_length)

        def build(kind: type[MeasuredStage]) -> SizedStages:
            def make(stage: StageGraph, values: Mapping[str, Tensor]) -> MeasuredStage:
                return kind(stage, model, optimizer, dtype, values, fields, place, compile, predict)

            return _set_up(self.graph, self.shapes, joined, fields, make)

        with torch.random.fork_rng(devices=[]):
            self.graphs = cuda_graphs is True
            main = build(MeasuredGraphStage if self.graphs else MeasuredStage)
            if cuda_graphs == AUTO_GRAPHS and main.run is not None and host_is_slower(main.run):
                self.graphs = True
                main = build(MeasuredGraphStage)
            built = {stage.stage.blocks: stage for stage in main.stages}

            def share(
                fields: Mapping[str, Tensor], stage: StageGraph, values: Mapping[str, Tensor]
            ) -> MeasuredStage:
                return built[stage.blocks].with_minibatch(values, fields)

            self._sizes = [main]
            for fewer in smaller:
                self._sizes.append(_set_up(self.graph, self.shapes, joined, fewer, partial(share, fewer)))
        self.kinds, self.run, self.stages, self._kept = main.kinds, main.run, main.stages, main.kept
        for stages in self._turns:
            for measured in stages:
                measured.begin_rounds()

    @property
    def _turns(self) -> list[list[MeasuredStage]]:
        """The stages of each size; those of two sizes share weights."""
        return [sized.stages for sized in self._sizes]

    def measure(
        self,
        seconds: float = 5.0,
        device: DeviceCost | None = None,
        link: LinkCost | None = None,
        ranks: int = 1,
        report: Report = unreported,
    ) -> Profile:
        """Rounds for so many seconds, and the device and the link, unless they are given.

        On the CPU other processes do the same work meanwhile, as the other ranks of this host would, as far as there
        are cores for them.
        """
        if self.stages[0].compile:
            report(0.0, "compiling the blocks")
            run_round(self.stages)  # before there are other processes
        if self.place.type == "cuda":
            report(0.0, "running the blocks for the first time")
            self.run_for(seconds / 4, whole=False)
            self.clear()
            report(0.2, "measuring the blocks")
            self.run_for(seconds)
            report(0.8, "measuring the host")
            self.measure_host()
        else:
            threads = torch.get_num_threads()
            others = max(0, min(ranks * threads, int(cores())) - threads)  # each has one thread
            with busy_processes(others, partial(run_round, self.stages)):
                run_rounds(self._turns, LEAST_ROUNDS, MOST_ROUNDS, seconds, report)
        report(1.0, "measuring the memory and the links")
        return self.profile(device or measure_device(self.place), link or measure_link(self.place))

    def warm(self) -> None:
        """The first rounds, which compile blocks or capture graphs."""
        run_turns(self._turns)

    @property
    def sizes(self) -> int:
        """How many sizes of minibatches are measured; the first is the largest."""
        return len(self._sizes)

    def run_for(
        self, seconds: float, share: float = 0.0, *, whole: bool = True, size: int | None = None
    ) -> None:
        """Rounds in which kinds come as often as in the model, for so long, to the end of a cycle of rounds.

        Not `whole`: to the end of a round. `size`: the number of the only one that is run.
        """
        end = perf_counter() + seconds
        for last in self.weighted_rounds(share, size):
            if (last or not whole) and perf_counter() > end:
                return

    def measure_host(self) -> None:
        """The host's time to launch each kind on a GPU, and to swap it. A CPU is the host: there is none beside it."""
        if self.place.type == "cuda":
            firsts = [same[0] for same in self.kinds.values()]
            measure_launching(firsts if self.run is None else [*firsts, self.run])
            measure_swapping(
                [same[0] for kind, same in self.kinds.items() if self._kept[kind].all <= LARGEST_SWAPPED]
            )

    def weighted_rounds(self, share: float = 0.0, size: int | None = None) -> Iterator[bool]:
        """Rounds without end; True at the end of a cycle, in which each kind came as often as in the model.

        It starts after this share of the cycle, so that ranks on one device do not run in step.
        """
        in_run = Counter(self._kinds_of(self.run) if self.run else ())
        count = Counter(shape.kind for shape in self.shapes)
        often = {kind: -(-count[kind] // (len(same) + in_run[kind])) for kind, same in self.kinds.items()}
        turns = self._turns if size is None else [self._turns[size]]
        rounds = [
            [
                [stage for stage in stages if max(often[kind] for kind in self._kinds_of(stage)) > number]
                for stages in turns
            ]
            for number in range(max(often.values()))
        ]
        first = round(share * len(rounds))
        for number in cycle([*range(first, len(rounds)), *range(first)]):
            run_turns(rounds[number])
            yield number == (first or len(rounds)) - 1

    def _kinds_of(self, stage: MeasuredStage) -> Sequence[str]:
        return [self.shapes[number].kind for number in stage.stage.blocks]

    def clear(self, size: int | None = None) -> None:
        """Drop the times of the rounds so far, of one size or of all."""
        for stages in self._turns if size is None else [self._turns[size]]:
            for stage in stages:
                stage.intervals.clear()

    def profile(self, device: DeviceCost, link: LinkCost) -> Profile:
        """From all rounds so far, of the sizes that were in some."""
        measured = [sized for sized in self._sizes if sized.stages[0].intervals]
        own, *others = (self._of_size(sized, device) for sized in measured)
        calls = self._calls(measured[0])
        return Profile(
            blocks=own.blocks,
            device=replace(
                device,
                overhead=own.overhead,
                adding=measure_adding(self.place, self.dtype, self.graphs) if ties(self.graph) else 0.0,
                graphs=self.graphs,
                eager_kinds=sum(any(stage.lacks_memory for stage in same) for same in self.kinds.values()),
                slack=SLACK if self.graphs else 0,
                host=calls.host,
            ),
            link=link,
            batch_size=self.batch_size,
            optimizer_ratio=optimizer_ratio(self.stages),
            optimizer=name_of(one for stage in self.stages for one in stage.weights.optimizers),
            fingerprint=self.graph.plan_fingerprint,
            tied=ties(self.graph),
            other_sizes=tuple(others),
        )

    def _of_size(self, sized: SizedStages, device: DeviceCost) -> OtherSize:
        calls = self._calls(sized)
        times = {kind: block_times(same, calls) for kind, same in sized.kinds.items()}
        return OtherSize(
            int(count_samples(sized.fields)),
            block_costs(self.graph, self.shapes, times, sized.kept, sized.fields),
            device.overhead + (calls.forward + calls.backward) / 2,
        )

    def _calls(self, sized: SizedStages) -> CallTimes:
        if sized.run is None:
            return NO_CALLS
        return call_times([sized.kinds[kind] for kind in self._kinds_of(sized.run)], sized.run)


def _of_sizes(graph: ModelGraph, batch: Any, smaller: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    """The fields of a batch, and of the first samples of it, as far as the model takes fewer."""
    fields = graph.batch_fields(batch)
    yield fields
    whole = int(count_samples(fields))
    for count in sorted({whole // divisor for divisor in smaller} - {0, whole}, reverse=True):
        try:
            yield graph.batch_fields(pytree.tree_map(partial(_first, count, whole), batch))
        except BatchError:
            return


def _first(count: int, whole: int, value: Any) -> Any:
    of_samples = isinstance(value, Tensor) and value.dim() and len(value) == whole
    return value[:count] if of_samples else value


def _set_up(
    graph: ModelGraph,
    found: list[Shape],
    joined: StageGraph | None,
    fields: dict[str, Tensor],
    make: Callable[[StageGraph, Mapping[str, Tensor]], MeasuredStage],
) -> SizedStages:
    """Stages of one block for each kind, with the inputs that earlier blocks made for them, and one of several."""
    kinds: dict[str, list[MeasuredStage]] = defaultdict(list)
    kept: dict[str, Kept] = {}
    values: dict[str, Tensor] = {}
    for stage, shape in zip(graph.stages((1,) * len(found)), found, strict=True):
        same = kinds[shape.kind]
        if len(same) < MEMBERS:
            measured = make(stage, values)
            saved, made = measured.saved_bytes()
            values.update({name: made[name].detach() for name in shape.outputs})
            if not same:
                kept[shape.kind] = measure_kept(shape, measured, saved, made)
            same.append(measured)
        else:
            # Values of a block of the same kind: only their types matter to their readers.
            values.update(
                zip(shape.outputs, (values[n] for n in found[same[-1].stage.index].outputs), strict=True)
            )
    return SizedStages(fields, kinds, kept, None if joined is None else make(joined, values))


def _commonest(graph: ModelGraph, found: Sequence[Shape], length: int) -> StageGraph:
    """So many consecutive blocks, of the kinds that the model has most of."""
    count = Counter(shape.kind for shape in found)
    length = min(length, len(found))
    starts = range(len(found) - length + 1)
    start = max(starts, key=lambda start: sum(count[shape.kind] for shape in found[start : start + length]))
    parts = [part for part in (start, length, len(found) - start - length) if part]
    return graph.stages(parts)[1 if start else 0]
