"""Hooks of a pipeline: around each action, and at each update."""

from collections.abc import Callable
from typing import Any

import torch

from tests.examples import example
from vpipe import Pipeline
from vpipe.pipeline.threads import run_ranks
from vpipe.runtime.prefetch import Work


def test_hooks_run_around_the_actions_of_their_operations_and_can_be_removed(capture_once: None) -> None:
    model, batch, loss_fn = example("sequential", layers=4)
    seen: list[list[str]] = [[], []]

    def train(world: Any) -> None:
        lines = seen[world.rank]

        def hook(work: Work) -> Callable[[], object]:
            kind = " evaluation" if work.evaluation else ""
            lines.append(f"{work.action} of update {work.minibatch.update}{kind}")
            return lambda: lines.append(f"{work.action} done")

        with Pipeline(
            model,
            batch,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            loss_fn=loss_fn,
            schedule="1f1b",
            minibatches=2,
            world=world,
        ) as pipe:
            remove = pipe.on_action(hook, ("F", "STEP"))
            list(pipe.train([batch] * 2))
            pipe.evaluate([batch])
            remove()
            remove()
            list(pipe.train([batch] * 2))

    run_ranks(2, train, timeout=200.0)
    for rank, lines in enumerate(seen):
        forward = [f"{rank}F{m}{what}" for m in (0, 1) for what in (" of update 0", " done")]
        assert lines == [
            *forward,
            f"{rank}STEP1 of update 0",
            f"{rank}STEP1 done",
            f"{rank}F0 of update 0 evaluation",
            f"{rank}F0 done",
        ]


def test_a_hook_may_return_nothing_and_a_removed_one_leaves_the_others(capture_once: None) -> None:
    model, batch, loss_fn = example("sequential", layers=4)
    counted = {"once": 0, "always": 0}

    def train(world: Any) -> None:
        def once(work: Work) -> None:
            counted["once"] += 1
            remove()

        def always(work: Work) -> None:
            counted["always"] += 1

        with Pipeline(
            model,
            batch,
            optimizer=lambda p: torch.optim.SGD(p, 0.1),
            loss_fn=loss_fn,
            minibatches=3,
            world=world,
        ) as pipe:
            remove = pipe.on_action(once, ("F",))
            pipe.on_action(always, ("F",))
            list(pipe.train([batch] * 6))

    run_ranks(1, train, timeout=200.0)
    assert counted == {"once": 1, "always": 6}
