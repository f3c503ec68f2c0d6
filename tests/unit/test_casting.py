"""Gradients cast in buckets are those of the plain cast, and are freed bucket by bucket."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe.weights import OptimizerWithWeightStashing, casting
from vpipe.weights.versions import ALIGNMENT, flat_tensors

SHAPES = [(3, 5), (7,), (), (1, 1), (6, 11), (0, 4), (33,), (2, 3, 5), (13,)]
"""Odd sizes, one of them larger than the small buckets below."""


def pairs_of(dtype: torch.dtype) -> list[casting.Pair]:
    torch.manual_seed(0)
    pairs = []
    for shape in SHAPES:
        parameter = nn.Parameter(torch.randn(shape).to(dtype))
        parameter.grad = torch.randn(shape, dtype=torch.float64).to(dtype)
        pairs.append((parameter, nn.Parameter(torch.zeros(shape))))
    pairs[-1][0].grad = pairs[1][0].grad = None
    pairs[0][0].grad = torch.randn(5, 3).to(dtype).t()  # of other strides than the parameter
    return pairs


@pytest.mark.parametrize("bucket", [1, 24, 64, 10**6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_equal_to_the_plain_cast_to_the_bit(
    dtype: torch.dtype, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(casting, "BUCKET", bucket)
    pairs = pairs_of(dtype)
    expected = [None if p.grad is None else p.grad.to(torch.float32) for p, _ in pairs]
    casting.hand_over_gradients(pairs)
    assert all(parameter.grad is None for parameter, _ in pairs)
    for (_, master), plain in zip(pairs, expected, strict=True):
        if plain is None:
            assert master.grad is None
        else:
            assert master.grad is not None
            assert torch.equal(master.grad, plain)
            assert master.grad.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("room", [1, 40, 10**6])
def test_a_bucket_for_which_there_is_no_place_is_cast_in_parts(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_narrow_room(like: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        if len(like) > 1 and sum(tensor.numel() for tensor in like) > room:
            raise torch.OutOfMemoryError("tried to allocate 50.00 MiB")
        return flat_tensors(like)

    monkeypatch.setattr(casting, "flat_tensors", in_narrow_room)
    pairs = pairs_of(torch.bfloat16)
    expected = [None if p.grad is None else p.grad.to(torch.float32) for p, _ in pairs]
    casting.hand_over_gradients(pairs)
    for (_, master), plain in zip(pairs, expected, strict=True):
        assert (master.grad is None) == (plain is None)
        assert plain is None or torch.equal(master.grad, plain)


def test_one_gradient_that_finds_no_place_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(like: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        raise torch.OutOfMemoryError("tried to allocate 50.00 MiB")

    monkeypatch.setattr(casting, "flat_tensors", nowhere)
    with pytest.raises(torch.OutOfMemoryError):
        casting.hand_over_gradients(pairs_of(torch.bfloat16))


def test_a_bucket_is_let_go_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.randn(10).bfloat16()) for _ in range(6)]
    for parameter in parameters:
        parameter.grad = torch.randn(10).bfloat16()
    alive = [weakref.ref(parameter.grad) for parameter in parameters]
    left = []

    def count(shapes: Any) -> Any:
        left.append((len(shapes), sum(gradient() is not None for gradient in alive)))
        return flat_tensors(shapes)

    monkeypatch.setattr(casting, "flat_tensors", count)
    monkeypatch.setattr(casting, "BUCKET", 25)
    casting.hand_over_gradients((p, nn.Parameter(torch.zeros(10))) for p in parameters)
    assert left == [(2, 6), (2, 4), (2, 2)]


def test_a_gradient_of_the_masters_own_dtype_is_not_copied() -> None:
    parameter, master = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    parameter.grad = given = torch.ones(3)
    casting.hand_over_gradients([(parameter, master)])
    assert master.grad is given
    assert parameter.grad is None


def test_updates_in_several_buckets_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam's moments too, with a tied parameter between others and one that gets a gradient every second time."""

    def train() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        parameters = {f"p{i}": nn.Parameter(torch.randn(3, 2 + i).bfloat16()) for i in range(5)}
        optimizer = OptimizerWithWeightStashing(
            parameters, lambda ps: torch.optim.AdamW(ps, 0.1), tied=["p1"]
        )
        for update in range(4):
            for name, parameter in parameters.items():
                if name != "p3" or update % 2:
                    parameter.grad = torch.randn_like(parameter)
            optimizer.step({"p1": torch.ones(3, 3)})
            assert all(parameter.grad is None for parameter in parameters.values())
        return optimizer.values()

    whole = train()
    monkeypatch.setattr(casting, "BUCKET", 16)
    assert all(torch.equal(value, whole[name]) for name, value in train().items())
