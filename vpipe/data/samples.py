"""Samples for language models (windows of text), for translation (pairs of texts), and random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vpipe.data.dataset import IGNORED, Batch
from vpipe.data.streams import Use, stream
from vpipe.data.tokenizer import encode, special_id
from vpipe.data.windows import Tokens, windows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOGETHER = 4096
"""Texts of pairs that are encoded at once."""


@dataclass(frozen=True, eq=False)
class CausalText:
    """Neighbouring windows of the text; the model itself moves the labels by one."""

    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        ids = torch.from_numpy(self.tokens[list(indices)].astype(np.int64))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def causal_text(
    documents: Sequence[str],
    tokenizer: Tokenizer,
    length: int,
    path: Path | None,
    cache: Path | None = None,
) -> CausalText:
    """Windows of `length` tokens of the text at `path` (for messages)."""
    return CausalText(windows(documents, tokenizer, length, length, path, cache))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Two texts in each sample, both with an end token and filled up to the same length."""

    sources: Sequence[Tokens]
    targets: Sequence[Tokens]
    length: int
    pad: int

    def __len__(self) -> int:
        return len(self.sources)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        shape = (len(indices), self.length)
        ids, mask, labels = (np.full(shape, value, np.int64) for value in (self.pad, 0, IGNORED))
        for row, sample in enumerate(indices):
            source, target = self.sources[sample], self.targets[sample]
            ids[row, : len(source)] = source
            mask[row, : len(source)] = 1
            labels[row, : len(target)] = target
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(labels),
        }


def translation_pairs(texts: Sequence[tuple[str, str]], tokenizer: Tokenizer, length: int) -> Pairs:
    """Each side cut to `length` tokens, the end token included."""
    sources = _encode([source for source, _ in texts], tokenizer, length)
    targets = _encode([target for _, target in texts], tokenizer, length)
    return Pairs(sources, targets, length, special_id(tokenizer, "pad"))


def _encode(texts: Sequence[str], tokenizer: Tokenizer, length: int) -> list[Tokens]:
    end = special_id(tokenizer, "end")
    rows: list[Tokens] = []
    for first in range(0, len(texts), TOGETHER):
        group = encode(tokenizer, texts[first : first + TOGETHER])
        rows += [np.array([*ids[: length - 1], end], np.int32) for ids in group]
    return rows


@dataclass(frozen=True, eq=False)
class Synthetic:
    """A data set that a function makes up from indices and epoch."""

    make: Callable[[Sequence[int], int], Batch]
    size: int

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        return self.make(indices, epoch)


def synthetic(make_batch: Callable[[int, int], Batch], samples: int, seed: int) -> Synthetic:
    """Random batches, for throughput runs: `make_batch` takes a number of samples and a seed.

    A batch is drawn at once, from (seed, epoch, its first sample): sample by sample it would take longer
    than some models do.
    """

    def make(indices: Sequence[int], epoch: int) -> Batch:
        drawn = stream(Use.SYNTHETIC, seed, epoch, indices[0]).integers(1 << 62)
        return make_batch(len(indices), int(drawn))

    return Synthetic(make, samples)
