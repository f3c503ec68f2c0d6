"""Compressed gradients of replicas: what is lost is sent with the next update, as a second computation has it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.both_ways import adamw
from tests.examples import example, varied
from vpipe import Pipeline
from vpipe.communication import CommunicationHandler
from vpipe.communication.compression import BF16, INT4, INT8, pack, read_compression, unpack
from vpipe.communication.error_feedback import ErrorFeedback
from vpipe.communication.in_process import InProcessHub
from vpipe.pipeline.threads import run_ranks
from vpipe.stage.stage import StageState

SIZE, UPDATES = 8192, 6


def gradient(rank: int, update: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * update + rank))


def sums(hosts: str, mode: str) -> list[tuple[list[Tensor], int]]:
    """Of each update, and the bytes sent, on each rank."""
    ranks = tuple(range(len(hosts)))

    def work(world: Any) -> tuple[list[Tensor], int]:
        handler = CommunicationHandler(world, compression=read_compression({"replicas": mode}))
        handler.register_tensor("gradients")
        feedback = handler.error_feedback(ranks)
        found = [
            handler.all_reduce("gradients", update, gradient(world.rank, update), ranks, feedback).finish()
            for update in range(UPDATES)
        ]
        assert handler.leftovers() == []
        return found, handler.bytes_sent

    return run_ranks(len(hosts), work, hub=InProcessHub(len(hosts), hosts=hosts))


def rounded(tensor: Tensor, mode: str) -> Tensor:
    return unpack(pack(tensor, mode), mode, tensor.shape, tensor.dtype)


def two_hosts_by_hand(mode: str) -> list[Tensor]:
    """Rank 0 adds up the first half and rank 1 the second; each rounds what it sends, and the sum for both."""
    half = SIZE // 2
    halves = [slice(0, half), slice(half, SIZE)]
    lost_part, lost_sum = [torch.zeros(half), torch.zeros(half)], [torch.zeros(half), torch.zeros(half)]
    found = []
    for update in range(UPDATES):
        total = torch.empty(SIZE)
        for adder, place in enumerate(halves):
            wanted = gradient(1 - adder, update)[place] + lost_part[adder]
            arrived = rounded(wanted, mode)
            lost_part[adder] = wanted - arrived
            parts = [gradient(adder, update)[place], arrived]
            exact = (parts[0] + parts[1] if adder == 0 else parts[1] + parts[0]) + lost_sum[adder]
            total[place] = rounded(exact, mode)
            lost_sum[adder] = exact - total[place]
        found.append(total)
    return found


@pytest.mark.parametrize("mode", [BF16, INT8, INT4])
def test_two_hosts(mode: str) -> None:
    expected = two_hosts_by_hand(mode)
    for found, sent in sums("ab", mode):
        assert all(map(torch.equal, found, expected))
        assert sent < UPDATES * SIZE * 4 * (0.51 if mode == BF16 else 0.26)


@pytest.mark.parametrize("hosts", ["aabb", "aab", "abc"])
def test_what_is_lost_does_not_add_up(hosts: str) -> None:
    """Replicas are equal to the bit, and after some updates as near to the exact sums as after one."""
    found = [totals for totals, _ in sums(hosts, INT4)]
    exact = [sum(gradient(rank, update) for rank in range(len(hosts))) for update in range(UPDATES)]
    for totals in found[1:]:
        assert all(map(torch.equal, totals, found[0]))
    after_one = (found[0][0] - exact[0]).abs().max()
    after_all = (sum(found[0]) - sum(exact)).abs().max()
    alone = max((total - wanted).abs().max() for total, wanted in zip(found[0][1:], exact[1:], strict=True))
    assert 0 < after_all < 2 * after_one
    assert alone > 0


def test_numbers_that_are_not_finite_are_not_kept_and_scales_may_change() -> None:
    feedback, given = ErrorFeedback(INT8), gradient(0, 0)
    broken = given.clone()
    broken[5] = torch.inf
    feedback.pack("part", broken)
    assert torch.isfinite(feedback._lost["part"]).all()
    feedback.clear()
    _, arrived = feedback.pack("part", given)
    lost = given - arrived
    feedback.begin(4.0)
    _, arrived = feedback.pack("part", torch.zeros(SIZE))
    torch.testing.assert_close(arrived + feedback._lost["part"], 4 * lost)


def test_a_run_that_saves_goes_on_like_one_that_was_resumed(capture_once: None) -> None:
    """Both have forgotten what was lost before."""
    model, batch, loss_fn = example("sequential", torch.float32)
    batches = list(varied(batch, 16))

    def make(world: Any) -> Pipeline:
        return Pipeline(
            model, batch, optimizer=adamw, loss_fn=loss_fn, minibatches=2, replicas=(2, 1),
            compress={"replicas": INT4}, world=world,
        )  # fmt: skip

    def train(pipe: Pipeline, data: list[Any]) -> list[float]:
        losses = [loss for _, loss in pipe.train(data)]
        feedback = pipe.runtime.exchange._feedback.values()
        assert all(own is not None and own._lost for own in feedback)
        return losses

    def save_and_go_on(world: Any) -> tuple[list[float], list[StageState], dict[str, Any]]:
        with make(world) as pipe:
            train(pipe, batches[:8])
            own, plain = pipe.training_state()
            states = [
                StageState({n: t.clone() for n, t in one.tensors.items()}, one.optimizers)
                for one in own.values()
            ]
            return train(pipe, batches[8:]), states, plain

    went_on = run_ranks(3, save_and_go_on)
    states = [state for _, own, _ in went_on for state in own]
    whole = StageState(
        {name: tensor for state in states for name, tensor in state.tensors.items()},
        [record for state in states for record in state.optimizers],
    )

    def resume(world: Any) -> list[float]:
        with make(world) as pipe:
            pipe.load_training_state(whole, went_on[0][2])
            return train(pipe, batches[8:])

    assert run_ranks(3, resume) == [losses for losses, *_ in went_on]
