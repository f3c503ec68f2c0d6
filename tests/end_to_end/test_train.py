"""Training through the real command line: what it prints, what it leaves, how it goes on."""

import json
import math
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.captures import capture_config
from tests.end_to_end.command import vpipe, wait_until_gone
from tests.end_to_end.tiny import MODEL, POEM, TINY
from vpipe.config.file import read_config
from vpipe.observe.report import run_data

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """A folder with a little text and a configuration; `write(**keys)` changes keys of it."""
    (tmp_path / "text").mkdir()
    for number in range(8):
        lines = (f"{number + i} {POEM}" for i in range(40))
        (tmp_path / "text" / f"{number}.txt").write_text("".join(lines))

    def write(**keys: Any) -> Path:
        (tmp_path / "run.yml").write_text(yaml.safe_dump(TINY | keys))
        return tmp_path

    return write


def only_run(folder: Path, runs: str = "runs") -> Path:
    (found,) = [run for run in (folder / runs).iterdir() if (run / "config.yml").exists()]
    return found


def losses(run: Path) -> dict[int, float]:
    return dict(json.loads((run / "summary.json").read_text())["losses"])


def test_a_run_leaves_its_files_and_resumes_to_the_same_losses(tiny: Callable[..., Path]) -> None:
    folder = tiny(
        max_updates=16,
        checkpoint_interval=6,
        evaluation_interval=5,
        verbose_frequency=4,
        dropout=0.1,
        learning_rate_policy="polynomial",
        warmup_updates=2,
        clip_norm=1.0,
    )
    ended = vpipe("train", "run.yml", "--debug", "tensors,versions,schedule", cwd=folder)
    assert ended.code == 0, ended.said
    assert "2 CPU ranks" in ended.out
    assert "share of the limit" in ended.out
    assert "peak memory, stage 1" in ended.out
    run = only_run(folder)
    log = (run / "output.log.0").read_text()
    assert "Epoch 0, Iteration 4, Loss: " in log
    assert "Evaluation loss" in log
    for rank in (0, 1):
        assert f"stage {rank}, for each update: forward" in (run / f"output.log.{rank}").read_text()
    assert yaml.safe_load((run / "config.yml").read_text())["max_updates"] == 16
    plan = json.loads((run / "plan.json").read_text())
    assert plan["policies"] == ["keep"] * sum(plan["partition"])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in metrics} == {"train", "evaluation", "stages", "ranks", "stale"}
    assert [line["update"] for line in metrics if line["kind"] == "train"] == [4, 8, 12, 16]
    summary = json.loads((run / "summary.json").read_text())
    assert math.isclose(summary["perplexity"], math.exp(summary["evaluation_loss"]))
    assert summary["updates"] == 16
    assert 0 < summary["of_limit"] <= 1
    assert [len(names) for names in summary["blocks"]] == plan["partition"]
    assert list((run / "tensorboard").iterdir())
    assert "<html" in (run / "report.html").read_text()
    assert len(json.loads((run / "trace.json").read_text())["traceEvents"]) > 16 * 2 * 4
    check_observed(folder, run, ended.out)
    steps = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert steps[-1] == "step-00000016"
    middle = run / "checkpoints" / steps[0]
    first = int(steps[0].removeprefix("step-"))
    assert 6 <= first < 16

    again = vpipe("train", "run.yml", "--set", "log_directory=again", "--resume", middle, cwd=folder)
    assert again.code == 0, again.said
    assert f"resumed from {middle} after {first} updates" in again.out
    resumed, whole = losses(only_run(folder, "again")), losses(run)
    assert sorted(resumed) == list(range(first, 16))
    assert resumed == {update: whole[update] for update in resumed}  # to the bit
    continued = run_data(only_run(folder, "again"), "again")["losses"]
    assert [update for update, _ in continued] == [update + 1 for update in sorted(whole)]

    reported = vpipe("eval", "run.yml", "--resume", run, "--json", cwd=folder)
    assert reported.code == 0, reported.said
    assert json.loads(reported.out)["loss"] == summary["evaluation_loss"]
    assert only_run(folder) == run
    assert {path.name for path in (folder / "runs").iterdir()} == {
        run.name,
        "cache",
    }  # an evaluation leaves nothing
    wait_until_gone(str(folder))


def check_observed(folder: Path, run: Path, shown: str) -> None:
    """What the run says of itself while it runs and afterwards."""
    first, second = ((run / f"output.log.{rank}").read_text() for rank in (0, 1))
    assert "versions: 0F2 reads version 1+1 of 1; held: 0+1, 1+1" in first  # predicted, one update ahead
    assert "versions: 0B1 reads version 0+1 of 1; held: 1+1, dropped 0+1" in first
    assert "versions: 1STEP15 makes version 16; held: none" in second
    assert "tensors: received the gradient of " in first
    assert second.count("tensors: freed ") == second.count("tensors: received ")
    assert "schedule: stage 1 on rank 1: " in second
    assert "schedule: 0SEND_F0 took " in first
    assert "tensors: the rest is in the ranks' logs" in shown
    assert "norm " in shown
    (page,) = re.findall(r'id="data">(.*?)</script>', (run / "report.html").read_text(), re.DOTALL)
    (reported,) = json.loads(page)["runs"]
    assert reported["predicted"]["source"] == "the medians of its own actions"
    assert [len(line["counted"]) > 16 for line in reported["memory"]] == [True, True]
    top = vpipe("top", run, cwd=folder)
    assert "update 16 of 16" in top.out
    found = {
        finding["topic"]: finding for finding in json.loads(vpipe("diagnose", run, "--json", cwd=folder).out)
    }
    assert found["standstill"]["grade"] == found["versions"]["grade"] == "fine"
    assert found["versions"]["figures"]["staleness"] == {"0": 1, "1": 0}


def test_torchrun_starts_the_same_command(tiny: Callable[..., Path]) -> None:
    """In new interpreters: the other tests fork theirs."""
    folder = tiny(schedule="1f1b", minibatches=2, max_updates=3, optimizer="sgd")
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vpipe")
    ended = vpipe("train", "run.yml", cwd=folder, launcher=launcher)
    assert ended.code == 0, ended.said
    assert len(losses(only_run(folder))) == 3


def test_the_number_of_ranks_that_others_started_must_fit(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        ended = vpipe("train", "run.yml", cwd=folder, listener=listener)
    assert ended.code == 2, ended.said
    assert "describes 2 ranks and 1 were started" in ended.said


def test_a_chinese_gpt_writes_a_sentence(tiny: Callable[..., Path]) -> None:
    folder = tiny(model_type="cpm", data_dir="chinese.txt", max_updates=4, prompt="山")
    (folder / "chinese.txt").write_text("山高月小,水落石出。清风徐来,水波不兴。\n\n" * 200)
    ended = vpipe("train", "run.yml", cwd=folder, prepare=partial(capture_config, folder / "run.yml"))
    assert ended.code == 0, ended.said
    assert "'山' goes on: " in ended.out
    for what in ("the last checkpoint", "the model to runs/", "the trace and the report"):
        assert f"writing {what}" in ended.out


def test_the_model_of_a_run_is_read_by_transformers_and_trained_on(tiny: Callable[..., Path]) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder = tiny(max_updates=2)
    ended = vpipe("train", "run.yml", cwd=folder)
    assert ended.code == 0, ended.said
    exported = only_run(folder) / "model"
    model = AutoModelForMaskedLM.from_pretrained(str(exported), local_files_only=True)
    assert model.config.hidden_size == 32
    tokenizer = AutoTokenizer.from_pretrained(str(exported), local_files_only=True)
    assert "fox" in tokenizer.decode(tokenizer("the quick brown fox")["input_ids"])
    plan = exported.parent / "plan.json"  # of one run is a plan for another
    keys = ("--set", f"pretrained={exported}", "--set", f"partition={plan}", "--set", "log_directory=again")
    again = vpipe("train", "run.yml", *keys, cwd=folder)
    assert again.code == 0, again.said
    assert "started from" in again.out


@pytest.mark.parametrize(
    "name",
    [
        "translation_tiny",
        "demo",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("bert_tiny", "cpm_tiny")),
    ],
)
def test_every_small_configuration_trains(name: str, tmp_path: Path) -> None:
    small = {
        "max_updates": 3,
        "max_samples": 64,
        "evaluation_samples": 8,
        "batch_size": 2,
        "sequence_length": 16,
    }
    if name == "demo":
        small |= {"hidden_size": 32, "vocab_size": 512, "data_dir": str(CONFIGS), "warmup_updates": 0}
    keys = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    file = CONFIGS / f"{name}.yml"
    ended = vpipe("train", file, *keys, cwd=tmp_path, prepare=partial(capture_config, file, small))
    assert ended.code == 0, ended.said
    assert len(losses(only_run(tmp_path))) == 3


SYSTEMS = {
    "bert_4gpipe": ([13, 13, 13, 10], 49),
    "bert_4pipedream": ([13, 13, 13, 10], 0),
    "bert_4vpipe": ([12, 13, 13, 11], 3),
}
"""The guides' partition of BERT's 49 blocks, and how many of them are recomputed."""


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_guides_configurations_say_what_the_guides_say(name: str) -> None:
    config = read_config(CONFIGS / f"{name}.yml")
    partition, recomputed = SYSTEMS[name]
    assert config.partition == partition
    assert config.policies.count("recompute") == recomputed
    assert len(config.policies) == sum(partition) == 49
    assert (config.ranks, config.num_layers) == (4, 24)


@pytest.mark.long
def test_the_guides_three_systems_side_by_side(tmp_path: Path) -> None:
    """With two thin layers, so five blocks, in place of 24, and on two ranks: capturing costs most."""
    small = MODEL | {
        "partition": [3, 2],
        "machines": "[localhost:0, localhost:1]",
        "module": "vgpus=2",
        "config_file": "null",
        "max_updates": 3,
        "max_samples": 40,
        "evaluation_samples": 4,
    }
    keys = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    files = [CONFIGS / f"{name}.yml" for name in SYSTEMS]
    picture = tmp_path / "picture.png"
    ended = vpipe("compare", *files, *keys, "--plot", picture, "--json", cwd=tmp_path)
    assert ended.code == 0, ended.said
    results = json.loads(ended.out)
    assert [result["label"] for result in results] == list(SYSTEMS)
    assert [result["schedule"] for result in results] == ["gpipe", "pipedream", "vpipe"]
    assert [result["partition"] for result in results] == [[3, 2]] * 3
    assert picture.read_bytes().startswith(b"\x89PNG")
