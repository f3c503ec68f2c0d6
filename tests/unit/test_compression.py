"""Compressed messages: errors within those of the formulas, fewer bytes, and a training that is nearly the same."""

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from tests import models
from tests.both_ways import adamw
from tests.examples import varied
from tests.fake_nccl import FakeHub, run_on
from vpipe import Pipeline
from vpipe.communication.compression import (
    BF16,
    INT4,
    INT8,
    MODES,
    NONE,
    SMALLEST,
    TILE,
    Compression,
    LinkCompression,
    pack,
    read_compression,
    unpack,
    wire_form,
)
from vpipe.config.compress import compression_by_ranks
from vpipe.config.keys import Compress, RunConfig
from vpipe.errors import VPipeError
from vpipe.pipeline.threads import run_ranks

LOSSY = (BF16, INT8, INT4)
LEVELS = {INT8: 127, INT4: 7}


def rounded(numbers: np.ndarray) -> np.ndarray:
    """To bfloat16: the upper half of a float32, the nearest, of two the even one."""
    bits = numbers.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32)


def rotated(tiles: np.ndarray) -> np.ndarray:
    """Each tile times signs and a Hadamard matrix, entry by entry."""
    places = range(TILE)
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in places] for i in places])
    bits = [[i >> bit & 1 for bit in range(6)] for i in places]
    signs = np.array([(-1.0) ** (a * b + c * d + e * f) for a, b, c, d, e, f in bits])
    return tiles * signs @ matrix / np.sqrt(TILE)


def as_tiles(numbers: np.ndarray) -> np.ndarray:
    return np.append(numbers, np.zeros(-len(numbers) % TILE)).reshape(-1, TILE)


def there_and_back(tensor: Tensor, mode: str) -> Tensor:
    chosen, shape, dtype = wire_form(mode, tensor.shape, tensor.dtype)
    packed = pack(tensor, mode)
    assert (chosen, tuple(shape), dtype) == (mode, tuple(packed.shape), packed.dtype)
    found = unpack(packed, mode, tensor.shape, tensor.dtype)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    return found


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Numbers of very different sizes, some of them outliers, some zero."""
    count = draw(st.integers(SMALLEST, SMALLEST + 3 * TILE))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numbers = generator.standard_normal(count) * 10.0 ** draw(st.integers(-30, 30))
    numbers *= np.where(generator.random(count) < draw(st.sampled_from([0, 0.01, 0.5])), 1000, 1)
    numbers *= generator.random(count) >= draw(st.sampled_from([0, 0.5, 1]))
    return torch.from_numpy(numbers + draw(st.sampled_from([0, 1, -50]))).float()


@given(tensors())
def test_bfloat16_and_8_bits_equal_the_formula(tensor: Tensor) -> None:
    numbers = tensor.numpy()
    assert np.array_equal(there_and_back(tensor, BF16).numpy(), rounded(numbers))
    tiles = as_tiles(numbers).astype(np.float32)
    steps = rounded(np.abs(tiles).max(1, keepdims=True) / np.float32(127))
    codes = np.clip(np.round(tiles / np.where(steps > 0, steps, 1)), -127, 127)
    found = there_and_back(tensor, INT8).numpy()
    assert np.array_equal(found, (codes * steps).reshape(-1)[: len(numbers)])
    error = np.abs(as_tiles(found) - tiles)
    assert (error <= 0.5001 * np.abs(tiles).max(1, keepdims=True) * (1 + 2**-8) / 127).all()


@given(tensors())
def test_4_bits_err_by_half_a_step_of_the_rotated_tile(tensor: Tensor) -> None:
    """A rotation keeps lengths, so the error of a tile is as long as that of its rotated numbers."""
    tiles = as_tiles(tensor.double().numpy())
    means = rounded(tiles.mean(1, keepdims=True)).astype(float)
    # A mean that is close to the middle of two bfloat16 may have been rounded to the other one.
    slack = np.abs(means).max(1) * 2**-7
    step = (np.abs(rotated(tiles - means)).max(1) + slack) * (1 + 2**-8) / 7
    error = as_tiles(there_and_back(tensor, INT4).double().numpy()) - tiles
    assert (np.linalg.norm(error, axis=1) <= 0.51 * np.sqrt(TILE) * step).all()
    turned = np.abs(rotated(error[: len(tensor) // TILE])).max(1)  # the last one was padded, and cut off
    assert (turned <= 0.51 * step[: len(turned)]).all()


@pytest.mark.parametrize("mean", [0.0, 3.0, 100.0])
def test_with_4_bits_a_mean_costs_no_precision(mean: float) -> None:
    """Numbers around it, which 4 bits would lose beside it: they err as they would around zero."""
    spread = torch.from_numpy(np.random.default_rng(0).normal(size=64 * TILE).astype(np.float32))
    error = there_and_back(spread + mean, INT4) - (spread + mean)
    assert error.norm() < 0.13 * spread.norm()


def test_an_outlier_does_not_hide_the_rest_of_its_tile() -> None:
    """Without the rotation all other numbers of the tile would be 0: its step would be 14."""
    tensor = torch.sin(torch.arange(1024.0))
    tensor[5] = 100.0
    error = there_and_back(tensor, INT4) - tensor
    assert error[:TILE].square().mean().sqrt() < 0.7


@pytest.mark.parametrize("mode", LOSSY)
def test_what_is_not_finite_stays_so(mode: str) -> None:
    """An overflow is found on whichever rank it is looked for; other tiles are not touched."""
    tensor = torch.ones(2 * SMALLEST)
    tensor[3], tensor[1500] = torch.inf, torch.nan
    found = there_and_back(tensor, mode).isfinite().view(-1, TILE)
    assert not found[0].all()
    assert not found[1500 // TILE].all()
    assert found.all(1).sum() == 2 * SMALLEST // TILE - 2
    assert there_and_back(torch.zeros(SMALLEST), mode).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_of_numbers(dtype: torch.dtype) -> None:
    tensor = torch.sin(torch.arange(3000.0)).view(30, 100).t().to(dtype)
    for mode, most in ((INT8, 0.01), (INT4, 0.5)):
        assert (there_and_back(tensor, mode) - tensor).abs().max() < most


@pytest.mark.parametrize("mode", MODES)
def test_only_what_becomes_smaller_is_compressed(mode: str) -> None:
    for shape, dtype in (((SMALLEST - 1,), torch.float32), ((5000,), torch.int64), ((), torch.float32)):
        assert wire_form(mode, shape, dtype) == (NONE, shape, dtype)
    assert wire_form(BF16, (5000,), torch.float16)[0] == NONE
    sizes = {NONE: 4.0, BF16: 2.0, INT8: 1 + 2 / TILE, INT4: 0.5 + 4 / TILE}
    _, shape, dtype = wire_form(mode, (64, TILE), torch.float32)
    assert np.prod(shape) * dtype.itemsize == 64 * TILE * sizes[mode]


def test_mistakes() -> None:
    for given_, message in (
        ("int9", "compress is 'int9': did you mean 'int8'?"),
        ({"foward": "int8"}, "compress has the unknown direction 'foward': did you mean 'forward'?"),
        ({"forward": 8}, "compress is 8: choose from none, bf16, int8, int4"),
        (None, "compress is None: did you mean 'none'?"),
        ({(0, 0): "int8"}, "compress has the link (0, 0): give two different ranks, such as (0, 2)"),
        (
            {(0, 1): {"replicas": "int8"}},
            "compress has replicas for the link (0, 1): give it once, beside the links",
        ),
    ):
        with pytest.raises(VPipeError, match="compress") as raised:
            read_compression(given_)  # type: ignore[arg-type]
        assert str(raised.value) == message
    assert read_compression({"forward": "int8"}) == LinkCompression(Compression("int8", "none"))
    assert get_args(Compress) == MODES
    both = {"forward": "int4", "backward": "none"}
    assert read_compression(RunConfig(compress=both).compress).default == Compression("int4", "none")
    links = read_compression({"backward": BF16, "replicas": INT8, (2, 0): INT4, (1, 3): {"forward": INT8}})
    assert links.between(0, 2) == links.between(2, 0) == Compression(INT4, INT4, INT8)
    assert links.between(3, 1) == Compression(INT8, NONE, INT8)
    assert links.between(0, 1) == Compression(NONE, BF16, INT8)


def test_links_of_a_configuration_are_pairs_of_hosts() -> None:
    machines = ["a:0", "a:1", "b-c:0", "d:0"]
    links = {"replicas": INT8, "a/b-c": INT4, "d/a": {"forward": BF16}}
    found = compression_by_ranks(RunConfig(machines=machines, stages=4, compress=links))
    assert found == {
        "replicas": INT8, (0, 2): INT4, (1, 2): INT4, (3, 0): {"forward": BF16}, (3, 1): {"forward": BF16},
    }  # fmt: skip
    assert read_compression(found).between(0, 3) == Compression(BF16, NONE, INT8)
    for wrong, text in (
        ({"a/e": INT8}, "`machines` has no host 'e': its hosts are a, b-c, d"),
        ({"a/a": INT8}, "'a/a' is no link: name two hosts, such as nodea/nodeb"),
        (
            {"foward": INT8},
            "'foward' is neither a direction nor a link such as nodea/nodeb: did you mean 'forward'?",
        ),
        (
            {"replicas": {"forward": INT8}},
            "replicas has a mode, not {'forward': 'int8'}: write replicas: int8",
        ),
    ):
        with pytest.raises(ValidationError, match="compress is") as raised:
            RunConfig(machines=machines, stages=4, compress=wrong)
        assert text in str(raised.value)


def train(world: Any, compress: Any, updates: int = 1, **options: Any) -> tuple[list[float], dict[str, int]]:
    """The losses, and the bytes that this rank has sent by operation."""
    model, batch, _ = EXAMPLE
    sent: dict[str, int] = {}
    with Pipeline(
        model, batch, optimizer=adamw, minibatches=2, world=world, compress=compress, **options
    ) as pipe:

        def count(work: Any) -> Any:
            before, op = pipe.handler.bytes_sent, str(work.action.op)

            def finish() -> None:
                sent[op] = sent.get(op, 0) + pipe.handler.bytes_sent - before

            return finish

        pipe.on_action(count)
        losses = [loss for _, loss in pipe.train(varied(batch, 2 * updates))]
        pipe.evaluate([batch])
        return losses, sent


EXAMPLE = models.gpt2(layers=2)


def test_bytes_of_each_direction_and_no_others(capture_once: None) -> None:
    """Masks, and gradients of tied and replicated parameters, are sent as they are."""

    def sent(compress: Any) -> list[dict[str, int]]:
        return [sent for _, sent in run_ranks(3, lambda world: train(world, compress, replicas=[2, 1]))]

    plain, apart = sent(NONE), sent({"forward": INT4, "backward": BF16})
    for before, after in zip(plain, apart, strict=True):
        assert before.keys() == after.keys()
        for op, count in before.items():
            if op not in ("SEND_F", "SEND_B"):
                assert after[op] == count, op
    values = models.BATCH * models.LENGTH * 32 * 4  # of the hidden states of one minibatch
    for before, after in zip(plain[:2], apart[:2], strict=True):
        minibatches = round(before["SEND_F"] / values)  # besides a mask
        saved = values - values // 8 - 4 * values // 4 // TILE
        assert before["SEND_F"] - after["SEND_F"] == minibatches * saved > 0
    assert plain[2]["SEND_B"] == 2 * apart[2]["SEND_B"] == 2 * values


def test_a_link_may_have_a_mode_of_its_own(capture_once: None) -> None:
    def sent(compress: Any) -> list[dict[str, int]]:
        return [sent for _, sent in run_ranks(3, lambda world: train(world, compress))]

    whole, first, none = sent(INT8), sent({(0, 1): INT8}), sent(NONE)
    assert first[0]["SEND_F"] == whole[0]["SEND_F"] < none[0]["SEND_F"]
    assert first[1]["SEND_B"] == whole[1]["SEND_B"] < none[1]["SEND_B"]
    assert whole[1]["SEND_F"] < first[1]["SEND_F"] == none[1]["SEND_F"]
    assert whole[2]["SEND_B"] < first[2]["SEND_B"] == none[2]["SEND_B"]


class Masked(nn.Module):
    """A frozen layer makes a mask, with numbers that bfloat16 would make infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.linear = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)
        self.mask.weight.zero_()
        self.mask.bias[::3] = torch.finfo(torch.float32).min

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        return ((self.linear(x) * 2 + mask).softmax(-1) * x.cumsum(-1)).mean()


def test_a_mask_is_sent_as_it_is() -> None:
    """A value without a gradient: noise in it is nothing that a model learns to bear."""
    model, batch = Masked(), {"x": torch.ones(32, 64)}

    def work(world: Any, mode: str) -> tuple[list[float], int]:
        with Pipeline(model, batch, optimizer=adamw, world=world, compress=mode) as pipe:
            return [loss for _, loss in pipe.train([batch] * 8)], pipe.handler.bytes_sent

    plain, compressed = (run_ranks(2, lambda world, m=mode: work(world, m)) for mode in (NONE, BF16))
    assert plain == compressed
    assert plain[0][1] >= 8 * batch["x"].nbytes


def test_a_training_goes_nearly_as_without(capture_once: None) -> None:
    found = {mode: run_ranks(2, lambda world, mode=mode: train(world, mode, 30))[0][0] for mode in MODES}
    final = {mode: np.mean(losses[-5:]) for mode, losses in found.items()}
    assert final[NONE] < 0.8 * found[NONE][0]
    for mode, most in ((BF16, 0.005), (INT8, 0.005), (INT4, 0.05)):
        assert found[mode] != found[NONE]
        assert abs(final[mode] / final[NONE] - 1) < most, final


def test_the_same_over_nccl(capture_once: None) -> None:
    """A stand-in for it: the channel between GPUs carries the packed bytes."""

    def work(world: Any) -> list[float]:
        return train(world, INT4, 2, schedule="zb-v")[0]

    assert run_on(FakeHub(2), work) == run_ranks(2, work)


def test_ranks_must_agree(capture_once: None) -> None:
    with pytest.raises(VPipeError, match="rank 1 has another compress than rank 0") as raised:
        run_ranks(2, lambda world: train(world, (INT8, INT4)[world.rank]))
    assert "\n" not in str(raised.value)
