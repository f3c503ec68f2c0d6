"""What the runtime itself takes for an action: a pipeline that computes nearly nothing, against its bare module."""

from __future__ import annotations

from statistics import median
from time import thread_time

import torch
from torch import nn

from vpipe.communication import HOST, InProcessWorld
from vpipe.graph import capture
from vpipe.pipeline.threads import run_ranks
from vpipe.profile.bench import BACKWARD, FORWARD, Bench, run_rounds
from vpipe.profile.clocks import seconds

MINIBATCHES, UPDATES, WARM = 8, 12, 2


def measure_overhead() -> float:
    """Seconds of a forward or backward beyond those of its blocks; updates and messages are measured elsewhere."""
    with torch.random.fork_rng(devices=[]):
        (update,) = run_ranks(1, _train)
        model, batch = _tiny()
        graph = capture(model, batch, nn.functional.mse_loss)
        (stage,) = graph.stages((len(graph.blocks),))
        bench = Bench(stage, model, _optimizer, None, {}, graph.batch_fields(batch), HOST)
        run_rounds([bench], 50, 50, 0.0)
    bare = sum(median(map(seconds, bench.laps[phase])) for phase in (FORWARD, BACKWARD))
    return max(0.0, (update / MINIBATCHES - bare) / 2)


def _train(world: InProcessWorld) -> float:
    """Seconds of an update."""
    from vpipe.pipeline import Pipeline

    model, batch = _tiny()
    with Pipeline(
        model,
        batch,
        loss_fn=nn.functional.mse_loss,
        device=HOST,
        optimizer=_optimizer,
        schedule="1f1b",
        minibatches=MINIBATCHES,
        world=world,
    ) as pipe:
        before, taken = thread_time(), []
        for _ in pipe.train(batch for _ in range(MINIBATCHES * (WARM + UPDATES))):
            now = thread_time()
            taken.append(now - before)
            before = now
    return median(taken[WARM:])


def _tiny() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.zeros(2, 8), torch.zeros(2, 8))


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.0)
