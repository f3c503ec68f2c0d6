"""Figures of ranks that share one GPU: shares of its clock add up to at most 100 %, and waiting is seen."""

from typing import Any

import pytest

from tests.gpu import tasks
from tests.multiprocess.tasks import adamw, batches
from vpipe import Pipeline
from vpipe.observe.figures import Meter, RankFigures, shares
from vpipe.pipeline.threads import run_ranks


@pytest.mark.parametrize("schedule", ["gpipe", "pipedream"])
def test_shares_add_up_and_show_waiting(schedule: str) -> None:
    """The measuring begins while the GPU is behind its host, in the middle of a run."""
    model, batch, _ = tasks.double_bert()
    data = batches(32)

    def work(world: Any) -> RankFigures:
        options = tasks.options_of(schedule)
        with Pipeline(
            model, batch, optimizer=adamw, schedule=schedule, world=world, device=tasks.GPU, **options
        ) as pipe:
            meter = Meter(pipe)
            for update, _ in pipe.train(data):
                if update == 2:
                    meter.start()
            return meter.total()

    ranks = run_ranks(2, work)
    for rank in ranks:
        assert sum(rank.shares.values()) <= 1 + 1e-9
        assert rank.compute + rank.send + rank.wait <= rank.clock + 1e-6
    found = shares(ranks)
    assert 0 < found["of_limit"] < 1
    assert found["bubble_share"] > 0
