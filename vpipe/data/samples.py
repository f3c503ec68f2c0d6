"""Samples: windows of text for language models, masked ones for BERT, pairs of texts, and random ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vpipe.data.dataset import IGNORED, Batch, Use, stream
from vpipe.data.text import data_error
from vpipe.data.tokenizer import content_hash, encode, keep, special_id, special_ids
from vpipe.errors import ConfigError
from vpipe.system.ownership import is_ours

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = NDArray[np.int32]
MASKED_SHARE = 0.15
"""Share of a sample's tokens that has labels. Of these:"""
HIDDEN = 0.8
"""are replaced by [MASK],"""
REPLACED = 0.1
"""by another token at random; the others stay."""
SHORTEST_MASKED = 4
"""[CLS], two tokens, [SEP]: of two neighbours at least one is a token of the text."""


@dataclass(frozen=True, eq=False)
class CausalText:
    """Neighbouring windows of the text; the model itself moves the labels by one."""

    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        ids = self.tokens[list(indices)].astype(np.int64)
        return _fields(ids, np.ones_like(ids), ids.copy())


def causal_text(tokens: Tokens, length: int, path: Path | None) -> CausalText:
    """Windows of `length` tokens of the text at `path` (for messages)."""
    return CausalText(_windows(tokens, length, length, path))


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
        return _fields(ids, mask, labels)


def translation_pairs(texts: Sequence[tuple[str, str]], tokenizer: Tokenizer, length: int) -> Pairs:
    """Each side cut to `length` tokens, the end token included."""
    end = special_id(tokenizer, "end")

    def rows(side: list[str]) -> list[Tokens]:
        return [
            np.array([*ids[: length - 1], end], np.int32) for ids in encode(tokenizer, side, together=4096)
        ]

    sources, targets = rows([source for source, _ in texts]), rows([target for _, target in texts])
    return Pairs(sources, targets, length, special_id(tokenizer, "pad"))


@dataclass(frozen=True, eq=False)
class Synthetic:
    """Random batches, for throughput runs: `make_batch` takes a number of samples and a seed.

    A batch is drawn at once, from (seed, epoch, its first sample): sample by sample it would take longer
    than some models do.
    """

    make_batch: Callable[[int, int], Batch]
    samples: int
    seed: int

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        drawn = stream(Use.SYNTHETIC, self.seed, epoch, indices[0]).integers(1 << 62)
        return self.make_batch(len(indices), int(drawn))


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
        ids, labels = map(np.stack, zip(*(self._masked(sample, epoch) for sample in indices), strict=True))
        ids = np.pad(ids, ((0, 0), (1, 1)), constant_values=((0, 0), (self.begin, self.end)))
        labels = np.pad(labels, ((0, 0), (1, 1)), constant_values=IGNORED)
        return _fields(ids, np.ones_like(ids), labels)

    def _masked(self, sample: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids as they are shown, and the labels."""
        random = stream(Use.MASKING, self.seed, epoch, sample)
        ids = self.tokens[sample].astype(np.int64)
        labels = np.full_like(ids, IGNORED)
        candidates = np.flatnonzero(ids != self.end)
        # An exact share, not a chance for each token: minibatches then weigh the same, and none has no label.
        count = max(1, round(MASKED_SHARE * len(candidates)))
        chosen = random.choice(candidates, count, replace=False)
        labels[chosen] = ids[chosen]
        draw = random.random(count)
        other = self.ordinary[random.integers(len(self.ordinary), size=count)]
        ids[chosen] = np.where(
            draw < HIDDEN, self.mask, np.where(draw < HIDDEN + REPLACED, other, ids[chosen])
        )
        return ids, labels


def masked_text(
    tokens: Tokens, tokenizer: Tokenizer, length: int, seed: int, path: Path | None
) -> MaskedText:
    """Windows of the text at `path` (for messages) with `length` tokens each, [CLS] and [SEP] included."""
    if length < SHORTEST_MASKED:
        raise ConfigError(f"sequence_length is {length}: give {SHORTEST_MASKED} or more")
    specials = special_ids(tokenizer)
    return MaskedText(
        _windows(tokens, length - 2, length, path),
        begin=special_id(tokenizer, "begin"),
        end=special_id(tokenizer, "end"),
        mask=special_id(tokenizer, "mask"),
        ordinary=np.array(sorted(set(tokenizer.get_vocab().values()) - specials), np.int32),
        seed=seed,
    )


def _windows(tokens: Tokens, width: int, length: int, path: Path | None) -> Tokens:
    """(samples, width): the remainder at the very end is left out."""
    found = len(tokens)
    if found < width:
        raise data_error(
            path,
            f"the text has {found} tokens, but one sample takes {width} (sequence_length is "
            f"{length}): give more text or a smaller sequence_length",
        )
    return tokens[: found - found % width].reshape(-1, width)


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer, cache: Path) -> Tokens:
    """The text's tokens, every document followed by an end token.

    They are made once and then found in `cache`, where they are mapped, not read: ranks of one host share them.
    """
    file = cache / f"{content_hash(documents, tokenizer.to_str())}.npy"
    if os.path.isfile(file) and is_ours(file):
        with suppress(OSError, ValueError, EOFError):  # cut short or damaged: it is made anew below
            tokens = np.load(file, mmap_mode="r")
            if tokens.dtype == np.int32 and tokens.ndim == 1:
                return tokens
    end = special_id(tokenizer, "end")
    parts = [np.array([*ids, end], np.int32) for ids in encode(tokenizer, documents, together=8) if ids]
    tokens = np.concatenate([np.empty(0, np.int32), *parts])
    keep(file, "the tokens of the text", lambda path: np.save(path, tokens))
    return tokens


def _fields(ids: NDArray[np.int64], mask: NDArray[np.int64], labels: NDArray[np.int64]) -> Batch:
    fields = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: torch.from_numpy(values) for name, values in fields.items()}
