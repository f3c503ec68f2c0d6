"""Samples: windows of text for language models, masked ones for BERT, pairs of texts, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vpipe.data.dataset import IGNORED, Batch, Use, stream
from vpipe.data.tokenizer import encode, special_id, special_ids
from vpipe.data.tokens import FIRST, ID, PADDING, UNTRAINED, Numbers, TokenRows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = NDArray[np.int32]
MASKED_SHARE = 0.15
"""Share of a sample's tokens that has labels. Of these:"""
HIDDEN = 0.8
"""are replaced by [MASK],"""
REPLACED = 0.1
"""by another token at random; the others stay."""


@dataclass(frozen=True, eq=False)
class CausalText:
    """TokenRows of text; the model itself moves the labels by one.

    With `separate` the documents of a row know nothing of each other: positions begin anew with each, from which the
    model makes its mask, and the first token of a document is not predicted from the document before it. With `padded`
    rows may end before their length. Otherwise no mask is given: attention that is only causal is faster.
    """

    rows: TokenRows
    separate: bool = False
    padded: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        words = self.rows.rows(indices)
        ids = np.where(words == PADDING, 0, words & ID)
        labels = np.where((words == PADDING) | (words & UNTRAINED != 0), IGNORED, ids)
        if self.padded:
            return _fields(ids, attention_mask=(words != PADDING).astype(np.int64), labels=labels)
        if not self.separate:
            return _fields(ids, labels=labels)
        first = words & FIRST != 0
        first[:, 0] = True
        places = np.arange(words.shape[1])
        positions = places - np.maximum.accumulate(np.where(first, places, 0), axis=1)
        return _fields(ids, position_ids=positions, labels=np.where(first, IGNORED, labels))


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
        return _fields(ids, attention_mask=mask, labels=labels)


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

    rows: TokenRows
    begin: int
    end: int
    mask: int
    ordinary: Tokens
    """The ids of text, of which random ones are drawn."""
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        rows = self.rows.rows(indices) & ID
        masked = (self._masked(ids, sample, epoch) for ids, sample in zip(rows, indices, strict=True))
        ids, labels = map(np.stack, zip(*masked, strict=True))
        ids = np.pad(ids, ((0, 0), (1, 1)), constant_values=((0, 0), (self.begin, self.end)))
        labels = np.pad(labels, ((0, 0), (1, 1)), constant_values=IGNORED)
        return _fields(ids, labels=labels)

    def _masked(self, ids: Numbers, sample: int, epoch: int) -> tuple[Numbers, Numbers]:
        """The ids as they are shown, and the labels."""
        random = stream(Use.MASKING, self.seed, epoch, sample)
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


def masked_text(rows: TokenRows, tokenizer: Tokenizer, seed: int) -> MaskedText:
    """TokenRows of text between [CLS] and [SEP], which are not in them."""
    specials = special_ids(tokenizer)
    return MaskedText(
        rows,
        begin=special_id(tokenizer, "begin"),
        end=special_id(tokenizer, "end"),
        mask=special_id(tokenizer, "mask"),
        ordinary=np.array(sorted(set(tokenizer.get_vocab().values()) - specials), np.int32),
        seed=seed,
    )


def _fields(ids: Numbers, **others: Numbers) -> Batch:
    return {name: torch.from_numpy(values) for name, values in {"input_ids": ids, **others}.items()}
