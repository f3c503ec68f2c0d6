"""Users' mistakes with two ranks: every rank raises, with the values and the fix; none hangs."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import models
from tests.multiprocess import tasks
from tests.multiprocess.pool import Outcome, Pool
from vpipe import Pipeline
from vpipe.schedule import build

Arguments: TypeAlias = dict[str, Any]


def _rank() -> int:
    return int(os.environ["RANK"])


class _Branching(nn.Module):
    """Control flow that depends on the data, in no nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x if x.sum() > 0 else -x


def _with_bert(**options: Any) -> Arguments:
    model, batch, _ = tasks.bert()
    return {"model": model, "example_batch": batch} | options


def _with(model: nn.Module) -> Arguments:
    batch = (torch.ones(4, 12), torch.ones(4, 12))
    return {"model": model, "example_batch": batch, "loss_fn": functional.mse_loss}


def _model_that_cannot_be_captured() -> Arguments:
    return _with(_Branching())


def _more_stages_than_blocks() -> Arguments:
    return _with(nn.Sequential(nn.Linear(12, 12)))


def _fields_that_forward_does_not_take() -> Arguments:
    model, batch, _ = models.lstm()
    return {"model": model, "example_batch": {"ids": batch[0], "colour": batch[1]}}


def _only_one_rank_fails() -> Arguments:
    return _with(_Branching()) if _rank() == 1 else _with(nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)))


def _another_model() -> Arguments:
    return _with(nn.Sequential(*(nn.Linear(12, 12) for _ in range(2 + _rank()))))


def _another_precision() -> Arguments:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    return _with(model) | {"precision": ("fp32", "bf16")[_rank()]}


def _other_weights() -> Arguments:
    model, batch, loss_fn = models.sequential()
    if _rank() == 1:
        with torch.no_grad():
            next(model.parameters()).mul_(2)
    return {"model": model, "example_batch": batch, "loss_fn": loss_fn, "initial_weights": "refuse"}


def _by_rank(name: str, *values: Any, **options: Any) -> Arguments:
    """One argument differs between the ranks."""
    return _with_bert(**options, **{name: values[_rank()]})


def _schedule_of(stages: int) -> Arguments:
    return _with_bert(schedule=build("gpipe", stages, 4))


def _another_order() -> Arguments:
    orders = [replace(build(name, 2, 4), name="mine") for name in ("gpipe", "1f1b")]
    return _with_bert(schedule=orders[_rank()])


def _build(arguments: Callable[[], Arguments]) -> None:
    with Pipeline(optimizer=tasks.adamw, **arguments()):
        pass


def _told(outcomes: list[Outcome], *texts: str) -> None:
    """Every rank failed and says all of this."""
    for outcome in outcomes:
        assert outcome.error is not None, f"rank {outcome.rank} noticed nothing"
        for text in texts:
            assert text in outcome.text, f"rank {outcome.rank}: {outcome.error}: {outcome.text}"
        assert outcome.error.endswith("Error")


BUILDING: dict[str, tuple[Callable[[], Arguments], str, tuple[str, ...]]] = {
    "model that cannot be captured": (
        _model_that_cannot_be_captured,
        "CaptureError",
        ("cannot capture _Branching", "return x if x.sum() > 0 else -x", "torch.where"),
    ),
    "fields that forward does not take": (
        _fields_that_forward_does_not_take,
        "BatchError",
        ("batch fields ['colour'] are not parameters of RecurrentLanguageModel.forward", "rename them"),
    ),
    "more stages than blocks": (
        _more_stages_than_blocks,
        "PartitionError",
        ("2 stages, but the model has only 1 blocks", "use at most 1"),
    ),
    "partition that does not sum to the blocks": (
        partial(_with_bert, partition=[3, 3]),
        "PartitionError",
        ("partition [3, 3] sums to 6, but the model has 7 blocks", "for example [3, 4]"),
    ),
    "partition of another length": (
        partial(_with_bert, partition=[3, 2, 2]),
        "PartitionError",
        ("partition [3, 2, 2] has 3 stages, schedule '1f1b' has 2",),
    ),
    "schedule that does not fit the stages": (
        partial(_with_bert, schedule="zb-v", chunks=3),
        "ScheduleError",
        ("chunks is 3, but schedule 'zb-v' has 2 on each rank", "leave chunks out"),
    ),
    "schedule for another number of ranks": (
        partial(_schedule_of, 4),
        "ScheduleError",
        ("schedule 'gpipe' needs 4 ranks and 2 were started", "--nproc-per-node 4"),
    ),
    "unknown schedule": (
        partial(_with_bert, schedule="pipedraem"),
        "ScheduleError",
        ("unknown schedule 'pipedraem'", "did you mean 'pipedream'?"),
    ),
    "wrong number of processes": (
        partial(_with_bert, stages=3),
        "ScheduleError",
        ("needs 3 ranks and 2 were started", "torchrun --nproc-per-node 3"),
    ),
    "wrong number of replicas": (
        partial(_with_bert, replicas=(2, 1)),
        "ScheduleError",
        ("needs 3 ranks and 2 were started", "other stages or replicas"),
    ),
    "unknown channel": (
        partial(_with_bert, channel="pigeon"),
        "VPipeError",
        ("unknown channel 'pigeon'", "choose from auto, gloo, shared_memory, cuda_ipc, nccl"),
    ),
}


@pytest.mark.parametrize("mistake", BUILDING)
def test_a_mistake_on_every_rank(pool: Pool, mistake: str) -> None:
    arguments, error, texts = BUILDING[mistake]
    outcomes = pool.outcomes(2, _build, arguments)
    _told(outcomes, *texts)
    assert {outcome.error for outcome in outcomes} == {error}


def test_a_mistake_on_one_rank_ends_all(pool: Pool) -> None:
    healthy, mistaken = outcomes = pool.outcomes(2, _build, _only_one_rank_fails)
    _told(outcomes, "cannot capture _Branching")
    assert mistaken.error == "CaptureError"
    assert healthy.error == "PeerError"
    assert healthy.text.startswith("stopped because rank 1 failed: ")


DISAGREEING: dict[str, tuple[Callable[[], Arguments], tuple[str, ...]]] = {
    "model": (_another_model, ("another model than rank 0", "build the same model on every rank")),
    "weights": (_other_weights, ("another set of initial weights than rank 0", "call torch.manual_seed")),
    "schedule": (
        partial(_by_rank, "schedule", "1f1b", "gpipe"),
        ("another schedule than rank 0", "gpipe", "1f1b", "the same arguments"),
    ),
    "minibatches": (
        partial(_by_rank, "minibatches", 4, 6),
        ("another schedule than rank 0", "6", "the same arguments"),
    ),
    "update_interval": (
        partial(_by_rank, "update_interval", 4, 6, schedule="2bw"),
        ("another update_interval than rank 0: 6 and 4", "the same arguments"),
    ),
    "partition": (
        partial(_by_rank, "partition", [3, 4], [4, 3]),
        ("another partition than rank 0: [4, 3] and [3, 4]", "the same arguments"),
    ),
    "seed": (partial(_by_rank, "seed", 1, 2), ("another seed than rank 0: 2 and 1", "the same seed")),
    "precision": (_another_precision, ("than rank 0",)),
    "order of a hand-made schedule": (
        _another_order,
        ("another order of actions than rank 0", "the same schedule"),
    ),
    "clip_norm": (
        partial(_by_rank, "clip_norm", None, 1.0),
        ("another clip_norm than rank 0: 1.0 and None", "the same arguments"),
    ),
}


@pytest.mark.parametrize("what", DISAGREEING)
def test_ranks_that_disagree(pool: Pool, what: str) -> None:
    arguments, texts = DISAGREEING[what]
    outcomes = pool.outcomes(2, _build, arguments)
    _told(outcomes, "rank 1", *texts)
    assert {outcome.error for outcome in outcomes} == {"PeerError"}


def _train(channel: str, data: Callable[[], list[Any]], **options: Any) -> int:
    with tasks.make_pipeline("pipedream", channel=channel, **options) as pipe:
        return len(list(pipe.train(data())))


def _other_data() -> list[Any]:
    return tasks.batches(6, first=10 * _rank())


def _fewer_batches_on_one_rank() -> list[Any]:
    return tasks.batches(12 - 4 * _rank())


def _batches_without_labels() -> list[Any]:
    return [{name: t for name, t in batch.items() if name != "labels"} for batch in tasks.batches(4)]


def _no_labels_on_one_rank() -> list[Any]:
    return _batches_without_labels() if _rank() == 1 else tasks.batches(4)


def _wrong_type() -> list[Any]:
    return [batch | {"labels": batch["labels"].int()} for batch in tasks.batches(4)]


def _a_bad_batch_later_on_one_rank() -> list[Any]:
    data = tasks.batches(8)
    if _rank() == 1:
        data[5] = {"input_ids": data[5]["input_ids"]}
    return data


def test_other_data_on_one_rank(pool: Pool) -> None:
    outcomes = pool.outcomes(2, _train, "auto", _other_data)
    _told(outcomes, "rank 1 has another first batch than rank 0", "seed its shuffling")


@pytest.mark.parametrize("channel", ["gloo", "shared_memory"])
def test_fewer_batches_on_one_rank_end_with_the_timeout(pool: Pool, channel: str) -> None:
    outcomes = pool.outcomes(2, partial(_train, timeout=0.5), channel, _fewer_batches_on_one_rank)
    _told(outcomes)
    assert {outcome.error for outcome in outcomes} == {"PeerError"}


def test_batches_whose_fields_do_not_match(pool: Pool) -> None:
    outcomes = pool.outcomes(2, _train, "auto", _batches_without_labels)
    _told(outcomes, "missing: ['labels']", "expected ['input_ids', 'attention_mask', 'labels']")


def test_batches_of_another_type(pool: Pool) -> None:
    outcomes = pool.outcomes(2, _train, "auto", _wrong_type)
    _told(outcomes, "batch field 'labels' has dtype int32, expected int64", ".to(torch.int64)")


@pytest.mark.parametrize("channel", ["gloo", "shared_memory"])
@pytest.mark.parametrize("data", [_no_labels_on_one_rank, _a_bad_batch_later_on_one_rank])
def test_a_batch_that_does_not_match_on_one_rank(
    pool: Pool, data: Callable[[], list[Any]], channel: str
) -> None:
    healthy, mistaken = outcomes = pool.outcomes(2, _train, channel, data)
    _told(outcomes)
    _told([mistaken], "missing: [", "'labels']")
    assert healthy.error == "PeerError"
    assert "rank 1" in healthy.text
