"""Masked text for BERT: 15 % of the tokens are asked for, chosen anew in each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vpipe.data.dataset import IGNORED, Batch
from vpipe.data.streams import Use, stream
from vpipe.data.tokenizer import special_id, special_ids
from vpipe.data.windows import Tokens, windows
from vpipe.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ASKED = 0.15
"""Share of a sample's tokens that has labels. Of these:"""
HIDDEN = 0.8
"""are replaced by [MASK],"""
REPLACED = 0.1
"""by another token at random; the others stay."""
SHORTEST = 4
"""[CLS], two tokens, [SEP]: of two neighbours at least one is a token of the text."""


@dataclass(frozen=True, eq=False)
class MaskedText:
    """[CLS] tokens [SEP] in each sample; the masks depend on seed, epoch and sample alone."""

    tokens: Tokens
    begin: int
    end: int
    mask: int
    ordinary: Tokens
    """The ids of text, of which random ones are drawn."""
    seed: int

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        inner = [self._masked(sample, epoch) for sample in indices]
        ids = np.stack([ids for ids, _ in inner])
        labels = np.stack([labels for _, labels in inner])
        ids = np.pad(ids, ((0, 0), (1, 1)), constant_values=((0, 0), (self.begin, self.end)))
        labels = np.pad(labels, ((0, 0), (1, 1)), constant_values=IGNORED)
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.ones(ids.shape, dtype=torch.int64),
            "labels": torch.from_numpy(labels),
        }

    def _masked(self, sample: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids as they are shown, and the labels."""
        random = stream(Use.MASKING, self.seed, epoch, sample)
        ids = self.tokens[sample].astype(np.int64)
        labels = np.full_like(ids, IGNORED)
        candidates = np.flatnonzero(ids != self.end)
        # An exact share, not a chance for each token: minibatches then weigh the same, and none has no label.
        count = max(1, round(ASKED * len(candidates)))
        asked = random.choice(candidates, count, replace=False)
        labels[asked] = ids[asked]
        fate = random.random(count)
        other = self.ordinary[random.integers(len(self.ordinary), size=count)]
        shown = np.where(fate < HIDDEN, self.mask, np.where(fate < HIDDEN + REPLACED, other, ids[asked]))
        ids[asked] = shown
        return ids, labels


def masked_text(
    documents: Sequence[str],
    tokenizer: Tokenizer,
    length: int,
    seed: int,
    path: Path | None,
    cache: Path | None = None,
) -> MaskedText:
    """Windows of the text at `path` (for messages) with `length` tokens each, [CLS] and [SEP] included."""
    if length < SHORTEST:
        raise ConfigError(f"sequence_length is {length}: give {SHORTEST} or more")
    specials = special_ids(tokenizer)
    return MaskedText(
        windows(documents, tokenizer, length - 2, length, path, cache),
        begin=special_id(tokenizer, "begin"),
        end=special_id(tokenizer, "end"),
        mask=special_id(tokenizer, "mask"),
        ordinary=np.array(sorted(set(tokenizer.get_vocab().values()) - specials), np.int32),
        seed=seed,
    )
