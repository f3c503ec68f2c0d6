"""A rank that is much slower than the others: the losses are the same, and a warning names it."""

import re
from typing import Any

import pytest

from tests import models
from tests.examples import varied
from tests.faults.virtual import measure_virtually
from vpipe import Pipeline
from vpipe.observe.pace import FACTOR, WINDOW, Pace
from vpipe.pipeline.threads import run_ranks
from vpipe.system import faults
from vpipe.system.faults import VARIABLE
from vpipe.weights import optimizer_factory


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_rank_is_named_and_changes_nothing(
    slow: int, monkeypatch: pytest.MonkeyPatch, capture_once: None
) -> None:
    model, batch, loss_fn = models.sequential()
    updates = 2 * WINDOW + 3
    measure_virtually(monkeypatch)

    def train(fault: str) -> tuple[list[float], list[str]]:
        monkeypatch.setenv(VARIABLE, fault)
        faults.wanted.cache_clear()
        said = []

        def on_rank(world: Any) -> list[float]:
            with Pipeline(
                model,
                batch,
                optimizer=optimizer_factory("sgd", 0.05, weight_decay=0.0),
                loss_fn=loss_fn,
                schedule="pipedream",
                world=world,
            ) as pipe:
                pace = Pace(pipe, said.append)
                losses = []
                for _, loss in pipe.train(varied(batch, updates)):
                    losses.append(loss)
                    pace.update()
                return losses

        return run_ranks(3, on_rank)[0], said

    normal, _ = train("")
    slowed, said = train(f"rank={slow},point=bwd,kind=sleep,seconds=0.1,times={updates}")
    monkeypatch.delenv(VARIABLE)
    faults.wanted.cache_clear()
    assert slowed == normal
    (warning,) = said
    reported = re.fullmatch(rf"warning: rank {slow} \(stage {slow}\) is ([0-9.]+) times as slow .*", warning)
    assert reported, warning
    assert float(reported[1]) > FACTOR
