"""Compression of values and gradients between hosts: fewer bits for each number, one tensor of bytes for each message.

    bf16    each number as bfloat16
    int8    tiles of 128 numbers: step = largest / 127, codes = round(number / step)
    int4    tiles of 128 numbers, less their mean, rotated: step = largest / 7, codes likewise, two in a byte

    message │ codes of all tiles │ steps of all tiles (bfloat16) │ with int4 their means (bfloat16) │

A rotation spreads one large number over its tile, which with 4 bits would leave only zeros beside it. What all numbers
of a tile have in common it would not spread: their mean is sent beside the codes. Nothing is kept
between messages. The receiver knows shape and type of the tensor, so no header is sent. A tile with a number that is
not finite has none that is when it arrives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vpipe.errors import VPipeError, meant

NONE, BF16, INT8, INT4 = MODES = ("none", "bf16", "int8", "int4")
TILE = 128
SMALLEST = 1024
"""Numbers that a tensor has at least to be compressed: a small message takes as long with fewer bytes."""
_LARGEST_CODE = {INT8: 127, INT4: 7}
_SMALLEST_STEP = 1e-38
_TILE_PARTS = {INT8: (TILE, 2, 0), INT4: (TILE // 2, 2, 2)}
"""Bytes of a tile: codes, step, mean."""


class Compression(NamedTuple):
    """What is done with activations (forward), with their gradients (backward), and with gradients of replicas."""

    forward: str = NONE
    backward: str = NONE
    replicas: str = NONE

    def __str__(self) -> str:
        text = self.forward if self.forward == self.backward else f"{self.forward} and {self.backward}"
        return text if self.replicas == NONE else f"{text}, gradients of replicas by {self.replicas}"


UNCOMPRESSED = Compression()
Given = str | Mapping[Any, Any]


class LinkCompression(NamedTuple):
    """The compression of each link; the gradients of replicas have one for all, or replicas would differ."""

    default: Compression = UNCOMPRESSED
    pairs: tuple[tuple[int, int, Compression], ...] = ()
    """Links with one of their own: two ranks, the lower one first."""

    def between(self, rank: int, other: int) -> Compression:
        ends = min(rank, other), max(rank, other)
        return next((found for *pair, found in self.pairs if tuple(pair) == ends), self.default)


def read_compression(given: Given | LinkCompression) -> LinkCompression:
    """From one mode for activations and their gradients, or from a mapping with a mode for each direction and for
    pairs of ranks, such as {"forward": "int8", "backward": "bf16"} or {"replicas": "int8", (0, 2): "int4"}."""
    if isinstance(given, LinkCompression):
        return given
    pairs = {}
    if isinstance(given, Mapping):
        pairs = {ends: modes for ends, modes in given.items() if isinstance(ends, tuple)}
        given = {key: mode for key, mode in given.items() if not isinstance(key, tuple)}
    default = _read_modes(given)
    found = []
    for ends, modes in pairs.items():
        if len(ends) != 2 or not all(isinstance(end, int) for end in ends) or ends[0] == ends[1]:
            raise VPipeError(f"compress has the link {ends!r}: give two different ranks, such as (0, 2)")
        own = _read_modes(modes)
        if own.replicas != NONE:
            raise VPipeError(f"compress has replicas for the link {ends!r}: give it once, beside the links")
        found.append((min(ends), max(ends), own._replace(replicas=default.replicas)))
    return LinkCompression(default, tuple(sorted(found)))


def _read_modes(given: Given) -> Compression:
    modes = given if isinstance(given, Mapping) else {"forward": given, "backward": given}
    for direction, mode in modes.items():
        if direction not in Compression._fields:
            raise VPipeError(
                f"compress has the unknown direction {direction!r}: {meant(str(direction), Compression._fields)}"
            )
        if mode not in MODES:
            raise VPipeError(f"compress is {mode!r}: {meant(str(mode), MODES)}")
    return Compression(**modes)


def wire_form(mode: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[str, Sequence[int], torch.dtype]:
    """The mode in which such a tensor is sent, and shape and type of the message: none, unless it is smaller then."""
    count = math.prod(shape)
    if mode != NONE and dtype.is_floating_point and count >= SMALLEST:
        size = 2 * count if mode == BF16 else -(-count // TILE) * sum(_TILE_PARTS[mode])
        if size < count * dtype.itemsize:
            return mode, (size,), torch.uint8
    return NONE, shape, dtype


@torch.no_grad()
def pack(tensor: Tensor, mode: str) -> Tensor:
    flat = tensor.reshape(-1)
    if mode == BF16:
        return flat.to(torch.bfloat16).view(torch.uint8)
    tiles = functional.pad(flat.float(), (0, -flat.numel() % TILE)).view(-1, TILE)
    beside: list[Tensor] = []
    if mode == INT4:
        beside = [tiles.mean(1, keepdim=True).bfloat16()]
        tiles = (tiles - beside[0].float()) @ _rotation(tiles.device)
    most = _LARGEST_CODE[mode]
    # Rounded first, so that both ends use the same: the largest number is still at most half a step from its code.
    steps = (tiles.abs().amax(1, keepdim=True) / most).bfloat16()
    codes = (tiles / steps.float().clamp_min(_SMALLEST_STEP)).round_().clamp_(-most, most).to(torch.int8)
    if mode == INT4:
        codes = codes + 8
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return torch.cat([part.view(torch.uint8).reshape(-1) for part in (codes, steps, *beside)])


@torch.no_grad()
def unpack(packed: Tensor, mode: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """In memory of its own."""
    shape = tuple(shape)
    if mode == BF16:
        return packed.view(torch.bfloat16).view(shape).to(dtype)
    count = math.prod(shape)
    number = -(-count // TILE)
    codes, steps, means = packed.split([number * size for size in _TILE_PARTS[mode]])
    if mode == INT4:
        codes = torch.stack((codes & 15, codes >> 4), 1).view(torch.int8) - 8
    tiles = codes.view(torch.int8).view(number, TILE) * steps.view(torch.bfloat16).float().view(number, 1)
    if mode == INT4:
        tiles = tiles @ _rotation(tiles.device).t() + means.view(torch.bfloat16).float().view(number, 1)
    return tiles.view(-1)[:count].view(shape).to(dtype)


@cache
def _rotation(device: torch.device) -> Tensor:
    """Signs, then a Hadamard matrix. Without the signs a constant tile would become one large number.

    The signs are a quadratic form of the bits of a number's place, which differs from every row of the matrix in
    about as many places: a tile like any of the rows is spread over half of the numbers.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < TILE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor([(-1.0) ** (place & place >> 1 & 0b010101).bit_count() for place in range(TILE)])
    return (signs[:, None] * matrix / math.sqrt(TILE)).to(device)
