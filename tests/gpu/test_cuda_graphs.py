"""Replayed CUDA graphs train as eager kernels do: the same masks, the same weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu import tasks
from tests.gpu.tasks import SCHEDULES
from tests.gpu.test_pipeline import assert_close, processes, threads
from tests.multiprocess.pool import Pool
from tests.multiprocess.tasks import adamw, batches, bert, ragged_batches
from tests.unit.test_compiled import compiler_is_missing
from vpipe import Pipeline
from vpipe.cost import DeviceCost, LinkCost
from vpipe.errors import VPipeError
from vpipe.pipeline.threads import run_ranks
from vpipe.profile.model import MeasuredModel
from vpipe.stage.cuda_graphs import GraphSequence


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_graphs_train_as_eager_kernels(schedule: str) -> None:
    data = batches(24)
    assert_close(threads(2, schedule, data, cuda_graphs=True), threads(2, schedule, data))


@pytest.mark.parametrize("schedule", ["zb-v", "pipedream"])
def test_processes_replay_graphs(pool: Pool, schedule: str) -> None:
    data = batches(24)
    assert_close(processes(pool, 2, schedule, data, cuda_graphs=True), threads(2, schedule, data))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "pipedream"])
def test_recomputing_is_captured(schedule: str) -> None:
    data = batches(24)
    replayed = threads(
        2, schedule, data, cuda_graphs=True, policies=["recompute", "keep"] * 3 + ["recompute"]
    )
    assert_close(replayed, threads(2, schedule, data))


def test_a_stage_that_swaps_runs_eagerly_and_another_has_graphs() -> None:
    data = batches(16)
    policies = ["swap"] * 3 + ["keep"] * 4
    replayed = threads(2, "pipedream", data, cuda_graphs=True, policies=policies)
    assert_close(replayed, threads(2, "pipedream", data))


def test_ragged_minibatches_run_eagerly_between_replayed_ones() -> None:
    data = ragged_batches() + batches(12) + ragged_batches() + batches(4)
    options: dict[str, Any] = {"replicas": [2, 1]}
    assert_close(threads(3, "1f1b", data, cuda_graphs=True, **options), threads(3, "1f1b", data, **options))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_with_graphs(precision: str) -> None:
    data = batches(24)
    replayed, eager = (
        [loss for _, loss in threads(2, "1f1b", data, precision=precision, cuda_graphs=graphs)[0]]
        for graphs in (True, False)
    )
    assert replayed == pytest.approx(eager, rel=2e-2)
    assert all(map(math.isfinite, replayed))


@pytest.mark.skipif(bool(compiler_is_missing()), reason=compiler_is_missing())
def test_compiled_blocks_with_graphs(pool: Pool) -> None:
    data = batches(16)
    options = {"model": tasks.without_dropout()}
    replayed = processes(pool, 2, "1f1b", data, compile=True, cuda_graphs=True, **options)
    assert_close(replayed, threads(2, "1f1b", data, **options))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_evaluation_and_loaded_weights_are_those_of_the_graphs(schedule: str) -> None:
    data = batches(12)

    def work(world: Any, cuda_graphs: bool) -> tuple[list[float], list[int]]:
        model, batch, _ = tasks.double_bert()
        options = tasks.options_of(schedule)
        with Pipeline(
            model,
            batch,
            optimizer=adamw,
            schedule=schedule,
            world=world,
            device=tasks.GPU,
            cuda_graphs=cuda_graphs,
            **options,
        ) as pipe:
            found = [loss for _, loss in pipe.train(data)]
            found.append(pipe.evaluate(data[:2]))
            pipe.load_state_dict(
                {name: 0.5 * tensor for name, tensor in pipe.state_dict().items() if "weight" in name}
            )
            found += [loss for _, loss in pipe.train(data)]
            pools = [stage.graph_pool for stage in pipe.runtime.stages.values()]
            return found, [pool.captured for pool in pools if pool]

    tasks.double_bert()
    (replayed, captured), *_ = run_ranks(2, lambda world: work(world, True))
    (eager, none), *_ = run_ranks(2, lambda world: work(world, False))
    assert replayed == pytest.approx(eager, rel=1e-9)
    assert captured[0] > 1
    assert not none


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_running_statistics_are_kept_with_graphs(policy: str) -> None:
    torch.manual_seed(0)
    layers = [
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, 2),
    ]
    model = nn.Sequential(*layers).double()
    data = [(torch.randn(8, 6).double(), torch.randn(8, 2).double()) for _ in range(12)]

    def work(world: Any, cuda_graphs: bool) -> tuple[list[float], dict[str, Tensor] | None]:
        with Pipeline(
            model,
            data[0],
            loss_fn=nn.functional.mse_loss,
            optimizer=adamw,
            minibatches=2,
            recompute_ratio=1.0 if policy == "recompute" else 0.0,
            world=world,
            device=tasks.GPU,
            cuda_graphs=cuda_graphs,
        ) as pipe:
            losses = [loss for _, loss in pipe.train(data)]
            return losses, pipe.full_state_dict()

    (replayed, state), _ = run_ranks(2, lambda world: work(world, True))
    (eager, expected), _ = run_ranks(2, lambda world: work(world, False))
    assert replayed == pytest.approx(eager, rel=1e-9)
    assert state is not None
    assert expected is not None
    assert int(state["1.num_batches_tracked"]) == len(data)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, msg=name)


@pytest.mark.parametrize("cuda_graphs", [True, "auto"])
def test_a_profile_is_measured_from_graphs(cuda_graphs: bool | str) -> None:
    model, batch, loss_fn = bert()
    place = torch.device(tasks.GPU)
    bench = MeasuredModel(
        model, batch, loss_fn, optimizer=adamw, precision="bf16", cuda_graphs=cuda_graphs, place=place
    )
    made = bench.measure(0.5, DeviceCost(2**34, 1e10, 1e10), LinkCost(1e11, 0.0))
    assert made.device.graphs
    assert made.device.adding > 0  # its embedding is the head's too
    assert all(block.working_bytes > 0 for block in made.blocks)
    assert all(block.forward > 0 and block.backward > 0 for block in made.blocks)
    assert max(block.forward_bytes for block in made.blocks) > 0
    assert made.device.host is not None
    assert all(block.host is not None for block in made.blocks)


def test_a_profile_has_the_time_of_the_host() -> None:
    """Of a model so small that a GPU waits for each of its kernels."""
    model, batch, loss_fn = bert()
    bench = MeasuredModel(
        model, batch, loss_fn, optimizer=adamw, precision="bf16", place=torch.device(tasks.GPU)
    )
    made = bench.measure(0.5, DeviceCost(2**34, 1e10, 1e10), LinkCost(1e11, 0.0))
    assert made.device.host is not None
    hosts = [block.host for block in made.blocks if block.host is not None]
    assert len(hosts) == len(made.blocks)
    assert sum(host.minibatch for host in hosts) > 0
    assert sum(host.recomputing for host in hosts) > 0


def test_small_minibatches_are_replayed_with_auto() -> None:
    data = batches(24)
    assert_close(threads(2, "1f1b", data, cuda_graphs="auto"), threads(2, "1f1b", data))


@pytest.mark.parametrize("room", [0, 2])
@pytest.mark.parametrize("schedule", ["zb-h1", "pipedream"])
def test_graphs_that_find_no_memory_are_left_out(
    schedule: str, room: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From some graph on, the device has no memory while one is captured."""
    data, graphs, capturing = batches(24), 2 * room, GraphSequence.capturing

    @contextmanager
    def scarce(self: GraphSequence, pool: Any) -> Iterator[None]:
        nonlocal graphs
        with capturing(self, pool):
            yield
            graphs -= 1
            if graphs < 0:
                torch.empty(2**46, dtype=torch.uint8, device=tasks.GPU)

    expected = threads(2, schedule, data)
    monkeypatch.setattr(GraphSequence, "capturing", scarce)
    assert_close(threads(2, schedule, data, cuda_graphs=True), expected)
    assert "there is no memory for more of them" in capfd.readouterr().err


class Inverting(nn.Module):
    """The host checks whether a matrix has an inverse, which no CUDA graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden @ torch.linalg.inv(torch.eye(4) + 0.01 * hidden.T @ hidden))


def test_what_cannot_be_captured_is_an_error() -> None:
    batch = (torch.randn(2, 4), torch.randn(2, 4))

    def work(world: Any) -> None:
        with Pipeline(
            Inverting(),
            batch,
            loss_fn=nn.functional.mse_loss,
            optimizer=adamw,
            minibatches=2,
            world=world,
            device=tasks.GPU,
            cuda_graphs=True,
        ) as pipe:
            list(pipe.train([batch] * 8))

    with pytest.raises(
        VPipeError, match=r"stage 0 cannot be captured as CUDA graphs: .*; leave cuda_graphs out"
    ):
        run_ranks(1, work)
    # The failed capture leaves the device's generator as it was.
    torch.nn.functional.dropout(torch.ones(4, device=tasks.GPU))
