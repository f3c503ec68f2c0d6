"""Rows 24 and 25 of docs/reliability.md: data and partitions that are not as they should be."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples import example, varied
from tests.unit.test_data_shards import columns
from vpipe import Pipeline
from vpipe.config.derived import known_blocks
from vpipe.config.file import read_config
from vpipe.data import Batches, Sampler, read_documents, read_shards, split
from vpipe.errors import ConfigError, VPipeError
from vpipe.graph import capture
from vpipe.pipeline.threads import run_ranks
from vpipe.train.datasets import make_datasets
from vpipe.train.models import build_model
from vpipe.weights import optimizer_factory

pytestmark = pytest.mark.usefixtures("capture_once")
launching = importlib.import_module("vpipe.train.launcher")


def train(data: Any, ranks: int = 2, **options: Any) -> list[list[tuple[int, float]]]:
    """Each rank's losses. `data` may be a function that is called on each."""
    model, batch, loss_fn = example("sequential", layers=4)

    def work(world: Any) -> list[tuple[int, float]]:
        with Pipeline(
            model, batch, optimizer=optimizer_factory("sgd", 0.05), loss_fn=loss_fn, world=world, **options
        ) as pipe:
            return list(pipe.train(data() if callable(data) else data))

    return run_ranks(ranks, work)


# Row 24


@pytest.mark.parametrize(
    ("raw", "message"),
    [(b"", "it holds no text"), (b" \n\n", "it holds no text"), (b"abc\xff\xfe", "is not UTF-8 .byte 3 is 0xff"),
     (b"abc\0def", "is binary .byte 3 is zero"), (b"a few words", "but one sample takes")],
)  # fmt: skip
def test_row_24_text_that_is_none(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "text.txt").write_bytes(raw)
    (tmp_path / "run.yml").write_text("data_dir: text.txt\nnum_layers: 1\nhidden_size: 16\n")
    config = read_config(tmp_path / "run.yml")
    model = build_model(config, "meta").model
    with pytest.raises(ConfigError, match=message) as caught:
        make_datasets(config, model, tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_row_24_fewer_samples_than_a_minibatch() -> None:
    """A minibatch of what there is, in every epoch."""
    sampler = Sampler(3, batch_size=8, seed=0)
    assert sampler.minibatches_per_epoch == 1
    assert [len(sampler.minibatch(number)[1]) for number in range(3)] == [3, 3, 3]
    _, batch, _ = example("sequential", layers=4)
    small = type(batch)(part[:3] for part in batch)
    losses = train([small, small], schedule="pipedream")
    assert losses[0] == losses[1]
    assert [update for update, _ in losses[0]] == [0, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_row_24_the_end_in_mid_step(schedule: str) -> None:
    """Six minibatches in updates of four: the second update has two, on every rank."""
    _, batch, _ = example("sequential", layers=4)
    losses = train(varied(batch, 6), schedule=schedule, minibatches=4)
    assert losses[0] == losses[1]
    assert [update for update, _ in losses[0]] == [0, 1]
    # The same as if the two had been requested: the first four make an update of their own.
    assert losses[0][0] == train(varied(batch, 4), schedule=schedule, minibatches=4)[0][0]


def test_row_24_no_data_at_all() -> None:
    assert train([], schedule="1f1b", minibatches=4) == [[], []]


def test_row_24_a_corrupt_record(tmp_path: Path) -> None:
    """A shard whose second half is lost: an error that names the file, the same on every rank."""
    pytest.importorskip("h5py", reason="h5py is not installed: pip install h5py")
    path = tmp_path / "a.h5"
    with importlib.import_module("h5py").File(path, "w") as file:
        for name, values in columns(64, 20).items():
            file.create_dataset(name, data=values, compression="gzip", chunks=(8, *values.shape[1:]))
        place = file["input_ids"].id.get_chunk_info(5)
    raw = bytearray(path.read_bytes())
    raw[place.byte_offset : place.byte_offset + place.size] = bytes(place.size)
    path.write_bytes(raw)
    shards = read_shards(tmp_path, 6, 128)
    assert len(shards.batch(range(8), 0)["input_ids"]) == 8
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"a\.h5 cannot be read as HDF5"):
            shards.batch(range(40, 48), 0)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_row_24_reading_fails_in_the_middle(schedule: str) -> None:
    """The reader's own error ends every rank; nobody waits for the others."""
    _, batch, _ = example("sequential", layers=4)

    def broken() -> Iterator[Any]:
        yield from varied(batch, 5)
        raise ConfigError("data_dir is 'text': shard 7 cannot be read")

    with pytest.raises(VPipeError, match="shard 7 cannot be read"):
        train(broken, schedule=schedule)


def test_row_24_data_end_where_they_are_said_to_end(tmp_path: Path) -> None:
    """The last minibatch of an epoch is smaller, and no sample is left out."""
    (tmp_path / "text.txt").write_text("a line of text\n" * 5)
    assert len(read_documents(tmp_path)) == 1

    class Numbers:
        def __len__(self) -> int:
            return 11

        def batch(self, indices: Any, epoch: int) -> Any:
            return sorted(indices)

    training, validation = split(Numbers(), 0.2, 0)
    batches = list(Batches(training, Sampler(len(training), 4, 0), 0, 3))
    assert [len(part) for part in batches] == [4, 4, 1]
    assert sorted(n for part in batches for n in part) + sorted(validation.chosen) != []
    assert {n for part in batches for n in part} | set(validation.chosen.tolist()) == set(range(11))


# Row 25: before any process starts


PARTITIONS: dict[str, tuple[dict[str, Any], str]] = {
    "does not sum to the blocks": (
        {"partition": [4, 4], "num_layers": 4},
        r"partition \[4, 4\] sums to 8, but the model has 9 blocks.*for example",
    ),
    "negative": ({"partition": [10, -1]}, r"partition, entry 1 is -1: expected 1 or more"),
    "zero": ({"partition": [9, 0]}, r"partition, entry 1 is 0: expected 1 or more"),
    "more stages than blocks": (
        {"stages": 10, "num_layers": 4},
        "10 stages, but the model has only 9 blocks",
    ),
    "another number of stages": (
        {"partition": [3, 3, 3], "stages": 2},
        r"partition is \[3, 3, 3\], which has 3 stages, but schedule '1f1b' has 2",
    ),
    "ratio above one": (
        {"recompute_ratio": [0.5, 1.5]},
        r"recompute_ratio, entry 1 is 1.5: expected 1 or less",
    ),
    "ratio below zero": ({"recompute_ratio": -0.1}, "recompute_ratio is -0.1: expected 0 or more"),
    "ratios for another number of stages": (
        {"recompute_ratio": [0.5, 0.5, 0.5], "partition": [4, 5]},
        "recompute_ratio.*3.*2",
    ),
    "machines and partition": (
        {"machines": ["localhost:0", "localhost:1"], "partition": [3, 3, 3]},
        r"which has 3 stages, but schedule '1f1b' has 2 on the 2 ranks of `machines`",
    ),
    "machines and module": (
        {"machines": ["localhost:0", "localhost:1"], "module": "vgpus=4"},
        "module is 'vgpus=4': `machines` names 2 ranks: make the two equal, or leave one out",
    ),
    "machines and replicas": (
        {"machines": ["localhost:0", "localhost:1"], "replicas": [2, 1]},
        r"replicas is \[2, 1\]: they add up to 3, but `machines` names 2 ranks",
    ),
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_row_25_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    values, message = PARTITIONS[name]
    refused_before_any_rank(
        tmp_path, monkeypatch, {"stages": 2} | values if "machines" not in values else values, message
    )


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("bert", 1),
        ("cpm", 3),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("bert", 3), ("cpm", 1))),
    ],
)
def test_blocks_that_are_known_without_building_the_model(tmp_path: Path, kind: str, layers: int) -> None:
    sizes = {"hidden_size": 16, "num_heads": 2, "sequence_length": 8, "batch_size": 2}
    (tmp_path / "run.yml").write_text(yaml.safe_dump({"model_type": kind, "num_layers": layers} | sizes))
    config = read_config(tmp_path / "run.yml")
    assert known_blocks(config) == len(capture(*build_model(config, "meta")).blocks)


def test_row_25_maps_and_machines_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = {"module_to_stage_map": [0, 0, 1, 1, 2], "stage_to_rank_map": {"0": [0], "1": [1], "2": [2]}}
    (tmp_path / "mp_conf.json").write_text(json.dumps(maps))
    values = {"config_file": "mp_conf.json", "machines": ["localhost:0", "localhost:1"]}
    refused_before_any_rank(tmp_path, monkeypatch, values, r"add up to 3, but `machines` names 2 ranks")


def refused_before_any_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "run_ranks_here", never)
    path = tmp_path / "run.yml"
    path.write_text(yaml.safe_dump({"synthetic_data": True} | values))
    with pytest.raises(VPipeError, match=message) as caught:
        launching.launch(read_config(path), ["train", str(path)])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists(), "a run's folder was made"
