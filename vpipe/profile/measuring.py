"""The profile of a user's own model, for plans and simulations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.cost import Profile
from vpipe.profile.model import MeasuredModel
from vpipe.stage.compiled import check_compiler
from vpipe.system.device import choose_device
from vpipe.weights import OptimizerFactory


def profile(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: OptimizerFactory,
    loss_fn: Callable[..., Tensor] | None = None,
    precision: str = "fp32",
    compile: bool | str = False,
    cuda_graphs: bool | str = False,
    chunked_loss: bool = True,
    predict: bool = False,
    device: str | torch.device | None = None,
    ranks: int = 1,
    seconds: float = 5.0,
) -> Profile:
    """Measure the blocks of a model with a minibatch, this machine's memory and its links; for `vpipe.plan`.

        profile = vpipe.profile(model, batch, optimizer=lambda params: torch.optim.AdamW(params, 1e-3))
        found = vpipe.plan(profile, ranks=4, memory="11GiB")
        print(vpipe.simulate(profile, found.to_plan()).step_time)

    `vpipe.cost.write_profile` and `read_profile` keep it in a file, as `vpipe profile` does.

    Args:
        model: Any module that `torch.export` can capture. On the `meta` device only one or two blocks of each kind are
            built.
        batch: A minibatch, as for `vpipe.Pipeline`.
        optimizer: A function from a list of parameters to an optimizer, as for `vpipe.Pipeline`.
        loss_fn: The loss from the model's output and the other fields; without it the output has to contain the loss.
        precision: "fp32", "bf16" or "fp16".
        compile: True, or the name of a backend: with blocks that torch.compile has compiled.
        cuda_graphs: With stages that run as CUDA graphs; "auto": if they gain.
        chunked_loss: With the head and the loss of a large vocabulary computed in pieces, as a Pipeline does.
        predict: With `staleness=["predict"]` of `vpipe.Pipeline`, which takes time and memory.
        device: "cpu" or "cuda:0"; by default the GPU if there is one.
        ranks: On the CPU as many other processes compute meanwhile as other ranks of the host would.
        seconds: The time that the measurement may take, about.
    """
    place = choose_device(device, 0)
    backend = "inductor" if compile is True else compile or None
    if backend is not None:
        check_compiler(backend, place)
    measured = MeasuredModel(
        model,
        batch,
        loss_fn,
        optimizer=optimizer,
        precision=precision,
        compile=backend,
        cuda_graphs=cuda_graphs,
        chunked_loss=chunked_loss,
        predict=predict,
        place=place,
    )
    return measured.measure(seconds, ranks=ranks)
