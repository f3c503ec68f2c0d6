"""vpipe's channel as a backend of torch.distributed: torch's own pipelines train over it as the plain model."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from tests.multiprocess.pool import Pool
from vpipe.communication import ProcessWorld

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from channel_group import join_group

STEPS, MINIBATCHES, SAMPLES, WIDTH = 3, 4, 8, 6
STAGES = {"Schedule1F1B": 2, "ScheduleInterleaved1F1B": 4, "ScheduleZBVZeroBubble": 4}


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(4)]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    return inputs, targets


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1)


def train_as_torch_does(schedule: str, device: str = "cpu") -> list[float]:
    """Losses of the updates, on the rank that has them."""
    world, place = ProcessWorld(timeout=600.0), torch.device(device)
    join_group(world, place)
    count = STAGES[schedule]
    mine = [world.rank] if count == 2 else [world.rank, world.rank + 2]
    if schedule == "ScheduleZBVZeroBubble":
        mine = [world.rank, 3 - world.rank]
    own = layers()
    modules = {index: nn.Sequential(*own[index * 4 // count : (index + 1) * 4 // count]) for index in mine}
    held: Any = [
        pipelining.PipelineStage(module.to(place), index, count, place) for index, module in modules.items()
    ]
    program = getattr(pipelining, schedule)(
        held[0] if count == 2 else held, n_microbatches=MINIBATCHES, loss_fn=nn.functional.mse_loss
    )
    optimizer = sgd(nn.ModuleList(modules.values()))
    inputs, targets = (tensor.to(place) for tensor in data())
    reported = []
    for _ in range(STEPS):
        losses: list[Tensor] = []
        program.step(*([inputs] if 0 in mine else []), target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        reported += [torch.stack(losses).mean().item()] if losses else []
    dist.barrier()
    dist.destroy_process_group()
    world.close()
    return reported


def train_plainly() -> list[float]:
    model = nn.Sequential(*layers())
    optimizer = sgd(model)
    inputs, targets = data()
    reported = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reported.append(loss.item())
    return reported


@pytest.mark.parametrize("schedule", STAGES)
def test_torchs_pipelines_train_as_the_plain_model(pool: Pool, schedule: str) -> None:
    reported = [losses for losses in pool.run(2, train_as_torch_does, schedule) if losses]
    assert len(reported) == 1, "one rank has the loss"
    assert reported[0] == pytest.approx(train_plainly(), rel=1e-12)


def call_everything() -> list[list[float]]:
    """Two messages each way before either is taken, taken out of order; then a sum over all ranks."""
    world = ProcessWorld(timeout=600.0)
    join_group(world, torch.device("cpu"))
    other = 1 - world.rank
    for number in (1.0, 2.0):
        dist.isend(torch.full((300,), 10 * world.rank + number), other)
    first, second = torch.empty(300), torch.empty(300)
    works = [dist.irecv(first, other), dist.irecv(second, other)]
    for work in reversed(works):
        work.wait()
    summed = torch.tensor([1.0, float(world.rank)])
    dist.all_reduce(summed)
    dist.destroy_process_group()
    world.close()
    return [[first[0].item(), second[0].item()], summed.tolist()]


def test_messages_are_matched_by_their_order(pool: Pool) -> None:
    assert pool.run(2, call_everything) == [
        [[11.0, 12.0], [2.0, 1.0]],
        [[1.0, 2.0], [2.0, 1.0]],
    ]
