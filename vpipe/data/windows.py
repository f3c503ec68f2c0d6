"""Documents as one row of tokens, cut into windows of equal width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vpipe.data.text import describe
from vpipe.data.tokenizer import special_id
from vpipe.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = NDArray[np.int32]
TOGETHER = 8
"""Documents that are encoded at once: what the library keeps of each token besides its id is soon freed."""


def windows(
    documents: Sequence[str], tokenizer: Tokenizer, width: int, length: int, path: Path | None
) -> Tokens:
    """(samples, width): every document followed by an end token, the remainder at the very end left out."""
    end = special_id(tokenizer, "end")
    parts: list[Tokens] = []
    for first in range(0, len(documents), TOGETHER):
        group = list(documents[first : first + TOGETHER])
        encoded = (text.ids for text in tokenizer.encode_batch_fast(group, add_special_tokens=False))
        parts += [np.array([*ids, end], np.int32) for ids in encoded if ids]
    found = sum(map(len, parts))
    if found < width:
        raise ConfigError(
            f"{describe(path)}: the text has {found} tokens, but one sample takes {width} (sequence_length is "
            f"{length}): give more text or a smaller sequence_length"
        )
    return np.concatenate(parts)[: found - found % width].reshape(-1, width)
