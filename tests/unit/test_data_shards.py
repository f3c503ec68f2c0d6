"""NVIDIA's shards: rows found across files, labels put beside their tokens, every mistake named."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from vpipe.data import has_shards, read_shards
from vpipe.data.shards import COLUMNS, place_labels
from vpipe.errors import ConfigError

Columns = dict[str, Any]
Write = Callable[[Path, Columns], None]


class File(dict[str, Any]):
    """As much of `h5py.File` as is used, on files of numpy's."""

    def __init__(self, path: Path, mode: str) -> None:
        assert mode == "r"
        try:
            super().__init__(np.load(path))
        except ValueError:
            raise OSError("file signature not found") from None

    def __enter__(self) -> "File":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()


def write_numpy(path: Path, columns: Columns) -> None:
    with path.open("wb") as file:
        np.savez(file, **columns)


def write_hdf5(path: Path, columns: Columns) -> None:
    with importlib.import_module("h5py").File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values, compression="gzip")


@pytest.fixture(params=["stand-in", "h5py"])
def write(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a shard that the reader reads, with the real h5py too where it is installed."""
    if request.param == "h5py":
        pytest.importorskip("h5py", reason="h5py is not installed: pip install h5py")
        return write_hdf5
    monkeypatch.setitem(sys.modules, "h5py", type(sys)("h5py"))
    monkeypatch.setattr(sys.modules["h5py"], "File", File, raising=False)
    return write_numpy


def columns(samples: int, first: int) -> Columns:
    """Samples of six tokens, numbered from `first` at their second place; sample n is masked at 2 (n odd: and 4)."""
    numbers = np.arange(first, first + samples)
    ids = np.tile(np.array([2, 0, 4, 9, 9, 3], np.int32), (samples, 1))
    ids[:, 1] = numbers
    positions = np.array([[2, 4, 0] if number % 2 else [2, 0, 0] for number in numbers], np.int32)
    values: tuple[Any, ...] = (
        ids,
        np.ones((samples, 6), np.int8),
        np.tile(np.array([0, 0, 0, 1, 1, 1], np.int8), (samples, 1)),
        positions.reshape(samples, 3),
        np.tile(np.array([11, 12, 0], np.int32), (samples, 1)),
        (numbers % 2).astype(np.int8),
    )
    return dict(zip(COLUMNS, values, strict=True))


def test_rows_across_files(tmp_path: Path, write: Write) -> None:
    for name, samples, first in (("a.h5", 3, 20), ("b.hdf5", 0, 0), ("c.h5", 4, 23)):
        write(tmp_path / name, columns(samples, first))
    (tmp_path / "README").write_text("not a shard")
    assert has_shards(tmp_path)
    dataset = read_shards(tmp_path, 6, 100, next_sentence=True)
    assert len(dataset) == 7
    batch = dataset.batch([6, 0, 3, 0], epoch=1)
    assert batch["input_ids"][:, 1].tolist() == [26, 20, 23, 20]
    assert batch["labels"].tolist() == [
        [-100, -100, 11, -100, -100, -100],
        [-100, -100, 11, -100, -100, -100],
        [-100, -100, 11, -100, 12, -100],
        [-100, -100, 11, -100, -100, -100],
    ]
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["attention_mask"].tolist() == [[1] * 6] * 4
    assert batch["next_sentence_label"].tolist() == [0, 0, 1, 0]
    assert {str(tensor.dtype) for tensor in batch.values()} == {"torch.int64"}
    assert "next_sentence_label" not in read_shards(tmp_path, 6, 100).batch([0], 0)


def test_all_positions_may_be_used() -> None:
    labels = place_labels((1, 4), np.array([[3, 1]]), np.array([[7, 8]]))
    assert labels.tolist() == [[-100, 8, -100, 7]]


def test_mistakes(tmp_path: Path, write: Write) -> None:
    def mistake(change: Columns | None = None, length: int = 6, vocab_size: int = 100) -> str:
        written = {**columns(2, 20), **(change or {})}
        write(tmp_path / "a.h5", {name: values for name, values in written.items() if values is not None})
        with pytest.raises(ConfigError) as raised:
            read_shards(tmp_path, length, vocab_size).batch([0, 1], 0)
        message = str(raised.value)
        assert message.startswith(f"data_dir is {str(tmp_path)!r}: ")
        return message

    assert "has samples of 6 tokens, but sequence_length is 8: set it to 6" in mistake(length=8)
    assert "there is a token 21, but vocab_size is 21" in mistake(vocab_size=21)
    assert "has no masked_lm_ids: it is no BERT shard" in mistake({"masked_lm_ids": None})
    assert "has 2 rows of input_ids, but 1 of input_mask" in mistake({"input_mask": np.ones((1, 6))})
    assert "its shards hold no samples" in mistake(columns(0, 0))
    (tmp_path / "a.h5").write_text("text")
    with pytest.raises(ConfigError, match=r"a.h5 cannot be read as HDF5: .*file signature not found"):
        read_shards(tmp_path, 6, 100)


def test_text_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert not has_shards(tmp_path)
    assert not has_shards(None)
    with pytest.raises(ConfigError, match=r"it has no .h5 or .hdf5 file"):
        read_shards(tmp_path, 6, 100)


def test_without_h5py_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.h5").write_text("")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(
        ConfigError, match=r"a.h5 is an HDF5 file, and h5py is not installed: pip install h5py"
    ):
        read_shards(tmp_path, 6, 100)
