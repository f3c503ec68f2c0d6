"""Sums over ranks: equal to the bit on all of them and in every run, and no more is sent than has to be."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.both_ways import adamw
from tests.examples import example, varied
from tests.fake_nccl import FakeHub, run_on
from vpipe import Pipeline
from vpipe.communication import CommunicationHandler
from vpipe.pipeline.threads import run_ranks
from vpipe.runtime import gradients
from vpipe.runtime.gradients import MOST_BUCKETS, buckets


def part_of(rank: int, size: int) -> Tensor:
    """Values whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator) * 10.0 ** (rank % 3 * 3)


def reduce_on(world: Any, size: int, ranks: tuple[int, ...]) -> tuple[Tensor | None, int]:
    handler = CommunicationHandler(world)
    handler.register_tensor("gradients")
    handler.open([], [ranks])
    if world.rank not in ranks:
        return None, handler.bytes_sent
    total = handler.all_reduce("gradients", 0, part_of(world.rank, size), ranks).finish()
    assert handler.leftovers() == []
    return total, handler.bytes_sent


@pytest.mark.parametrize("ranks", [(0, 1), (2, 0, 1), (0, 1, 2, 3), (3, 1), (4, 3, 2, 1, 0)])
@pytest.mark.parametrize("size", [1, 3, 120, 1000])
def test_sums_are_added_in_the_order_of_the_ranks(ranks: tuple[int, ...], size: int) -> None:
    """Whatever their number: uneven replicas are other lists of ranks."""
    expected = part_of(ranks[0], size)
    for rank in ranks[1:]:
        expected = expected + part_of(rank, size)
    for rank, (total, sent) in enumerate(run_ranks(5, lambda world: reduce_on(world, size, ranks))):
        if rank in ranks:
            assert total is not None
            assert torch.equal(total, expected)
        else:
            assert (total, sent) == (None, 0)


@pytest.mark.parametrize("hub", [None, FakeHub])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_each_rank_sends_twice_its_share(count: int, hub: type[FakeHub] | None) -> None:
    """2 (R - 1) / R of the bytes, over the channels as over NCCL."""
    size, ranks = 840, tuple(range(count))

    def work(world: Any) -> tuple[Tensor | None, int]:
        return reduce_on(world, size, ranks)

    found = run_ranks(count, work) if hub is None else run_on(hub(count), work)
    assert {sent for _, sent in found} == {2 * (count - 1) * size * 4 // count}


def train(world: Any, replicas: tuple[int, ...]) -> tuple[list[float], dict[str, Tensor], int, int]:
    """Losses, the rank's own weights, and the bytes that it sent for the gradients of one update."""
    model, batch, loss_fn = example("sequential", torch.float32)
    with Pipeline(
        model,
        batch,
        optimizer=adamw,
        loss_fn=loss_fn,
        schedule="1f1b",
        minibatches=4,
        replicas=replicas,
        world=world,
    ) as pipe:
        losses, reducing = [], 0

        def count(_: Any) -> Any:
            nonlocal reducing
            before = pipe.handler.bytes_sent

            def finish() -> None:
                nonlocal reducing
                reducing += pipe.handler.bytes_sent - before

            return finish

        pipe.on_action(count, ("REDUCE", "STEP"))
        losses = [loss for _, loss in pipe.train(varied(batch, 4))]
        (stage,) = pipe.runtime.stages.values()
        own = sum(p.nbytes for p in pipe.runtime.exchange.own_parameters(stage.graph.index))
        return losses, {name: t.clone() for name, t in pipe.state_dict().items()}, reducing, own


@pytest.mark.parametrize("largest", [gradients.BUCKET, 64])
def test_replicas_are_equal_to_the_bit_and_so_are_runs(
    capture_once: None, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if gradients fill several buckets."""
    monkeypatch.setattr(gradients, "BUCKET", largest)
    runs = [run_ranks(4, lambda world: train(world, (3, 1))) for _ in range(2)]
    for losses, weights, _, _ in [*runs[0][:3], *runs[1][:3]]:
        assert losses == runs[0][0][0]
        assert all(torch.equal(weights[name], tensor) for name, tensor in runs[0][0][1].items())
    for _, _, sent, own in runs[0][:3]:
        assert sent == pytest.approx(2 * 2 * own / 3, rel=0.02)


def test_buckets_hold_every_parameter_once() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 50, 1, 700, 20, 20, 400, 5)]
    assert buckets(parameters) == [parameters]
    assert buckets([]) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "BUCKET", 4)
        found = buckets(parameters)
    assert [id(p) for bucket in found for p in bucket] == [id(p) for p in parameters]
    assert 1 < len(found) <= MOST_BUCKETS
