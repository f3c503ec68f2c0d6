"""Asynchronous schedules: every minibatch sees, in every stage, the weights that the schedule says.

The reference applies w(t+1) = w(t) - update(gradient at the version read) stage by stage in one process.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests import models
from tests.examples import example, varied
from vpipe import Pipeline
from vpipe.graph import ModelGraph
from vpipe.pipeline.threads import run_ranks
from vpipe.schedule import build
from vpipe.verify import comparison, reference
from vpipe.weights import optimizer_factory

UPDATES = 12
"""Three times as many as it takes to fill the deepest pipeline here."""
MANY_UPDATES = pytest.param(50, marks=pytest.mark.long)
OPTIMIZERS = {
    "sgd": optimizer_factory("sgd", 0.05, weight_decay=0.01),
    "adamw": optimizer_factory("adamw", 1e-3, weight_decay=0.1),
    "lamb": optimizer_factory("lamb", 1e-3, weight_decay=0.01),
}


def chain_versions(stages: int, interval: int, count: int) -> dict[tuple[int, int], int]:
    """Without replicas stage s is P-1-s forwards ahead: minibatch m finds (m - (P-1-s)) / U updates made."""
    return {
        (stage, m): max(0, (m - (stages - 1 - stage)) // interval)
        for stage in range(stages)
        for m in range(count)
    }


def check(
    captured: Callable[..., ModelGraph],
    example: models.Example,
    schedule: str,
    ranks: int,
    *,
    optimizer: str = "adamw",
    updates: int = UPDATES,
    **options: Any,
) -> None:
    model, batch, loss_fn = example

    def train(world: Any) -> tuple[list[float], dict[str, Tensor] | None, Any]:
        with Pipeline(
            model,
            batch,
            optimizer=OPTIMIZERS[optimizer],
            loss_fn=loss_fn,
            schedule=schedule,
            world=world,
            **options,
        ) as pipe:
            data = varied(batch, updates * pipe.schedule.update_interval)
            losses = [loss for _, loss in pipe.train(data)]
            return losses, pipe.full_state_dict(), pipe.layout

    results = run_ranks(ranks, train)
    layout = results[0][2]
    interval = layout.schedule.update_interval
    data = varied(batch, updates * interval)
    if "replicas" in options:
        versions = reference.versions_read(layout.schedule, len(data))
    else:
        versions = chain_versions(ranks, interval, len(data))
    expected = reference.train_asynchronously(
        model,
        data,
        interval,
        reference.Recipe(OPTIMIZERS[optimizer], loss_fn, clip_norm=options.get("clip_norm")),
        captured(model, batch, loss_fn),
        stages=layout.stage_graphs,
        versions=versions,
        lag=layout.schedule.lag,
    )
    for losses, _, _ in results:
        assert losses == pytest.approx(expected.losses, rel=1e-9)
    state = results[0][1]
    assert state is not None
    ours = {name: state[name] for name in expected.weights}
    difference, where = comparison.largest_difference(ours, expected.weights)
    assert difference < 1e-9, where


@pytest.mark.parametrize("updates", [UPDATES, MANY_UPDATES])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_every_depth(captured: Callable, capture_once: None, schedule: str, ranks: int, updates: int) -> None:
    check(captured, example("sequential", dropout=0.1), schedule, ranks, updates=updates)


@pytest.mark.parametrize("updates", [UPDATES, MANY_UPDATES])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_every_optimizer(
    captured: Callable, capture_once: None, schedule: str, optimizer: str, updates: int
) -> None:
    check(captured, example("sequential", dropout=0.1), schedule, 3, optimizer=optimizer, updates=updates)


def test_vpipe_is_pipedreams_order(captured: Callable, capture_once: None) -> None:
    check(captured, example("sequential", dropout=0.1), "vpipe", 3, updates=10)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_tied_weights_are_one_parameter_whose_late_holder_lags(
    captured: Callable, capture_once: None, name: str, ranks: int
) -> None:
    check(captured, example(name, layers=2, dropout=0.1), "pipedream", ranks, updates=10)


def test_tied_weights_in_macrobatches(captured: Callable, capture_once: None) -> None:
    check(captured, example("bert", layers=2, dropout=0.1), "2bw", 2, updates=6, update_interval=3)


def test_macrobatches_of_any_length(captured: Callable, capture_once: None) -> None:
    check(captured, example("sequential", dropout=0.1), "pipedream", 3, updates=10, update_interval=5)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 2), (2, 2, 1)])
def test_replicas_update_together(captured: Callable, capture_once: None, replicas: tuple[int, ...]) -> None:
    check(
        captured,
        example("sequential", dropout=0.1),
        "pipedream",
        sum(replicas),
        updates=10,
        replicas=replicas,
    )


def test_replicas_that_share_a_tied_parameter(captured: Callable, capture_once: None) -> None:
    check(captured, example("gpt2", layers=2, dropout=0.1), "pipedream", 3, updates=6, replicas=(2, 1))


def test_recompute_sees_the_stashed_weights_and_the_same_masks(
    captured: Callable, capture_once: None
) -> None:
    check(captured, example("gpt2", layers=2, dropout=0.1), "pipedream", 3, updates=8, recompute_ratio=1.0)


def test_each_stage_clips_by_its_own_norm(captured: Callable, capture_once: None) -> None:
    check(captured, example("gpt2", layers=2, dropout=0.1), "pipedream", 2, updates=8, clip_norm=0.05)


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_versions_live_as_the_schedule_says_and_all_but_one_die(capture_once: None, schedule: str) -> None:
    model, batch, loss_fn = example("sequential", dropout=0.1)

    def train(world: Any) -> tuple[int, int]:
        with Pipeline(
            model, batch, optimizer=OPTIMIZERS["sgd"], loss_fn=loss_fn, schedule=schedule, world=world
        ) as pipe:
            (stage,) = pipe.runtime.stages.values()
            peak = 0
            forward = stage.forward

            def watch(*args: Any) -> Any:
                nonlocal peak
                outputs = forward(*args)
                peak = max(peak, stage.optimizer.num_versions)
                return outputs

            stage.forward = watch  # type: ignore[method-assign]
            for _ in pipe.train([batch] * 24):
                pass
            return peak, stage.optimizer.num_versions

    peaks, left = zip(*run_ranks(4, train), strict=True)
    assert peaks == ((4, 3, 2, 1) if schedule == "pipedream" else (2, 2, 2, 1))
    assert left == (1, 1, 1, 1)


def test_a_table_that_is_drained_goes_on(capture_once: None) -> None:
    """A flush ends a round of an asynchronous table, and once it ended the training with it."""
    model, batch, loss_fn = example("sequential")
    table = build("pipedream", 2, 4)

    def train(world: Any) -> list[int]:
        made = []
        with Pipeline(
            model, batch, optimizer=OPTIMIZERS["sgd"], loss_fn=loss_fn, schedule=table, world=world
        ) as pipe:
            for update, _ in pipe.train([batch] * 12):
                made.append(update)
                if update in (2, 7):  # in the middle of a round, and at its end
                    pipe.flush()
        return made

    assert run_ranks(2, train) == [list(range(12))] * 2
