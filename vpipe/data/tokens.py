"""Flat arrays of tokens: made of documents once and kept, or files that the user has; cut into rows.

A word of such an array is a token's id and two marks: the first token of a document, and a token that is not trained
on (what a user says to an assistant). A user's file has no marks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vpipe.data.chat import Chat
from vpipe.data.records import Conversation, Document, text_of
from vpipe.data.text import data_error
from vpipe.data.tokenizer import content_hash, encode, keep, special_id
from vpipe.system.ownership import is_ours

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ID = (1 << 28) - 1
FIRST = 1 << 28
UNTRAINED = 1 << 29
PADDING = -1
"""A word that stands for no token."""
FORMAT = "words 1"
TOGETHER = 4096
"""Documents that are encoded at once,"""
CHARACTERS = 8 << 20
"""and their characters: the library keeps more of each token than its id."""
SCANNED = 1 << 22
"""Words that are looked at together."""
PROBES = 64
Words = NDArray[Any]
Numbers = NDArray[np.int64]


class TokenRows(Protocol):
    """Samples of equal length, as words."""

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> Numbers: ...


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, cache: Path, chat: Chat | None = None
) -> Words:
    """The words of the documents, one after the other, every text followed by an end token.

    They are made once and then found in `cache`, where they are mapped, not read: ranks of one host share them, and
    they may be larger than memory.
    """
    template = chat.template if chat is not None else None
    file = cache / f"{content_hash(documents, f'{FORMAT} {template} {tokenizer.to_str()}')}.npy"
    kept = _kept(file)
    if kept is None:
        keep(file, "the tokens of the text", lambda path: _write(path, _encoded(documents, tokenizer, chat)))
        kept = _kept(file)
    if kept is None:
        kept = np.concatenate([np.empty(0, np.int32), *_encoded(documents, tokenizer, chat)])
    return kept


def _encoded(documents: Iterable[Document], tokenizer: Tokenizer, chat: Chat | None) -> Iterator[Words]:
    end = special_id(tokenizer, "end")
    for group in _groups(documents):
        texts = [document for document in group if isinstance(document, str)]
        ids_of_texts = encode(tokenizer, texts, together=TOGETHER)
        for document in group:
            if isinstance(document, Conversation):
                chat = chat or Chat(tokenizer, None)
                ids, trained = chat.encode(document)
                words = np.array(ids, np.int32) | np.where(trained, 0, UNTRAINED).astype(np.int32)
            else:
                ids = next(ids_of_texts)
                words = np.array([*ids, end], np.int32)
            if ids:
                words[0] |= FIRST
                yield words


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += len(text_of(document))
        if len(group) == TOGETHER or characters > CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _write(path: Path, parts: Iterable[Words]) -> None:
    """A .npy file whose length is known at the end: the format leaves room for it in the header."""
    with path.open("wb") as file:
        count = 0
        for known in (False, True):
            file.seek(0)
            header = {"descr": "<i4", "fortran_order": False, "shape": (count,)}
            np.lib.format.write_array_header_1_0(file, header)
            if not known:
                for words in parts:
                    file.write(words.astype("<i4").tobytes())
                    count += len(words)


def _kept(file: Path) -> Words | None:
    if os.path.isfile(file) and is_ours(file):
        with suppress(OSError, ValueError, EOFError):  # cut short or damaged: it is made anew
            words = np.load(file, mmap_mode="r")
            if words.dtype == np.int32 and words.ndim == 1:
                return words
    return None


class Windows:
    """Rows of `width` words of an array, one after the other; the remainder at the very end is left out."""

    def __init__(self, words: Words, width: int) -> None:
        self._words = words[: len(words) // width * width].reshape(-1, width)

    def __len__(self) -> int:
        return len(self._words)

    def rows(self, indices: Sequence[int]) -> Numbers:
        return self._words[np.asarray(indices)].astype(np.int64)


class Documents:
    """Rows of one document each, cut to `width` words or filled up."""

    def __init__(self, words: Words, width: int) -> None:
        self._words, self._width = words, width
        blocks = range(0, len(words), SCANNED)
        firsts = [np.flatnonzero(words[start : start + SCANNED] & FIRST) + start for start in blocks]
        self._starts: Numbers = np.concatenate([np.empty(0, np.int64), *firsts])
        self._ends = np.append(self._starts[1:], len(words))

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self, indices: Sequence[int]) -> Numbers:
        made = np.full((len(indices), self._width), PADDING, np.int64)
        for row, index in enumerate(indices):
            found = self._words[self._starts[index] : self._ends[index]][: self._width]
            made[row, : len(found)] = found
        return made


def windows(words: Words, width: int, length: int, path: Path | None) -> Windows:
    """Rows of `width` words of the text at `path`; with what is put around them they have `length`, for messages."""
    made = Windows(words, width)
    if not len(made):
        raise data_error(
            path,
            f"the text has {len(words)} tokens, but one sample takes {width} (sequence_length is "
            f"{length}): give more text or a smaller sequence_length",
        )
    return made


@dataclass(frozen=True, eq=False)
class Chosen:
    """Some of the rows."""

    source: TokenRows
    chosen: Numbers

    def __len__(self) -> int:
        return len(self.chosen)

    def rows(self, indices: Sequence[int]) -> Numbers:
        return self.source.rows(self.chosen[np.asarray(indices)].tolist())


def trained_rows(source: TokenRows, ignored: int) -> TokenRows:
    """The rows in which at least one token is predicted; `ignored` marks a token that is not, beside the first."""
    if not len(source):
        return source
    width = source.rows([0]).shape[1]
    step = max(1, SCANNED // width)
    found = []
    for start in range(0, len(source), step):
        words = source.rows(range(start, min(start + step, len(source))))[:, 1:]
        found.append(start + np.flatnonzero(((words >= 0) & (words & ignored == 0)).any(axis=1)))
    chosen = np.concatenate(found)
    return source if len(chosen) == len(source) else Chosen(source, chosen)


class TokenFiles:
    """Windows of the user's files of ids, which are mapped: they may be larger than memory.

    Ids are compared with the vocabulary when they are read, some of each file at the beginning. `end`, if given, ends
    each document.
    """

    def __init__(
        self,
        path: Path,
        files: Sequence[Path],
        kind: str | None,
        vocab_size: int,
        width: int,
        end: int | None,
    ) -> None:
        """`kind` is the type of the tokens; None: the smallest for the vocabulary."""
        self._path, self._files, self._guessed = path, files, kind is None
        self._kind = kind or ("uint16" if vocab_size <= 1 << 16 else "uint32")
        self._vocab_size, self._width, self._end = vocab_size, width, end
        self._windows = [Windows(self._mapped(file), width) for file in files]
        self._until = np.cumsum([len(windows) for windows in self._windows])
        if not self._until[-1]:
            raise data_error(
                path, f"no file has the {width} tokens of a sample: give more, or a smaller sequence_length"
            )
        for holder, windows in enumerate(self._windows):
            if len(windows):
                probes = np.unique(np.linspace(0, len(windows) - 1, PROBES).astype(np.int64))
                self._checked(holder, probes)

    def __len__(self) -> int:
        return int(self._until[-1])

    def rows(self, indices: Sequence[int]) -> Numbers:
        numbers = np.asarray(indices)
        holders = np.searchsorted(self._until, numbers, side="right")
        made = np.empty((len(numbers), self._width), np.int64)
        for holder in np.unique(holders):
            here = np.flatnonzero(holders == holder)
            before = self._until[holder - 1] if holder else 0
            made[here] = self._checked(int(holder), numbers[here] - before)
        if self._end is not None:
            first = made[:, :-1] == self._end
            if first.all(axis=1).any():
                raise data_error(
                    self._path,
                    f"sample {numbers[first.all(axis=1).argmax()]} holds end tokens alone: leave them out of the files",
                )
            made[:, 1:] |= np.where(first, FIRST, 0)
        return made

    def _checked(self, holder: int, numbers: Numbers) -> Numbers:
        ids = self._windows[holder].rows(numbers.tolist())
        if ids.max() >= self._vocab_size:
            row, column = np.argwhere(ids >= self._vocab_size)[0]
            raise data_error(
                self._path,
                f"{self._files[holder]}, token {numbers[row] * self._width + column} is {ids[row, column]} as "
                f"{self._kind}, but vocab_size is {self._vocab_size}: set it to that of the tokenizer that made the "
                "file, or set token_type",
            )
        return ids

    def _mapped(self, file: Path) -> Words:
        dtype = np.dtype(self._kind).newbyteorder("<")
        try:
            size = file.stat().st_size
            if size % dtype.itemsize or not size:
                raise data_error(
                    self._path,
                    f"{file} has {size} bytes, which is no whole number of tokens of {self._kind}: write it anew, or "
                    "set token_type",
                )
            words = np.memmap(file, dtype, mode="r")
        except OSError as error:
            raise data_error(self._path, f"{file} cannot be read: {error.strerror}") from None
        begin = words[: 2 * PROBES]
        if self._guessed and dtype.itemsize == 2 and len(begin) > 8 and not begin[1::2].any():
            raise data_error(
                self._path, f"every second token of {file} is 0 as uint16: set token_type: uint32"
            )
        return words
