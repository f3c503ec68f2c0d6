"""Documents as one row of tokens, cut into windows of equal width."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vpipe.data.cache import content_hash, keep
from vpipe.data.text import describe
from vpipe.data.tokenizer import encode, special_id
from vpipe.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = NDArray[np.int32]
TOGETHER = 8
"""Documents that are encoded at once: what the library keeps of each token besides its id is soon freed."""


def windows(
    documents: Sequence[str],
    tokenizer: Tokenizer,
    width: int,
    length: int,
    path: Path | None,
    cache: Path | None = None,
) -> Tokens:
    """(samples, width): every document followed by an end token, the remainder at the very end left out.

    With a `cache` the text is encoded once, whatever the width, and then found there.
    """
    tokens = _encode(documents, tokenizer) if cache is None else _cached(documents, tokenizer, cache)
    found = len(tokens)
    if found < width:
        raise ConfigError(
            f"{describe(path)}: the text has {found} tokens, but one sample takes {width} (sequence_length is "
            f"{length}): give more text or a smaller sequence_length"
        )
    return tokens[: found - found % width].reshape(-1, width)


def _cached(documents: Sequence[str], tokenizer: Tokenizer, cache: Path) -> Tokens:
    """Mapped, not read: ranks of one host share it."""
    file = cache / f"{content_hash(documents, tokenizer.to_str())}.npy"
    if os.path.isfile(file):
        with suppress(OSError, ValueError, EOFError):  # cut short or damaged: it is made anew below
            tokens = np.load(file, mmap_mode="r")
            if tokens.dtype == np.int32 and tokens.ndim == 1:
                return tokens
    tokens = _encode(documents, tokenizer)
    keep(file, "the tokens of the text", lambda path: np.save(path, tokens))
    return tokens


def _encode(documents: Sequence[str], tokenizer: Tokenizer) -> Tokens:
    end = special_id(tokenizer, "end")
    parts: list[Tokens] = [np.empty(0, np.int32)]
    for first in range(0, len(documents), TOGETHER):
        group = documents[first : first + TOGETHER]
        parts += [np.array([*ids, end], np.int32) for ids in encode(tokenizer, group) if ids]
    return np.concatenate(parts)
