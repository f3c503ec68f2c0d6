"""Buffers that training changes, such as a batch norm's statistics, of a stage with replicas.

Each replica sees every R-th minibatch, so that their statistics differ; weights do not depend on them. They
are made equal whenever the model is looked at as a whole, that is evaluated or saved: numbers become the
replicas' mean, counters the largest. So a run that is resumed, under any number of replicas, goes on as the
run that saved.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vpipe.communication import CommunicationHandler
from vpipe.graph import StageGraph
from vpipe.stage.stage import Stage


@torch.no_grad()
def equalise(
    handler: CommunicationHandler,
    placement: Sequence[Sequence[int]],
    graphs: Sequence[StageGraph],
    stages: Mapping[int, Stage],
    first_key: int,
) -> None:
    """Call it on every rank when the pipeline is empty; the tensors travel as `state` under keys of their own."""
    key = first_key
    for graph in graphs:
        ranks = placement[graph.index]
        for name in sorted(graph.buffers):
            key += 1
            if len(ranks) > 1 and handler.rank in ranks:
                buffer = stages[graph.index].module.buffers_by_name[name]
                buffer.copy_(_merged(_gathered(handler, ranks, key, buffer)))
                handler.release(key)


def _gathered(handler: CommunicationHandler, ranks: Sequence[int], key: int, own: Tensor) -> list[Tensor]:
    """Everybody's, in the same order everywhere."""
    others = [rank for rank in ranks if rank != handler.rank]
    for rank in others:
        handler.send("state", own.clone(), key, rank)
    received = {rank: handler.recv("state", key, rank, own.shape, own.dtype, owner=key) for rank in others}
    return [received.get(rank, own) for rank in ranks]


def _merged(values: Sequence[Tensor]) -> Tensor:
    first = values[0]
    if all(torch.equal(first, other) for other in values[1:]):
        return first.clone()
    stacked = torch.stack(list(values))
    return stacked.double().mean(0) if first.is_floating_point() else stacked.amax(0)
