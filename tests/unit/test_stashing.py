"""Weight versions: pointed at and not copied, kept for as long as a backward needs them, and no longer."""

import pytest
import torch
from torch import nn

from vpipe.errors import VPipeError
from vpipe.weights import OptimizerWithWeightStashing, optimizer_factory
from vpipe.weights.versions import ALIGNMENT


def make(count: int = 3, dtype: torch.dtype = torch.float32, **options) -> OptimizerWithWeightStashing:
    torch.manual_seed(0)
    parameters = {f"p{i}": nn.Parameter(torch.randn(2, 3).to(dtype)) for i in range(count)}
    return OptimizerWithWeightStashing(parameters, lambda ps: torch.optim.SGD(ps, 0.1), **options)


def give_gradients(optimizer: OptimizerWithWeightStashing, value: float) -> None:
    for parameter in optimizer.model_parameters:
        parameter.grad = torch.full_like(parameter, value)


def test_a_backward_reads_what_its_forward_read() -> None:
    optimizer = make()
    parameter = optimizer.model_parameters[0]
    before = parameter.detach().clone()
    optimizer.load_new_params(minibatch=0)
    give_gradients(optimizer, 1.0)
    optimizer.step()
    assert torch.equal(parameter, before - 0.1)
    assert optimizer.current_version == optimizer.latest_version == 1
    optimizer.load_old_params(minibatch=0)
    assert torch.equal(parameter, before)
    assert optimizer.current_version == 0
    optimizer.load_new_params()
    assert torch.equal(parameter, before - 0.1)


def test_without_a_pending_backward_a_step_happens_in_place() -> None:
    optimizer = make()
    address = optimizer.model_parameters[0].data_ptr()
    for _ in range(3):
        give_gradients(optimizer, 1.0)
        optimizer.step()
    assert optimizer.model_parameters[0].data_ptr() == address
    assert optimizer.num_versions == 1


def test_a_version_dies_with_its_last_minibatch_and_its_storage_is_used_again() -> None:
    optimizer = make()
    addresses = set()
    for minibatch in range(10):
        optimizer.load_new_params(minibatch)
        if minibatch >= 2:
            optimizer.load_old_params(minibatch - 2)
            optimizer.release(minibatch - 2)
        give_gradients(optimizer, 1.0)
        optimizer.step()
        addresses.add(optimizer.model_parameters[0].data_ptr())
        assert optimizer.num_versions <= 3
    assert len(addresses) <= 4
    optimizer.release(8)
    optimizer.release(9)
    assert optimizer.num_versions == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_begin_where_kernels_read_them_best(dtype: torch.dtype) -> None:
    optimizer = make(count=4, dtype=dtype)
    optimizer.load_new_params(minibatch=0)
    give_gradients(optimizer, 1.0)
    optimizer.step()  # into a second version
    assert optimizer.num_versions == 2
    assert all(parameter.data_ptr() % ALIGNMENT == 0 for parameter in optimizer.model_parameters)


def test_autograd_accepts_a_backward_through_stashed_weights() -> None:
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    optimizer = OptimizerWithWeightStashing({"w": weight}, lambda ps: torch.optim.SGD(ps, 0.5))
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad((x @ weight @ weight).sum(), [x, weight])
    optimizer.load_new_params(0)
    loss = (x @ weight @ weight).sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.load_old_params(0)
    loss.backward()
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_mixed_precision_keeps_float32_masters() -> None:
    optimizer = make(dtype=torch.bfloat16)
    assert all(master.dtype == torch.float32 for master in optimizer.master_parameters)
    for _ in range(100):
        give_gradients(optimizer, 1e-4)  # each step is far below bfloat16's resolution
        optimizer.step()
    moved = optimizer.master_parameters[0] - make(dtype=torch.bfloat16).master_parameters[0]
    assert torch.allclose(moved, torch.full_like(moved, -1e-3), rtol=1e-2)
    assert torch.equal(optimizer.model_parameters[0], optimizer.master_parameters[0].bfloat16())


def test_frozen_parameters_have_no_versions() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = OptimizerWithWeightStashing(
        {"a": frozen, "b": nn.Parameter(torch.ones(3))}, lambda ps: torch.optim.SGD(ps, 0.1)
    )
    assert optimizer.names == ["b"]


def test_the_learning_rate_follows_its_scheduler() -> None:
    optimizer = make(lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
    start = optimizer.model_parameters[0].detach().clone()
    for _ in range(2):
        give_gradients(optimizer, 1.0)
        optimizer.step()
    assert torch.allclose(optimizer.model_parameters[0], start - 0.1 - 0.05)


def test_an_optimizer_instead_of_a_function_is_refused() -> None:
    with pytest.raises(VPipeError, match="optimizer= returned int, not a torch"):
        OptimizerWithWeightStashing({"a": nn.Parameter(torch.ones(3))}, lambda ps: 3)  # type: ignore[arg-type]


def test_unknown_optimizer_gets_a_suggestion() -> None:
    with pytest.raises(VPipeError, match="unknown optimizer 'lamp': did you mean 'lamb'"):
        optimizer_factory("lamp", 1.0)
