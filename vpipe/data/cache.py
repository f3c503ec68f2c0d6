"""What is made of a text once and then found by its content: its tokenizer, and its tokens."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from vpipe.errors import VPipeError


def content_hash(documents: Sequence[str], made_with: str) -> str:
    """The name of what was made of these documents with these settings."""
    digest = hashlib.sha256(made_with.encode())
    for document in documents:
        raw = document.encode()
        digest.update(f" {len(raw)} ".encode())
        digest.update(raw)
    return digest.hexdigest()


def keep(file: Path, what: str, write: Callable[[Path], object]) -> None:
    """Have `write` make the file, whole or not at all.

    All ranks of a run may be here at once: each writes a file of its own, and all of them are the same.
    """
    partial = file.with_name(f"{file.stem}.{uuid.uuid4().hex}{file.suffix}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        os.replace(partial, file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise VPipeError(f"{what} cannot be kept in {file.parent}: {error.strerror}") from None
