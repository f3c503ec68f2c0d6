"""The line that describes a run at its beginning."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vpipe.config import RunConfig
from vpipe.train.description import describe


@pytest.mark.parametrize(("device", "graphs"), [("cpu", False), ("cuda", True)])
def test_cuda_graphs_are_named_where_there_can_be_some(device: str, graphs: bool) -> None:
    handler = SimpleNamespace(channel_names={1: "cuda-ipc"}, compressions=list)
    layout = SimpleNamespace(graph=SimpleNamespace(blocks=range(5)), partition=(3, 2))
    world = SimpleNamespace(size=2, all_gather=lambda _, value: [value] * 2)
    pipe: Any = SimpleNamespace(
        device=torch.device(device),
        handler=handler,
        layout=layout,
        world=world,
        schedule=SimpleNamespace(name="1f1b"),
    )
    position: Any = SimpleNamespace(updates=7, interval=2)
    line = describe(pipe, RunConfig(cuda_graphs="auto", batch_size=4), "Net", position)
    assert line.startswith("Net: 5 blocks as [3, 2] on 2 ")
    assert line.endswith("schedule 1f1b, 7 updates of 2 x 4 samples")
    assert ("with CUDA graphs where they gain" in line) == graphs
