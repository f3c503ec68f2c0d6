"""After a run nothing is left over: no descriptor, thread, shared memory or tensor."""

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import models
from tests.multiprocess import tasks
from tests.multiprocess.pool import Pool
from vpipe import Pipeline
from vpipe.errors import VPipeError

OURS = ("torch_", "psm_", "sem.", "vpipe")
"""Beginnings of names that torch, Python or we would give to shared memory; browsers have others."""


@dataclass(frozen=True)
class Held:
    """What this process holds that outlives a function."""

    descriptors: Counter[str]
    threads: list[str]
    tasks: int
    shared_memory: list[str]
    mappings: int
    tensors: Counter[str]
    process_group: bool

    @staticmethod
    def now() -> "Held":
        gc.collect()
        # Not those without memory: torch.export keeps one for each input of each export.
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
        return Held(
            descriptors=Counter(map(_kind, os.listdir("/proc/self/fd"))),
            threads=[thread.name for thread in threading.enumerate()],
            tasks=len(os.listdir("/proc/self/task")),
            shared_memory=sorted(name for name in os.listdir("/dev/shm") if name.startswith(OURS)),
            mappings=_memfd_mappings(),
            tensors=Counter(f"{type(t).__name__} {tuple(t.shape)} {t.dtype} on {t.device}" for t in tensors),
            process_group=dist.is_initialized(),
        )

    def again(self) -> "Held":
        """What it holds when it holds the same as then, or after a while: a thread that has ended is there until it
        has had the processor once more, and others on the machine have shared memory for a moment."""
        deadline = time.monotonic() + 20
        while (held := Held.now()) != self and time.monotonic() < deadline:
            time.sleep(0.1)
        return held


def _kind(descriptor: str) -> str:
    """What a descriptor is open on; sockets and pipes without their numbers."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0]
    except FileNotFoundError:
        return "the listing itself"


def _memfd_mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:" in line for line in file)


def _no_optimizer(parameters: list[Any]) -> Any:
    return None


def _use_a_pipeline(name: str, schedule: str, channel: str) -> list[float]:
    # The shared BERT was captured before; a fresh model is captured here, and must not stay behind either.
    model, batch, loss_fn = tasks.bert() if name == "bert" else models.sequential(dropout=0.1)
    options: dict[str, Any] = {"minibatches": 4} if schedule in tasks.SYNCHRONOUS else {}
    with Pipeline(
        model, batch, optimizer=tasks.adamw, loss_fn=loss_fn, schedule=schedule, channel=channel, **options
    ) as pipe:
        losses = [loss for _, loss in pipe.train([batch] * 8)]
        for update, _ in pipe.train([batch] * 12):
            if update == len(losses):
                break
        losses.append(pipe.evaluate([batch] * 3))
        pipe.full_state_dict()
        return losses


def _use_several(name: str, schedule: str, channel: str) -> tuple[Held, Held, list[list[float]]]:
    _use_a_pipeline(name, schedule, channel)  # fills the caches of torch
    before = Held.now()
    losses = [_use_a_pipeline(name, schedule, channel) for _ in range(3)]
    return before, before.again(), losses


def _fail_to_build(schedule: str, channel: str) -> str:
    """The channels are open when the mistake is found."""
    model, batch, _ = tasks.bert()
    with pytest.raises(VPipeError) as caught:
        Pipeline(model, batch, optimizer=_no_optimizer, schedule=schedule, channel=channel)
    return str(caught.value)


def _fail_in_training(schedule: str, channel: str) -> str:
    """Minibatches are under way when the mistake is found."""
    good, bad = tasks.batches(6), models.language_batch(seed=7)
    del bad["labels"]
    with (
        pytest.raises(VPipeError) as caught,
        tasks.make_pipeline(schedule, channel=channel) as pipe,
    ):
        list(pipe.train([*good, bad]))
    return str(caught.value)


def _fail_several(fail: Callable[[str, str], str], schedule: str, channel: str) -> tuple[Held, Held, str]:
    _use_a_pipeline("bert", schedule, channel)
    before = Held.now()
    for _ in range(2):
        text = fail(schedule, channel)
    after = before.again()
    _use_a_pipeline("bert", schedule, channel)
    return before, after, text


@pytest.mark.parametrize(
    ("name", "schedule", "channel"),
    [
        ("sequential", "1f1b", "gloo"),
        ("bert", "pipedream", "shared_memory"),
        pytest.param("bert", "zb-v", "gloo", marks=pytest.mark.long),
        pytest.param("bert", "zb-v", "shared_memory", marks=pytest.mark.long),
    ],
)
def test_three_pipelines_leave_nothing_behind(pool: Pool, name: str, schedule: str, channel: str) -> None:
    for before, after, losses in pool.run(2, _use_several, name, schedule, channel):
        assert after == before
        assert losses[0] == losses[1] == losses[2]


NO_OPTIMIZER, NO_LABELS = "optimizer= returned NoneType", "missing: ['labels']"


@pytest.mark.parametrize(
    ("fail", "reported", "channel"),
    [
        (_fail_to_build, NO_OPTIMIZER, "shared_memory"),
        (_fail_in_training, NO_LABELS, "gloo"),
        pytest.param(_fail_to_build, NO_OPTIMIZER, "gloo", marks=pytest.mark.long),
        pytest.param(_fail_in_training, NO_LABELS, "shared_memory", marks=pytest.mark.long),
    ],
)
def test_a_pipeline_that_fails_leaves_nothing_behind(
    pool: Pool, fail: Callable[[str, str], str], reported: str, channel: str
) -> None:
    results = pool.run(2, _fail_several, fail, "pipedream", channel)
    # Whoever is not the first to meet its mistake may hear of the other's.
    assert any(reported in text for *_, text in results)
    for before, after, _ in results:
        assert after == before
