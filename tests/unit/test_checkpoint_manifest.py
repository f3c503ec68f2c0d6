"""The manifest of a checkpoint, and the files that it names."""

from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from tests.drawing import draws
from vpipe import checkpoint
from vpipe.checkpoint import manifest
from vpipe.checkpoint.files import sha256, write_tensors
from vpipe.checkpoint.manifest import FileEntry, Manifest

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(extra=st.dictionaries(st.text(), json_values, max_size=4), updates=st.integers(0, 10**12))
@draws(50)
def test_a_manifest_is_read_as_it_was_written(tmp_path: Path, extra: dict[str, Any], updates: int) -> None:
    entry = FileEntry(size=3, sha256="0" * 64, tensors=["model.a"])
    written = Manifest(
        updates=updates, layout={}, files={"stage-000.safetensors": entry}, state=extra, extra=extra
    )
    manifest.write_manifest(tmp_path, written)
    assert checkpoint.read_manifest(tmp_path) == written


def test_every_type_of_tensor_is_read_by_safetensors_as_it_was(tmp_path: Path) -> None:
    random = torch.randn(3, 5)
    tensors = {
        **{
            str(dtype): random.to(dtype)
            for dtype in (
                torch.float64,
                torch.float32,
                torch.float16,
                torch.bfloat16,
                torch.int64,
                torch.int32,
            )
        },
        "bytes": torch.arange(7, dtype=torch.uint8),
        "flags": random > 0,
        "empty": torch.empty(0, 3),
        "single": torch.tensor(2.5),
        "turned": random.t(),
        "größe": random,
    }
    path = tmp_path / "some.safetensors"
    size, digest = write_tensors(path, tensors, {"key": "välue"})
    assert (size, digest) == (path.stat().st_size, sha256(path))
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"key": "välue"}
