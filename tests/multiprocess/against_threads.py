"""The same task with ranks as processes and as threads; the latter are compared with the plain model elsewhere."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.multiprocess import tasks
from tests.multiprocess.pool import Pool
from vpipe.pipeline.threads import run_ranks


class AgainstThreads:
    """Runs a task both ways; what threads gave is kept for the other channels."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._expected: dict[bytes, Any] = {}

    def __call__(
        self, ranks: int, task: Callable[..., Any], *args: Any, channel: str, **options: Any
    ) -> None:
        key = pickle.dumps((ranks, task, args, options))
        if key not in self._expected:
            tasks.bert()  # before the threads, which would each build one
            run = run_ranks(ranks, lambda world: task(*args, world=world, **options))
            self._expected[key] = run[0]
        results = self.pool.run(ranks, task, *args, channel=channel, **options)
        losses, state = self._expected[key]
        for seen, _ in results:
            assert [number for number, _ in seen] == [number for number, _ in losses]
            assert seen == results[0][0]
            assert [loss for _, loss in seen] == pytest.approx([loss for _, loss in losses], rel=1e-6)
        weights = results[0][1]
        assert weights.keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-8, msg=name)
