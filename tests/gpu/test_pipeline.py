"""Ranks that share one GPU train as ranks that are threads do, and these as the plain model does."""

import math
from typing import Any

import pytest
import torch

from tests.gpu import tasks
from tests.gpu.tasks import SCHEDULES
from tests.multiprocess.pool import Pool
from tests.multiprocess.tasks import Batch, adamw, batches, bert, ragged_batches
from tests.schedules import ASYNCHRONOUS
from tests.unit.test_compiled import compiler_is_missing
from tests.unit.test_nonfinite import SYNCHRONOUS, equal, finite, poison, run
from vpipe.pipeline.threads import run_ranks
from vpipe.verify import verify
from vpipe.weights import optimizer_factory

BOUND = 1e-9


def threads(ranks: int, schedule: str, data: list[Batch], **options: Any) -> Any:
    tasks.double_bert()  # before the threads, which would each build one, with one random generator
    return run_ranks(ranks, lambda world: tasks.train(schedule, data, world=world, **options))[0]


def processes(pool: Pool, ranks: int, schedule: str, data: list[Batch], **options: Any) -> Any:
    results = pool.run(ranks, tasks.train, schedule, data, timeout=100, **options)
    assert all(losses == results[0][0] for losses, _ in results)
    return results[0]


def assert_close(ours: Any, theirs: Any) -> None:
    losses, weights = ours
    expected, state = theirs
    assert [number for number, _ in losses] == [number for number, _ in expected]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in expected], rel=BOUND)
    for name, tensor in state.items():
        torch.testing.assert_close(weights[name], tensor, rtol=BOUND, atol=BOUND / 10, msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_processes_on_one_gpu_train_as_threads_do(pool: Pool, schedule: str) -> None:
    data = batches(16)
    assert_close(processes(pool, 2, schedule, data), threads(2, schedule, data))


@pytest.mark.parametrize("policy", ["recompute", "swap"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_memory_policies_change_nothing(pool: Pool, schedule: str, policy: str) -> None:
    data = batches(12)
    policies = [policy, "keep"] * 3 + [policy]
    assert_close(processes(pool, 2, schedule, data, policies=policies), threads(2, schedule, data))


@pytest.mark.parametrize("channel", ["cuda_ipc", "gloo"])
def test_channels_give_the_same(pool: Pool, channel: str) -> None:
    data = batches(12)
    assert_close(processes(pool, 2, "1f1b", data, channel=channel), threads(2, "1f1b", data))


def test_replicas_and_ragged_batches(pool: Pool) -> None:
    data = ragged_batches()
    assert_close(processes(pool, 3, "1f1b", data, replicas=[2, 1]), threads(3, "1f1b", data, replicas=[2, 1]))


@pytest.mark.parametrize(
    ("schedule", "precision"), [*((name, "bf16") for name in SCHEDULES), ("1f1b", "fp16")]
)
def test_mixed_precision_follows_the_unpartitioned_run(pool: Pool, schedule: str, precision: str) -> None:
    """Asynchronous ones, whose weights are stale, follow themselves in float64."""
    data = batches(16)
    ours, other = (
        [loss for _, loss in run[0]]
        for run in (
            processes(pool, 2, schedule, data, precision=precision),
            threads(2, schedule, data)
            if schedule in ASYNCHRONOUS
            else threads(1, "1f1b", data, precision=precision),
        )
    )
    assert ours == pytest.approx(other, rel=2e-2)
    assert all(map(math.isfinite, ours))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_gradients_are_clipped_on_the_gpu_as_on_the_cpu(schedule: str) -> None:
    """Asynchronous: the host never sees a norm. Fused, as only such an optimizer can pass an update over by itself."""
    options = {"clip_norm": 0.05, "on_nonfinite": "stop", "optimizer": optimizer_factory("sgd", 0.1)}
    options["model"] = tasks.without_dropout()  # whose masks a GPU draws otherwise
    data = batches(16)
    assert_close(threads(2, schedule, data, **options), threads(2, schedule, data, device="cpu", **options))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_checks_that_no_rank_waits_for_change_nothing(pool: Pool, schedule: str) -> None:
    data, fused = batches(16), optimizer_factory("adamw", 1e-3)
    checked = processes(pool, 2, schedule, data, optimizer=fused, on_nonfinite="stop")
    assert_close(checked, threads(2, schedule, data, optimizer=fused))


def test_a_synchronous_stage_stops_before_its_own_update(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {0})
    ((_, before, _), _) = run(updates=1, device=tasks.GPU, **SYNCHRONOUS)
    ((ended, weights, _), (_, others, _)) = run(
        updates=8, on_nonfinite="stop", device=tasks.GPU, **SYNCHRONOUS
    )
    assert ended.startswith("NonFiniteError: update 1, stage 0: the gradients of minibatches 4 to 7")
    assert equal(weights, before)
    assert finite(others)


@pytest.mark.skipif(bool(compiler_is_missing()), reason=compiler_is_missing())
def test_compiled_blocks_train_as_others_do(pool: Pool) -> None:
    data = batches(12)
    options = {"model": tasks.without_dropout()}  # whose masks compiled blocks draw otherwise
    compiled = processes(pool, 2, "1f1b", data, compile=True, **options)
    assert_close(compiled, threads(2, "1f1b", data, **options))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_on_the_gpu_train_as_the_plain_model_does(schedule: str, dtype: str) -> None:
    model, _, _ = bert()
    result = verify(
        model,
        lambda number: batches(1, number)[0],
        ranks=2,
        optimizer=adamw,
        device=tasks.GPU,
        dtype=dtype,
        schedule=schedule,
        **tasks.options_of(schedule),
    )
    assert result.ok, result
