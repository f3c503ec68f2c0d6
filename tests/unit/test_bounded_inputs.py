"""Files that never end and counts that no run has: refused before they take time or memory (row 32)."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.announced import besides_announcements
from tests.end_to_end.tiny import TINY
from vpipe.checkpoint import read_manifest
from vpipe.cli import main
from vpipe.config.file import check_values, read_config
from vpipe.config.maps import read_maps
from vpipe.config.settings import read_settings
from vpipe.cost import read_any_profile, read_plan, write_plan
from vpipe.cost.plan_file import Plan
from vpipe.data import read_tokenizer
from vpipe.errors import VPipeError
from vpipe.schedule import KINDS, read_table
from vpipe.system import files
from vpipe.system.files import read_text
from vpipe.train.model_settings import read_model_settings

launching = importlib.import_module("vpipe.train.launcher")

READERS: dict[str, Callable[[Path], Any]] = {
    "config": read_config,
    "plan": read_plan,
    "profile": read_any_profile,
    "maps": read_maps,
    "table": lambda path: read_table(read_text(path)),
    "model": lambda path: read_model_settings(path, "model"),
    "tokenizer": lambda path: read_tokenizer(path, 300),
}


def refused(read: Callable[[], Any], message: str = ".") -> None:
    with pytest.raises(VPipeError, match=message) as caught:
        read()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("reader", READERS)
def test_what_never_ends_is_not_read(tmp_path: Path, reader: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/dev/zero"), Path("/dev/null"), tmp_path / "fifo", tmp_path):
        refused(lambda path=path: READERS[reader](path), "not a file|there is no|Is a directory")  # type: ignore[misc]


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader != "tokenizer"])
def test_a_file_that_is_too_long_is_not_read(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "long.yml"
    with path.open("wb") as file:
        file.write(b"#")
        file.truncate(50 << 20)
    refused(lambda: READERS[reader](path), r"has more than [\d,]+ bytes")


def test_a_manifest_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(files.LARGE + 1)
    refused(lambda: read_manifest(tmp_path), r"has more than 67,108,864 bytes")


@pytest.mark.parametrize(
    "value",
    ["0x" + "f" * 60_000, "9" * 60_000, "[" * 60_000, "- " * 30_000, "59:" * 20_000 + "59", "x" * 100_000, "1e99999",
     "!!int 0b" + "1" * 50_000],
)  # fmt: skip
@pytest.mark.parametrize("key", ["seed", "learning_rate", "partition", "stages"])
def test_long_values(tmp_path: Path, key: str, value: str) -> None:
    (tmp_path / "run.yml").write_text(f"{key}: {value}\n")
    refused(lambda: read_config(tmp_path / "run.yml"), str(tmp_path))
    (tmp_path / "run.yml").write_text("seed: 0\n")
    refused(lambda: read_config(tmp_path / "run.yml", read_settings([f"{key}={value}"])))


@pytest.mark.parametrize(
    "keys",
    [{"stages": 4096}, {"stages": 4096, "num_layers": 10_000}, {"stages": 4096, "model_type": "translation"},
     {"replicas": [4096] * 4096}, {"stages": 2, "chunks": 4096, "schedule": "interleaved"},
     {"stages": 2, "minibatches": 10**9}, {"stages": 2, "update_interval": 10**9, "schedule": "vpipe"},
     {"machines": ["localhost:0"] * 5000}, {"partition": [10**9] * 2}, {"partition": [1] * 5000},
     {"num_layers": 10**9}, {"vocab_size": 10**30}, {"sequence_length": 10**30}, {"max_samples": 10**9},
     {"timeout": 1e300}, {"rendezvous_limit": 1e300}, {"heartbeat_limit": 1e300}, {"hang_limit": 1e300},
     *({"schedule": name, "stages": 4096, "chunks": 4096} for name in KINDS)],
    ids=lambda keys: ", ".join(f"{key} {str(value)[:12]}" for key, value in keys.items()),
)  # fmt: skip
def test_absurd_counts(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a folder is made or a rank is started, on a host of 64 GiB."""
    monkeypatch.setattr(launching, "make_run_folder", lambda path: pytest.fail("the run would begin"))
    monkeypatch.setattr(launching, "total_memory", lambda: 64 << 30)
    base = {key: value for key, value in TINY.items() if key not in ("machines", "data_dir", *keys)}
    if keys.get("model_type") == "translation":
        base.pop("hidden_size")
    values = base | {"synthetic_data": True, "schedule": "1f1b"} | keys
    refused(lambda: launching.launch(check_values(values, Path("run.yml")), []))


@pytest.mark.parametrize(
    "arguments",
    ["schedule gpipe --stages 1000000000 --minibatches 1", "schedule 1f1b --stages 2 --minibatches 1000000000",
     "schedule vpipe --stages 2 --minibatches 8 --update-interval 1000000000",
     "schedule interleaved --stages 4096 --chunks 4096 --minibatches 8",
     "schedule pipedream --stages 2 --minibatches 8 --replicas 1000000000,1",
     "simulate --profile profile.json --plan plan.json --minibatches 1000000000",
     "simulate --profile profile.json --plan absurd.json",
     "plan --profile profile.json --ranks 1000000000",
     f"plan --profile profile.json --ranks 2 --batch-size {'9' * 5000}",
     f"plan --profile profile.json --ranks 2 --memory {'9' * 5000}GiB",
     "plan --profile profile.json --ranks 2 --minibatches 1000000000 --schedule 1f1b",
     "plan --profile profile.json --ranks 2 --chunks 1000000000 --schedule interleaved"],
)  # fmt: skip
def test_absurd_counts_of_the_command_line(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    block = {"name": "b", "forward": 1e-3, "input_gradient": 1e-3, "weight_gradient": 1e-3, "kept_bytes": 1,
             "boundary_bytes": 1, "parameter_bytes": 1}  # fmt: skip
    costs = {"format": "vpipe profile 1", "batch_size": 1, "blocks": [block] * 4,
             "device": {"memory": 1 << 30, "to_host": 1e9, "from_host": 1e9},
             "link": {"bandwidth": 1e9, "latency": 1e-5}}  # fmt: skip
    (tmp_path / "profile.json").write_text(json.dumps(costs))
    (tmp_path / "plan.json").write_text(json.dumps({"partition": [2, 2], "schedule": "vpipe"}))
    absurd = {"partition": [2, 2], "schedule": "1f1b", "minibatches": 10**15, "update_interval": 10**15}
    (tmp_path / "absurd.json").write_text(json.dumps(absurd))
    monkeypatch.setattr(sys, "argv", ["vpipe", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert len(besides_announcements(said)) == 1
    assert len(said) < 1000


def test_a_table_that_names_minibatches_that_it_does_not_have() -> None:
    refused(lambda: read_table("0F0,0B0,0F999999999,0B999999999,0STEP999999999"), "number minibatches from 0")
    refused(lambda: read_table("999999999F0"), "stage 0 is on no rank")


def test_lone_surrogates_and_control_characters_can_be_written_and_read(tmp_path: Path) -> None:
    odd = "a\ud800\x1b\x9b\u2028\n\u202eb.csv"
    plan = Plan((1,), ("keep",), schedule="vpipe", fingerprint=odd)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").fingerprint == odd
    text = (tmp_path / "plan.json").read_text()
    assert all(line.isprintable() for line in text.splitlines())
    (tmp_path / "run.yml").write_text(yaml.safe_dump({"model_type": "cpm", "prompt": odd}))
    assert read_config(tmp_path / "run.yml").prompt == odd
