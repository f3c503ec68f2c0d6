"""NVIDIA's BERT shards: HDF5 files of samples whose masks were chosen when they were written."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vpipe.data.dataset import IGNORED, Batch
from vpipe.data.text import data_error, list_files
from vpipe.errors import ConfigError

SUFFIXES = (".h5", ".hdf5")
COLUMNS = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
LIKE = {"input_mask": "input_ids", "segment_ids": "input_ids", "masked_lm_ids": "masked_lm_positions"}
"""Columns of equal shape."""
FLAGS = (("input_mask", 1), ("segment_ids", 1), ("next_sentence_labels", 1))
Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shards:
    """Samples of several files, one after the other.

    The files stay on disk, as they may be larger than memory: a batch opens those that it reads from.
    """

    path: Path
    files: Sequence[Path]
    ends: Numbers
    """The number of samples up to the end of each file."""
    vocab_size: int
    next_sentence: bool

    def __len__(self) -> int:
        return int(self.ends[-1])

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        rows = self._rows(np.asarray(indices))
        tokens = np.concatenate([rows["input_ids"].ravel(), rows["masked_lm_ids"].ravel()])
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            wrong = tokens.max() if tokens.max() >= self.vocab_size else tokens.min()
            raise data_error(
                self.path,
                f"there is a token {wrong}, but vocab_size is {self.vocab_size}: set it "
                "to that of the shards' tokenizer",
            )
        for name, most in (("masked_lm_positions", rows["input_ids"].shape[1] - 1), *FLAGS):
            self._check_range(name, rows[name], most)
        labels = place_labels(rows["input_ids"].shape, rows["masked_lm_positions"], rows["masked_lm_ids"])
        batch = {
            "input_ids": torch.from_numpy(rows["input_ids"]),
            "attention_mask": torch.from_numpy(rows["input_mask"]),
            "token_type_ids": torch.from_numpy(rows["segment_ids"]),
            "labels": torch.from_numpy(labels),
        }
        if self.next_sentence:
            batch["next_sentence_label"] = torch.from_numpy(rows["next_sentence_labels"])
        return batch

    def _check_range(self, name: str, numbers: Numbers, most: int) -> None:
        outside = numbers[(numbers < 0) | (numbers > most)]
        if len(outside):
            raise data_error(
                self.path, f"{name} holds {outside[0]}, but it goes from 0 to {most}: write the shards anew"
            )

    def _rows(self, indices: Numbers) -> dict[str, Numbers]:
        """The samples' rows of every column, in the order of the indices."""
        rows: dict[str, Numbers] = {}
        holders = np.searchsorted(self.ends, indices, side="right")
        for holder in np.unique(holders):
            here = np.flatnonzero(holders == holder)
            first = self.ends[holder - 1] if holder else 0
            # HDF5 reads rows in rising order only, and each once.
            wanted, back = np.unique(indices[here] - first, return_inverse=True)
            with _opened(self.files[holder], self.path) as shard:
                for name in COLUMNS:
                    found = np.asarray(shard[name][wanted], np.int64)[back]
                    rows.setdefault(name, np.empty((len(indices), *found.shape[1:]), np.int64))[here] = found
        return rows


def place_labels(shape: tuple[int, ...], positions: Numbers, tokens: Numbers) -> Numbers:
    """Labels beside the ids; a position of zero, where [CLS] stands, ends the list of masked ones."""
    labels = np.full(shape, IGNORED, np.int64)
    used = np.logical_and.accumulate(positions != 0, axis=1)
    rows, _ = np.nonzero(used)
    labels[rows, positions[used]] = tokens[used]
    return labels


def has_shards(path: Path | None) -> bool:
    """Whether the data are such files, and not text."""
    return path is not None and any(file.suffix in SUFFIXES for file in list_files(path))


def read_shards(path: Path, length: int, vocab_size: int, next_sentence: bool = False) -> Shards:
    """The shards of a file or folder; with labels for the next sentence where the model reads them."""
    files = [file for file in list_files(path) if file.suffix in SUFFIXES]
    if not files:
        raise data_error(path, f"it has no {' or '.join(SUFFIXES)} file: put shards there")
    ends = np.cumsum([_count(file, path, length) for file in files])
    if not ends[-1]:
        raise data_error(path, "its shards hold no samples: put others there")
    return Shards(path, files, ends, vocab_size, next_sentence)


def _count(file: Path, path: Path, length: int) -> int:
    """The samples of a file that is as it must be."""
    with _opened(file, path) as shard:
        shapes = {name: shard[name].shape for name in COLUMNS if name in shard}
    wrong = _wrong_shapes(shapes, length)
    if wrong:
        raise data_error(path, f"{file} has {wrong}")
    return int(shapes["input_ids"][0])


def _wrong_shapes(shapes: dict[str, tuple[int, ...]], length: int) -> str:
    """What a file has that no shard has, and what to do; empty if nothing is wrong."""
    missing = [name for name in COLUMNS if name not in shapes]
    if missing:
        return f"no {', '.join(missing)}: it is no BERT shard"
    if len(shapes["input_ids"]) != 2 or not all(shapes.values()):
        return "no rows of tokens in input_ids: it is no BERT shard"
    samples, width = shapes["input_ids"]
    for name, shape in shapes.items():
        if shape[0] != samples:
            return f"{samples} rows of input_ids, but {shape[0]} of {name}: write it anew"
        like = shapes[LIKE.get(name, name)]
        if shape != like:
            return f"{LIKE[name]} of shape {like}, but {name} of {shape}: write it anew"
    if width != length:
        return f"samples of {width} tokens, but sequence_length is {length}: set it to {width}"
    return ""


@contextmanager
def _opened(file: Path, path: Path) -> Iterator[Any]:
    try:
        h5py = importlib.import_module("h5py")
    except ImportError:
        raise data_error(
            path, f"{file} is an HDF5 file, and h5py is not installed: pip install h5py"
        ) from None
    try:
        with h5py.File(file, "r") as shard:
            yield shard
    except ConfigError:
        raise
    except Exception as error:  # a damaged file makes the library raise almost anything
        reason = " ".join(str(error).split())[:200]
        raise data_error(path, f"{file} cannot be read as HDF5: {reason}") from None
