"""Predicted versions on a GPU: by one kernel, and by operations of torch where Triton cannot compile it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe.weights import Delay, OptimizerWithWeightStashing, optimizer_factory
from vpipe.weights.prediction_kernel import compiled_kernel

DELAY = 3


@pytest.mark.parametrize("by", ["kernel", "operations"])
@pytest.mark.parametrize("optimizer", ["adamw", "nadamw", "sgd", "muon"])
def test_versions_in_bf16_follow_the_formula(
    optimizer: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, called = compiled_kernel(), 0
    if by == "kernel" and kernel is None:
        pytest.skip("Triton cannot compile here")

    def counted(*arguments: Any) -> bool:
        nonlocal called
        assert kernel is not None
        fitted = kernel(*arguments)
        called += fitted
        return fitted

    monkeypatch.setattr(
        "vpipe.weights.prediction.compiled_kernel", lambda: counted if by == "kernel" else None
    )
    generator = torch.Generator().manual_seed(0)
    shapes = {"layer.weight": (512, 257), "layer.bias": (513,), "other.weight": (16, 8)}
    values = {name: torch.randn(shape, generator=generator).cuda() for name, shape in shapes.items()}
    parameters = {name: nn.Parameter(value.bfloat16()) for name, value in values.items()}
    weights = OptimizerWithWeightStashing(
        parameters, optimizer_factory(optimizer, 0.01, 0.01), master_values=values, predict=True
    )
    before = weights.values()
    for _ in range(4):
        before = {name: value.clone() for name, value in weights.values().items()}
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).cuda().bfloat16()
        weights.step()
    weights.load_new_params(0, Delay(DELAY))
    assert bool(called) == (by == "kernel")
    for name, now in weights.values().items():
        expected = now + DELAY * _next_step(weights, name, now - before[name])
        torch.testing.assert_close(parameters[name].detach(), expected.bfloat16(), rtol=0.01, atol=1e-3)


def _next_step(weights: OptimizerWithWeightStashing, name: str, last: Tensor) -> Tensor:
    master = weights.master_parameters[weights.names.index(name)]
    own, group = next(
        (optimizer, group)
        for optimizer in weights.optimizers
        for group in optimizer.param_groups
        if any(parameter is master for parameter in group["params"])
    )
    state = own.state[master]
    if "exp_avg" in state:
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"] / (1 - beta1**4)
        return -group["lr"] * mean / ((state["exp_avg_sq"] / (1 - beta2**4)).sqrt() + group["eps"])
    if isinstance(own, torch.optim.SGD):
        return -group["lr"] * state["momentum_buffer"]
    return last
