"""Sums over ranks: equal to the bit on all of them and in every run, and no more is sent than has to be."""

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.both_ways import adamw
from tests.examples import example, varied
from tests.fake_nccl import FakeHub, run_on
from vpipe import Pipeline
from vpipe.communication import CommunicationHandler
from vpipe.communication.all_reduce import make_shares
from vpipe.communication.in_process import InProcessChannel, InProcessHub
from vpipe.pipeline.threads import run_ranks
from vpipe.runtime import buckets
from vpipe.runtime.buckets import MOST_BUCKETS, make_buckets


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


HOSTS = ["aabb", "aaab", "abab", "abcab", "aabbb", "abbccc", "aaaa", "abcd"]


def sums_by_host(hosts: str, size: int) -> Tensor:
    """Each host's sum in the order of its ranks, then the hosts' sums in the order in which they first occur."""
    inside = {
        host: [rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)
    }
    sums = []
    for ranks in inside.values():
        total = part_of(ranks[0], size)
        for rank in ranks[1:]:
            total = total + part_of(rank, size)
        sums.append(total)
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    return total


@pytest.mark.parametrize("hosts", HOSTS)
def test_hosts_add_up_inside_first(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring's bytes of each rank, and between hosts 2 (H - 1) / H of the tensor for each host."""
    size, count = 4320, len(hosts)
    hub = InProcessHub(count, hosts=hosts)
    pairs = {id(hub.box(a, to, 1)): (a, to) for a, to in permutations(range(count), 2)}
    sent: list[tuple[int, int, int]] = []
    send = InProcessChannel.send

    def counted(self: InProcessChannel, key: Any, tensor: Tensor) -> None:
        sent.append((*pairs[id(self._outbox)], tensor.nbytes))
        send(self, key, tensor)

    monkeypatch.setattr(InProcessChannel, "send", counted)
    ranks = tuple(range(count))
    found = run_ranks(count, lambda world: reduce_on(world, size, ranks), hub=hub)
    expected = sums_by_host(hosts, size)
    for total, _ in found:
        assert total is not None
        assert torch.equal(total, expected)
    distinct = set(hosts)
    for host in distinct:
        outwards = sum(b for a, to, b in sent if hosts[a] == host != hosts[to])
        assert outwards == 2 * (len(distinct) - 1) * size * 4 // len(distinct)
    assert sum(b for *_, b in sent) == sum(b for _, b in found) == 2 * (count - 1) * size * 4
    if len({hosts.count(host) for host in distinct}) == 1:
        assert {b for _, b in found} == {2 * (count - 1) * size * 4 // count}


@pytest.mark.parametrize("hosts", [((0, 1), (2, 3)), ((5,), (1, 2, 3)), ((0,), (1,), (2,)), ((0, 1, 2),)])
@pytest.mark.parametrize("size", [0, 1, 5, 1000])
def test_shares_cover_the_tensor_once(hosts: tuple[tuple[int, ...], ...], size: int) -> None:
    shares = make_shares(size, hosts)
    assert [n for share in shares for n in range(share.begin, share.end)] == list(range(size))
    for share in shares:
        assert share.at in share.by_host
        assert all(rank in ranks for rank, ranks in zip(share.by_host, hosts, strict=True))


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

        pipe.on_action(count, ("B", "REDUCE", "STEP"))
        losses = [loss for _, loss in pipe.train(varied(batch, 4))]
        (stage,) = pipe.runtime.stages.values()
        own = sum(p.nbytes for p in pipe.runtime.exchange.own_parameters(stage.graph.index))
        return losses, {name: t.clone() for name, t in pipe.state_dict().items()}, reducing, own


@pytest.mark.parametrize("largest", [buckets.BUCKET, 64])
def test_replicas_are_equal_to_the_bit_and_so_are_runs(
    capture_once: None, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if gradients fill several buckets."""
    monkeypatch.setattr(buckets, "BUCKET", largest)
    runs = [run_ranks(4, lambda world: train(world, (3, 1))) for _ in range(2)]
    for losses, weights, _, _ in [*runs[0][:3], *runs[1][:3]]:
        assert losses == runs[0][0][0]
        assert all(torch.equal(weights[name], tensor) for name, tensor in runs[0][0][1].items())
    for _, _, sent, own in runs[0][:3]:
        assert sent == pytest.approx(2 * 2 * own / 3, rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("1f1b", {}), ("zb-h1", {}), ("gpipe", {"recompute_ratio": 1.0}), ("vpipe", {})],
)
def test_buckets_begin_in_the_last_backward(
    capture_once: None, monkeypatch: pytest.MonkeyPatch, schedule: str, options: dict[str, Any]
) -> None:
    """All but the last before the REDUCE, and the result is the same to the bit as when all begin there."""
    monkeypatch.setattr(buckets, "BUCKET", 64)
    begun: dict[tuple[int, int], list[str]] = {}

    def work(world: Any) -> list[float]:
        model, batch, loss_fn = example("sequential", torch.float32)
        if schedule != "vpipe":
            options["minibatches"] = 4
        with Pipeline(
            model,
            batch,
            optimizer=adamw,
            loss_fn=loss_fn,
            schedule=schedule,
            replicas=(2, 1),
            world=world,
            **options,
        ) as pipe:
            doing = ""
            reduce = pipe.handler.all_reduce

            def note(work: Any) -> None:
                nonlocal doing
                doing = str(work.action.op)

            def counted(name: str, number: int, *rest: Any) -> Any:
                begun.setdefault((world.rank, number), []).append(doing)
                return reduce(name, number, *rest)

            pipe.on_action(note)
            monkeypatch.setattr(pipe.handler, "all_reduce", counted)
            return [loss for _, loss in pipe.train(varied(batch, 8))]

    def losses() -> list[float]:
        return run_ranks(3, work, hub=InProcessHub(3, hosts="abb"))[0]

    early = losses()
    for operations in begun.values():
        assert len(operations) > 2
        assert set(operations[:-1]) == {"W" if schedule == "zb-h1" else "B"}
    begun.clear()
    monkeypatch.setattr("vpipe.runtime.prefetch.Prefetch.reduces_next", lambda self, stage: False)
    assert losses() == early
    assert {op for operations in begun.values() for op in operations} == {"REDUCE"}


def test_a_stage_with_cuda_graphs_begins_at_reduce(capture_once: None) -> None:
    """Its pool looks at the gradients behind a backward: they must still be there."""

    def work(world: Any) -> list[bool]:
        model, batch, loss_fn = example("sequential", torch.float32)
        with Pipeline(
            model, batch, optimizer=adamw, loss_fn=loss_fn, replicas=(2,), minibatches=2, world=world
        ) as pipe:
            stage, begins = pipe.runtime.stages[0], []
            for pool in (None, object()):
                stage.graph_pool = pool  # type: ignore[assignment]
                stage.gradients_ready = None
                pipe.runtime.exchange.await_gradients(0, 0)
                begins.append(stage.gradients_ready is not None)
            stage.graph_pool = stage.gradients_ready = None
            return begins

    assert run_ranks(2, work) == [[True, False]] * 2


def test_buckets_hold_every_parameter_once() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 50, 1, 700, 20, 20, 400, 5)]
    backwards = parameters[::-1]
    assert make_buckets(parameters) == [backwards]
    assert make_buckets([]) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET", 4)
        found = make_buckets(parameters)
    assert [id(p) for bucket in found for p in bucket] == [id(p) for p in backwards]
    assert 1 < len(found) <= MOST_BUCKETS
