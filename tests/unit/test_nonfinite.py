"""Losses and gradients that are not finite: found before the update, on every stage, and named."""

import math
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.examples import example, varied
from vpipe import Pipeline
from vpipe.errors import NonFiniteError, PeerError, VPipeError
from vpipe.pipeline.threads import run_ranks
from vpipe.runtime.updates import Updates
from vpipe.stage.stage import Stage
from vpipe.weights import optimizer_factory

pytestmark = pytest.mark.usefixtures("capture_once")

SYNCHRONOUS: dict[str, Any] = {"schedule": "1f1b", "minibatches": 4}
ASYNCHRONOUS: dict[str, Any] = {"schedule": "pipedream"}
BAD = 5
"""The minibatch that goes wrong: of the second update, where four make one."""


def run(
    bad_data: bool = False,
    updates: int = 3,
    scale: float | None = None,
    name: str = "sequential",
    layers: int = 4,
    optimizer: str = "adamw",
    flush: bool = False,
    **options: Any,
) -> list[tuple[str, Any, list[float]]]:
    """What ended each of two ranks, its weights then, and its losses."""
    model, batch, loss_fn = example(name, torch.float32, layers=layers)

    def work(world: Any) -> tuple[str, dict[str, Tensor], list[float]]:
        with Pipeline(
            model,
            batch,
            optimizer=optimizer_factory(optimizer, 1e-2),
            loss_fn=loss_fn,
            world=world,
            **options,
        ) as pipe:
            if scale is not None:
                pipe.runtime.updates.loss_scale.value = scale
            data = varied(batch, updates * pipe.schedule.update_interval)
            if bad_data:
                data[BAD] = (torch.full_like(data[BAD][0], math.inf), *data[BAD][1:])
            losses, ended = [], ""
            try:
                for _, loss in pipe.train(data):
                    losses.append(loss)
                    if flush:
                        pipe.flush()
            except (NonFiniteError, PeerError) as error:
                ended = f"{type(error).__name__}: {error}"
                pipe.close()  # the other one waits for us
            weights = {n: t.clone() for s in pipe.runtime.stages.values() for n, t in s.state().items()}
            world.all_gather("ended", None)
            return ended, weights, losses

    return run_ranks(2, work)


def poison(monkeypatch: pytest.MonkeyPatch, stages: set[int]) -> None:
    """The weight gradients of these stages are not finite for one minibatch; the loss is."""
    finish = Stage.weight_gradients

    def spoil(stage: Stage, minibatch: int) -> None:
        finish(stage, minibatch)
        if stage.index in stages and minibatch == BAD:
            gradient = stage.optimizer.model_parameters[0].grad
            assert gradient is not None
            gradient.view(-1)[0] = math.nan

    monkeypatch.setattr(Stage, "weight_gradients", spoil)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {0})


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are looked at as on a GPU, whose host does not wait for them."""
    monkeypatch.setattr(Updates, "_checks_late", property(lambda updates: updates._watched))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def finite(weights: dict[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_a_synchronous_run_that_clips_stops_everywhere_before_the_update(poisoned: None) -> None:
    options = {"clip_norm": 1.0, **SYNCHRONOUS}
    after_one = run(updates=1, **options)
    for (ended, weights, losses), (_, before, _) in zip(
        run(on_nonfinite="stop", **options), after_one, strict=True
    ):
        assert ended.startswith("NonFiniteError: update 1, stage 0: the gradients of minibatches 4 to 7")
        assert "on_nonfinite: skip" in ended
        assert len(losses) == 1
        assert equal(weights, before)


@pytest.mark.parametrize("looks_late", [False, True])
def test_a_synchronous_stage_stops_before_its_own_update(
    poisoned: None, request: pytest.FixtureRequest, looks_late: bool
) -> None:
    """Others do not wait for it: the run ends anyway."""
    ((_, before, _), _) = run(updates=1, **SYNCHRONOUS)
    if looks_late:
        request.getfixturevalue("late")
    ((ended, weights, _), (others_ended, others, _)) = run(updates=8, on_nonfinite="stop", **SYNCHRONOUS)
    assert ended.startswith("NonFiniteError: update 1, stage 0: the gradients of minibatches 4 to 7")
    assert others_ended.startswith("PeerError")
    assert equal(weights, before)
    assert finite(others)


def test_a_drained_pipeline_has_no_check_to_come(poisoned: None, late: None) -> None:
    """So that no checkpoint is made of stages that have made an update and others that have not."""
    ((ended, _, losses), _) = run(updates=8, on_nonfinite="stop", flush=True, **SYNCHRONOUS)
    assert ended.startswith("NonFiniteError: update 1, stage 0")
    assert len(losses) == 2


def test_all_ranks_name_the_last_stage_with_such_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank with an earlier stage looks first."""
    poison(monkeypatch, {0, 2})
    results = run(on_nonfinite="stop", schedule="zb-v", minibatches=4)
    assert all(ended.startswith("NonFiniteError: update 1, stage 2: ") for ended, _, _ in results)


@pytest.mark.parametrize(("options", "waits"), [({}, False), ({"clip_norm": 1.0}, True)])
def test_only_an_update_that_depends_on_all_gradients_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], waits: bool
) -> None:
    """Rank 1 makes its first update when rank 0 has begun the next one, or when that does not happen."""
    begun, step, found = Event(), Updates.step, list[bool]()
    forward = Stage.forward

    def held_back(updates: Updates, stage: int, update: int) -> None:
        if stage == 2 and update == 0:
            found.append(begun.wait(0.2 if waits else 60))
        step(updates, stage, update)

    def noted(stage: Stage, minibatch: int, *rest: Any) -> Any:
        if stage.index == 0 and minibatch == 4:
            begun.set()
        return forward(stage, minibatch, *rest)

    monkeypatch.setattr(Updates, "step", held_back)
    monkeypatch.setattr(Stage, "forward", noted)
    run(updates=2, on_nonfinite="stop", schedule="zb-v", minibatches=4, **options)
    assert found == [not waits]


def test_replicas_stop_alike(poisoned: None) -> None:
    """Each has the sum of their gradients."""
    alone = run(updates=1, replicas=[2], **SYNCHRONOUS)
    results = run(on_nonfinite="stop", replicas=[2], **SYNCHRONOUS)
    for (ended, weights, _), (_, before, _) in zip(results, alone, strict=True):
        assert ended.startswith("NonFiniteError: update 1, stage 0: ")
        assert equal(weights, before)


def test_a_synchronous_run_passes_over_the_update_everywhere(poisoned: None) -> None:
    after_one = run(updates=1, **SYNCHRONOUS)
    with pytest.warns(UserWarning, match="update 1, stage 0: .* skipped"):
        results = run(updates=2, on_nonfinite="skip", **SYNCHRONOUS)
    for (ended, weights, losses), (_, before, _) in zip(results, after_one, strict=True):
        assert not ended
        assert len(losses) == 2
        assert equal(weights, before)
    with pytest.warns(UserWarning, match="skipped"):
        longer = run(updates=3, on_nonfinite="skip", **SYNCHRONOUS)
    assert all(
        finite(weights) and not equal(weights, after_one[i][1]) for i, (_, weights, _) in enumerate(longer)
    )


def test_an_asynchronous_stage_stops_before_its_own_update(poisoned: None) -> None:
    results = run(updates=8, on_nonfinite="stop", **ASYNCHRONOUS)
    assert results[0][0].startswith(
        f"NonFiniteError: update {BAD}, stage 0: the gradients of minibatch {BAD} "
    )
    assert all(finite(weights) for _, weights, _ in results)


def test_an_asynchronous_stage_passes_over_its_own_update(poisoned: None) -> None:
    with pytest.warns(UserWarning, match=f"update {BAD}, stage 0"):
        results = run(updates=8, on_nonfinite="skip", **ASYNCHRONOUS)
    assert all(not ended and finite(weights) and len(losses) == 8 for ended, weights, losses in results)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_host_that_looks_late_stops_with_the_same_weights(
    poisoned: None, request: pytest.FixtureRequest, optimizer: str
) -> None:
    options = {"updates": 12, "optimizer": optimizer, "on_nonfinite": "stop", **ASYNCHRONOUS}
    ((_, expected, early), _) = run(**options)
    request.getfixturevalue("late")
    ((ended, weights, losses), (_, others, _)) = run(**options)
    assert ended.startswith(f"NonFiniteError: update {BAD}, stage 0: the gradients of minibatch {BAD} ")
    assert len(losses) > len(early)
    assert equal(weights, expected)
    assert finite(others)


@pytest.mark.parametrize(
    ("name", "layers", "optimizer", "options"),
    [
        ("sequential", 4, "sgd", {}),
        ("sequential", 4, "sgd", {"clip_norm": 0.01}),
        ("sequential", 4, "muon", {}),
        ("sequential", 4, "muon", {"staleness": ["predict"]}),
        ("gpt2", 1, "sgd", {"clip_norm": 0.01}),
    ],
)
def test_a_host_that_looks_late_passes_over_the_same_update(
    poisoned: None,
    request: pytest.FixtureRequest,
    name: str,
    layers: int,
    optimizer: str,
    options: dict[str, Any],
) -> None:
    """The weights of gpt2 that two stages share are clipped and checked by themselves. Adam would hide a clipping."""
    options = {"name": name, "layers": layers, "optimizer": optimizer, **ASYNCHRONOUS, **options}

    def ran() -> list[tuple[str, Any, list[float]]]:
        with pytest.warns(UserWarning, match="skipped") as reported:
            found = run(updates=8, on_nonfinite="skip", **options)
        assert any(f"update {BAD}, stage 0" in str(warning.message) for warning in reported)
        return found

    expected = ran()
    request.getfixturevalue("late")
    for (ended, weights, losses), (_, same, same_losses) in zip(ran(), expected, strict=True):
        assert not ended
        assert losses == pytest.approx(same_losses, rel=1e-6)
        assert finite(weights)
        for name, tensor in weights.items():  # a clip factor is rounded where it is computed
            torch.testing.assert_close(tensor, same[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [SYNCHRONOUS, ASYNCHRONOUS])
def test_a_loss_is_named_with_its_minibatch(options: dict[str, Any]) -> None:
    results = run(bad_data=True, updates=8, on_nonfinite="stop", **options)
    update = BAD // options.get("minibatches", 1)
    assert any(
        f"NonFiniteError: update {update}, rank 1: the loss of minibatch {BAD} is " in ended
        for ended, _, _ in results
    )
    assert all(ended and finite(weights) for ended, weights, _ in results)


@pytest.mark.parametrize("options", [SYNCHRONOUS, ASYNCHRONOUS])
def test_a_loss_that_is_passed_over(options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="skipped"):
        results = run(bad_data=True, updates=8, on_nonfinite="skip", **options)
    update = BAD // options.get("minibatches", 1)
    for ended, weights, losses in results:
        assert not ended
        assert [u for u, loss in enumerate(losses) if not math.isfinite(loss)] == [update]
        assert finite(weights)


@pytest.fixture
def diverged(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Minibatches whose weight gradients on stage 0 are not finite."""
    finish, bad = Stage.weight_gradients, set[int]()

    def poison(stage: Stage, minibatch: int) -> None:
        finish(stage, minibatch)
        gradient = stage.optimizer.model_parameters[0].grad
        if stage.index == 0 and minibatch in bad and gradient is not None:
            gradient.view(-1)[0] = math.nan

    monkeypatch.setattr(Stage, "weight_gradients", poison)
    return bad


@pytest.mark.filterwarnings("ignore:WARNING")
@pytest.mark.parametrize("options", [{"schedule": "1f1b", "minibatches": 1}, ASYNCHRONOUS])
@pytest.mark.parametrize("looks_late", [False, True])
def test_updates_that_are_skipped_again_and_again_end_the_run(
    diverged: set[int], options: dict[str, Any], looks_late: bool, request: pytest.FixtureRequest
) -> None:
    if looks_late:
        request.getfixturevalue("late")
    diverged |= {2, 3, 4, 12, 14, 16}  # three in a row, and of the last eight: four, from 9 to 16 only three
    limited = {"updates": 40, "on_nonfinite": "skip", **options}
    ended, weights, losses = run(nonfinite_limit=(3, 8), **limited)[0]
    assert ended.startswith(
        "NonFiniteError: update 4, stage 0: the gradients of minibatch 4 are not finite: "
    )
    assert (
        "3 of the last 5 updates were skipped for this, and nonfinite_limit ends the run at 3 of 8" in ended
    )
    assert finite(weights)
    ended, weights, losses = run(nonfinite_limit=(4, 8), **limited)[0]
    assert not ended
    assert len(losses) == 40
    diverged.add(10)
    assert "update 16, stage 0: " in run(nonfinite_limit=(4, 8), **limited)[0][0]


def test_a_limit_that_makes_no_sense() -> None:
    for limit in ((0, 5), (6, 5)):
        with pytest.raises(VPipeError, match=r"nonfinite_limit is .*: give two numbers"):
            run(nonfinite_limit=limit, on_nonfinite="skip", **SYNCHRONOUS)


@pytest.mark.parametrize(
    "options",
    [ASYNCHRONOUS, *({"schedule": name, "minibatches": 4} for name in ("1f1b", "interleaved", "zb-v"))],
)
def test_looking_late_changes_nothing(late: None, options: dict[str, Any]) -> None:
    test_looking_changes_nothing({"name": "gpt2", "layers": 2, "updates": 6, **options})


@pytest.mark.parametrize("options", [SYNCHRONOUS, ASYNCHRONOUS])
def test_looking_changes_nothing(options: dict[str, Any]) -> None:
    for (_, weights, losses), (_, expected, expected_losses) in zip(
        run(on_nonfinite="stop", **options), run(**options), strict=True
    ):
        assert losses == expected_losses
        assert equal(weights, expected)


@pytest.mark.parametrize(("scale", "fault"), [(2.0**10, False), (1.0, True)])
def test_a_float16_overflow_is_no_fault_until_the_scale_is_at_its_end(
    poisoned: None, scale: float, fault: bool
) -> None:
    """What a scale of one does not help against is one."""
    for ended, _, losses in run(precision="fp16", scale=scale, on_nonfinite="stop", **SYNCHRONOUS):
        assert ended.startswith("NonFiniteError: update 1, stage 0") == fault
        assert len(losses) == (1 if fault else 3)


def test_an_unknown_policy() -> None:
    with pytest.raises(VPipeError, match="unknown on_nonfinite 'halt'"):
        run(on_nonfinite="halt", **SYNCHRONOUS)
