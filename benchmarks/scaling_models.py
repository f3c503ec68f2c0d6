"""The models of docs/scaling.md: their sizes, their arithmetic, and their profiles, which repeat measured blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vpipe.cost import Profile, Tie, read_profile
from vpipe.system.card_peak import named_peak

MEASURED = Path(__file__).parents[1] / "docs" / "measured"
LAYERS = 2
"""Layers of a measured model: the first has the embedding before it, the last the final norm behind it."""


class Model(NamedTuple):
    name: str
    kind: str
    """`bert` or `gpt`."""
    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    """Sequences of an update."""
    samples: tuple[int, ...]
    """Of a minibatch, as `scaling_profile.py` measures them."""

    @property
    def parameters(self) -> int:
        """Of the matrices, which is nearly all: each layer, the embedding, and of a GPT the head of its own."""
        return 12 * self.layers * self.width**2 + self.vocabulary * self.width * (
            1 if self.kind == "bert" else 2
        )

    @property
    def token_flops(self) -> float:
        """Of a forward and a backward: 6 for each weight of a matrix, attention over the sequence (half, if causal)."""
        attention = 12 * self.layers * self.width * self.sequence * (1 if self.kind == "bert" else 0.5)
        return 6 * (12 * self.layers * self.width**2 + self.vocabulary * self.width) + attention


MODELS = (
    Model("BERT-large", "bert", 24, 1024, 16, 30592, 512, 32768, (4, 16, 64)),
    Model("GPT 1.3B", "gpt", 24, 2048, 16, 51200, 2048, 512, (2, 4)),
    Model("GPT 13B", "gpt", 40, 5120, 40, 51200, 2048, 1024, (1, 2)),
    Model("GPT 175B", "gpt", 96, 12288, 96, 51200, 2048, 1536, (1,)),
)


def profile_path(model: Model, samples: int, folder: Path = MEASURED) -> Path:
    return folder / f"scaling_{model.name.lower().replace(' ', '_').replace('.', '_')}_{samples}.json"


def measured_samples(model: Model, folder: Path = MEASURED) -> list[int]:
    """Of a minibatch: those that there is a profile of."""
    return [samples for samples in model.samples if profile_path(model, samples, folder).exists()]


def card(folder: Path = MEASURED) -> dict[str, float | str]:
    """What was measured of the card itself."""
    return json.loads((folder / "scaling_card.json").read_text(encoding="utf-8"))


def card_speed(folder: Path = MEASURED) -> float:
    """Operations a second that the card has for large bf16 products, as for `mfu` of `vpipe train`."""
    speed = named_peak(str(card(folder)["device"]), "bf16")
    assert speed is not None
    return speed


def whole_profile(model: Model, samples: int, folder: Path = MEASURED) -> Profile:
    return with_layers(read_profile(profile_path(model, samples, folder)), model.layers)


def with_layers(profile: Profile, layers: int) -> Profile:
    """From the profile of two layers and the head, five blocks: the second half of one layer and the first half of
    the next are repeated."""
    first, middle, (last, head) = profile.blocks[0], profile.blocks[1:3], profile.blocks[3:]
    blocks = (first, *middle * (layers - 1), last, head)
    moved = {3: 2 * layers - 1, 4: 2 * layers}
    tied = [Tie(tie.bytes, tuple(moved.get(block, block) for block in tie.blocks)) for tie in profile.tied]
    return replace(profile, blocks=blocks, tied=tuple(tied), fingerprint="", other_sizes=())
