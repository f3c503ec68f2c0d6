"""Training over NCCL, as the stand-in keeps its rules: no schedule waits for ever, and all compute the same."""

from typing import Any

import pytest
import torch

from tests import models
from tests.examples import example, varied
from tests.fake_nccl import FakeHub, run_on
from vpipe import Pipeline
from vpipe.communication import InProcessHub
from vpipe.pipeline.threads import run_ranks
from vpipe.weights import optimizer_factory

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"minibatches": 4},
    "1f1b": {"minibatches": 4},
    "interleaved": {"minibatches": 4, "chunks": 2},
    "zb-h1": {"minibatches": 4},
    "zb-v": {"minibatches": 4},
    "pipedream": {},
    "2bw": {"update_interval": 2},
}


def train(hub: InProcessHub, model: models.Example, schedule: str, **options: Any) -> list[Any]:
    module, batch, loss_fn = model

    def work(world: Any) -> Any:
        sgd = optimizer_factory("sgd", 0.1)
        with Pipeline(
            module,
            batch,
            optimizer=sgd,
            loss_fn=loss_fn,
            schedule=schedule,
            world=world,
            **SCHEDULES[schedule] | options,
        ) as pipe:
            return [loss for _, loss in pipe.train(varied(batch, 10))], pipe.full_state_dict()

    return run_on(hub, work) if isinstance(hub, FakeHub) else run_ranks(hub.size, work, hub=hub)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(capture_once: None, schedule: str, ranks: int) -> None:
    model = example("bert", layers=4)
    expected = train(InProcessHub(ranks), model, schedule)
    found = train(FakeHub(ranks), model, schedule)
    assert found[0][0] == expected[0][0]
    for name, tensor in expected[0][1].items():
        assert torch.equal(found[0][1][name], tensor), name
