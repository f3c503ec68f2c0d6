"""Muon of matrices and stacks of them, against torch's own and against one matrix at a time."""

import pytest
import torch
from torch import Tensor, nn

from vpipe.weights import NamedParameters, optimizer_factory
from vpipe.weights.muon import STACKED, Muon

UPDATES = 4


def drawn(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def trained(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def by_torch(*shapes: tuple[int, ...]) -> list[Tensor]:
    made = drawn(*shapes)
    own = torch.optim.Muon(made, 0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    return trained(own, made)


SHAPES = [(8, 24), (24, 8), (8, 24), (8, 8), (8, 24)]


def test_equals_torchs_to_the_bit() -> None:
    made = drawn(*SHAPES)
    for own, expected in zip(trained(Muon(made, 0.02, 0.1, 0.9), made), by_torch(*SHAPES), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("most", [1, 2 * 8 * 24, 10**6])
def test_matrices_of_a_shape_are_computed_together(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STACKED, "cpu", most)
    made = drawn(*SHAPES)
    for own, expected in zip(trained(Muon(made, 0.02, 0.1, 0.9), made), by_torch(*SHAPES), strict=True):
        torch.testing.assert_close(
            own, expected, rtol=0.02, atol=2e-3
        )  # updates of about 0.01, rounded to bfloat16


def test_experts_are_matrices_each_by_itself() -> None:
    """A stack of three experts ends as three matrices do."""
    together, apart = drawn((3, 8, 24)), [nn.Parameter(e) for e in drawn((3, 8, 24))[0].detach().unbind()]
    stacked, alone = (Muon(parameters, 0.02, 0.1, 0.9) for parameters in (together, apart))
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        together[0].grad = torch.randn(3, 8, 24, generator=generator)
        for parameter, gradient in zip(apart, together[0].grad.unbind(), strict=True):
            parameter.grad = gradient.clone()
        stacked.step()
        alone.step()
    torch.testing.assert_close(
        together[0].detach(), torch.stack([p.detach() for p in apart]), rtol=0.02, atol=2e-3
    )


def test_a_parameter_without_gradient_stays() -> None:
    first, second = drawn((8, 8), (8, 8))
    before, optimizer = second.detach().clone(), Muon([first, second], 0.02, 0.1)
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert torch.equal(second, before)
    assert second not in optimizer.state


def test_experts_by_name_have_muon_and_convolutions_have_adamw() -> None:
    named = NamedParameters(
        [
            ("layers.0.mlp.experts.down_proj", nn.Parameter(torch.zeros(4, 8, 8))),
            ("layers.0.mlp.experts.down_proj_bias", nn.Parameter(torch.zeros(4, 8))),
            ("layers.0.conv.weight", nn.Parameter(torch.zeros(8, 8, 3))),
        ]
    )
    rest, muon = optimizer_factory("muon", 0.01)(named)  # type: ignore[misc]
    assert isinstance(muon, Muon)
    assert [p.shape for group in muon.param_groups for p in group["params"]] == [(4, 8, 8)]
    assert len(rest.param_groups[0]["params"]) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("most", [1, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flag_on_the_device_leaves_everything_as_it_is(
    dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Update 2 of 4 is flagged, its gradients are not finite: weights and momentum are those of the other three."""
    monkeypatch.setitem(STACKED, "cpu", most)
    runs = []
    for flagged in (True, False):
        generator = torch.Generator().manual_seed(1)
        made = [nn.Parameter(parameter.detach().to(dtype)) for parameter in drawn(*SHAPES, (3, 8, 24))]
        optimizer = Muon(made, 0.02, 0.1, 0.9)
        for number in range(UPDATES):
            for parameter in made:
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
                if number == 2:
                    parameter.grad.view(-1)[0] = float("nan")
                    parameter.grad.view(-1)[1] = float("inf")
            if flagged:
                optimizer.found_inf = torch.tensor(float(number == 2))
            if flagged or number != 2:
                optimizer.step()
        runs.append([*made, *(optimizer.state[parameter]["momentum_buffer"] for parameter in made)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
