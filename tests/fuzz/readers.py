"""Every file that vpipe reads: a good one, how it is damaged, and all that reads it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn

from tests.fuzz.mutations import ODD_PIECES, bad_json, bad_text, damaged_bytes, written_json
from tests.unit.test_data_shards import columns, write_hdf5
from tests.unit.test_report import make_run
from vpipe import Pipeline, checkpoint
from vpipe.checkpoint import files, pretrained
from vpipe.checkpoint.manifest import _hash
from vpipe.config.arguments import build_schedule
from vpipe.config.file import AUTO, check_values, read_config, resolved_yaml
from vpipe.config.settings import read_settings
from vpipe.cost import read_any_profile, read_plan
from vpipe.data import (
    CausalText,
    build_tokenizer,
    encode_documents,
    masked_text,
    read_documents,
    read_pairs,
    read_records,
    read_shards,
    windows,
)
from vpipe.observe.report import write_report
from vpipe.observe.trace import write_trace
from vpipe.pipeline.threads import run_ranks
from vpipe.plan import plan
from vpipe.schedule import build, check, describe, draw, read_table, write_table
from vpipe.simulate.simulation import simulate
from vpipe.train.models import build_model

POEM = "the quick brown fox jumps over the lazy dog\n汉字 and words, and more words\n" * 40
CONFIG = b"""\
model_type: bert
data_dir: text
batch_size: 8
schedule: interleaved
chunks: 2
machines: ['localhost:0', 'localhost:1']
partition: [2, 2, 3, 2]
recompute_ratio: [0.5, 0, 0.25, 0]
optimizer: adamw
learning_rate: 5e-5
learning_rate_policy: polynomial
precision: fp32
max_updates: 100
warmup_updates: 10
timeout: 600.0
log_directory: runs
"""
PLAN: dict[str, Any] = {
    "partition": [2, 3],
    "recompute_ratio": [0.5, 0],
    "format": "vpipe plan 1",
    "policies": ["keep", "recompute", "keep", "keep", "keep"],
    "schedule": "vpipe",
    "replicas": [1, 1],
    "update_interval": 2,
    "batch_size": 8,
    "fingerprint": "ab12",
    "prediction": {"seconds": 0.25, "peaks": [1, 2]},
}
MAPS: dict[str, Any] = {
    "module_to_stage_map": [0, 0, 1, 1, 1],
    "stage_to_rank_map": {"0": [0, 1], "1": [2]},
    "stage_to_depth_map": {"0": 1, "1": 0},
}
BLOCK = {"forward": 0.01, "input_gradient": 0.01, "weight_gradient": 0.01, "update": 0.001, "kept_bytes": 5e7}
PROFILE: dict[str, Any] = {
    "format": "vpipe profile 1",
    "batch_size": 8,
    "optimizer_ratio": 2.0,
    "device": {"memory": 2**34, "to_host": 1.2e10, "from_host": 1.2e10},
    "link": {"bandwidth": 1e10, "latency": 2e-5, "sender_busy": True},
    "links": [{"from": 0, "to": 1, "bandwidth": 1e9, "latency": 1e-4}],
    "hosts": {
        "ranks": [[0], [1]],
        "link": {"bandwidth": 1e9},
        "links": [{"from": 0, "to": 1, "bandwidth": 1e8, "latency": 1e-4}],
    },
    "blocks": [
        BLOCK | {"name": f"layer {n}", "boundary_bytes": 1000, "parameter_bytes": 4000} for n in range(5)
    ],
}
COSTS = "forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"
GRAPH = "\n".join(
    [
        "node1 -- Input0 -- " + COSTS.format(0.0, 0.0, 0.0, 0.0),
        "node2 -- Linear(8, 8) -- " + COSTS.format(1.2, 2.4, "[4.0; 8.0]", 288.0) + " -- stage_id=0",
        *(f"node{n} -- Linear(8, 2) -- " + COSTS.format(0.4, 0.8, 4.0, 72.0) for n in range(3, 7)),
        *(f"\tnode{n} -- node{n + 1}" for n in range(1, 6)),
        "\tnode2 -- node4",
    ]
).encode()
MODEL = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


class Reader(NamedTuple):
    bad: st.SearchStrategy[bytes]
    read: Callable[[bytes], Any]
    lines: int = 1
    """Of the longest message; a schedule's has the grid drawn below it."""


def all_readers(folder: Path) -> dict[str, Callable[[], Reader]]:
    """By the name of the format; each is made, in a folder of its own, when it is asked for."""

    def prepared(make: Callable[[Path], Reader], name: str) -> Callable[[], Reader]:
        def ready() -> Reader:
            own = folder / name.replace(" ", "_")
            own.mkdir()
            return make(own)

        return ready

    return {name: prepared(make, name) for name, make in MAKERS.items()}


def _file(path: Path, read: Callable[[], Any]) -> Callable[[bytes], Any]:
    """Write what was damaged and read it."""

    def write_and_read(raw: bytes) -> Any:
        path.write_bytes(raw)
        return read()

    return write_and_read


def _use_config(path: Path) -> None:
    """All that happens to a configuration before ranks are started."""
    config = read_config(path)
    resolved_yaml(config)
    if config.partition != AUTO:
        build_schedule(config)


def config(folder: Path) -> Reader:
    (folder / "mp_conf.json").write_bytes(written_json(MAPS))
    path = folder / "run.yml"
    return Reader(bad_text(CONFIG), _file(path, lambda: _use_config(path)), lines=60)


def settings(folder: Path) -> Reader:
    def read(raw: bytes) -> None:
        values = read_settings([raw.decode("utf-8", "replace")])
        check_values(values, folder / "run.yml")

    lines = [line.replace(b": ", b"=") for line in CONFIG.splitlines()]
    good = st.sampled_from(lines).flatmap(bad_text)
    pieces = st.tuples(st.sampled_from(lines), st.sampled_from(ODD_PIECES)).map(b"".join)
    return Reader(good | pieces, read)


def plan_file(folder: Path) -> Reader:
    (folder / "run.yml").write_text("partition: plan.json\n")

    def read() -> None:
        read_plan(folder / "plan.json")
        _use_config(folder / "run.yml")

    return Reader(bad_json(PLAN), _file(folder / "plan.json", read), lines=60)


def maps(folder: Path) -> Reader:
    (folder / "run.yml").write_text("config_file: mp_conf.json\n")
    return Reader(bad_json(MAPS), _file(folder / "mp_conf.json", lambda: _use_config(folder / "run.yml")), 60)


def _use_profile(path: Path) -> None:
    profile = read_any_profile(path)
    given = folder_plan(path.parent)
    simulate(profile, given, None, 8)
    plan(profile, 2)


def folder_plan(folder: Path) -> Any:
    path = folder / "plan.json"
    if not path.exists():
        path.write_bytes(written_json({"partition": [2, 3]}))
    return read_plan(path)


def profile(folder: Path) -> Reader:
    path = folder / "profile.json"
    return Reader(bad_json(PROFILE), _file(path, lambda: _use_profile(path)), lines=60)


def pipedream_graph(folder: Path) -> Reader:
    path = folder / "graph.txt"
    return Reader(bad_text(GRAPH), _file(path, lambda: _use_profile(path)), lines=60)


def schedule(folder: Path) -> Reader:
    def read(raw: bytes) -> None:
        found = read_table(raw.decode("utf-8", "replace"), "table.csv")
        check(found)
        describe(found, False)
        draw(found, width=120)

    good = write_table(build("1f1b", 3, 4)).encode()
    long_cell = st.just(good + b"x" * 140_000)  # more than the csv module takes
    return Reader(bad_text(good) | long_cell, read, lines=60)


def _tiny() -> Pipeline:
    """A pipeline of one rank, to load checkpoints into."""
    torch.manual_seed(0)
    made: list[Pipeline] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = (torch.ones(2, 4), torch.ones(2, 4))

    def work(world: Any) -> None:
        pipe = Pipeline(
            model,
            batch,
            optimizer=torch.optim.AdamW,
            loss_fn=nn.functional.mse_loss,
            minibatches=1,
            world=world,
        )
        for _ in pipe.train([batch]):
            pass
        made.append(pipe)

    run_ranks(1, work)
    return made[0]


def manifest(folder: Path) -> Reader:
    """Changed by somebody who knows how its hash is made, and loaded."""
    pipe = _tiny()
    path = checkpoint.save(pipe, folder, {"position": 1})
    good = json.loads((path / "manifest.json").read_text())
    del good["sha256"]

    def hashed(content: Any) -> bytes:
        return written_json(content | {"sha256": _hash(content)} if isinstance(content, dict) else content)

    def read() -> None:
        checkpoint.verify(path)
        checkpoint.load(pipe, path)
        for _ in pipe.train([(torch.ones(2, 4), torch.ones(2, 4))]):  # what was loaded can be gone on from
            pass

    return Reader(bad_json(good, hashed), _file(path / "manifest.json", read))


def tensors(folder: Path) -> Reader:
    path = checkpoint.save(_tiny(), folder, {}) / "stage-000.safetensors"
    names, _ = files.read_header(path)

    def read() -> None:
        files.read_header(path)
        files.read_tensors(path, names)

    good = path.read_bytes()
    return Reader(damaged_bytes(good[: len(good) // 2]) | damaged_bytes(good), _file(path, read))


def pretrained_index(folder: Path) -> Reader:
    path = folder / pretrained.INDEX
    good = {"metadata": {"total_size": 4}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}

    def read() -> None:
        for file in set(pretrained._places(folder).values()):
            assert (folder / file).parent == folder

    return Reader(bad_json(good), _file(path, read))


def events(folder: Path) -> Reader:
    run = make_run(folder / "run")
    path = run / "events.1.json"

    def read() -> None:
        write_trace(run)
        write_report([run], folder / "report.html")

    return Reader(bad_json(json.loads(path.read_text())) | bad_text(path.read_bytes()), _file(path, read))


def _reported(name: str) -> Callable[[Path], Reader]:
    def make(folder: Path) -> Reader:
        run = make_run(folder / "run")
        for events_file in run.glob("events.*.json"):
            events_file.unlink()
        path = run / name
        good = path.read_bytes()
        bad = bad_json(json.loads(good)) if name.endswith(".json") else bad_text(good)
        return Reader(bad, _file(path, lambda: write_report([run], folder / "report.html")))

    return make


def metrics(folder: Path) -> Reader:
    run = make_run(folder / "run")
    for name in ("events.0.json", "events.1.json", "summary.json"):
        (run / name).unlink()
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()[:3]]

    def one_a_line(value: Any) -> bytes:
        entries = value if isinstance(value, list) else [value]
        return b"\n".join(map(written_json, entries))

    bad = bad_json(lines, one_a_line) | bad_text(path.read_bytes())
    return Reader(bad, _file(path, lambda: write_report([run], folder / "report.html")))


def tokenizer(folder: Path) -> Reader:
    trained = build_tokenizer([POEM], "wordpiece", 64, folder / "cache")
    path = folder / "tokenizer.json"

    def read() -> None:
        made = build_tokenizer([POEM], "wordpiece", 128, folder / "cache", path)
        words = encode_documents([POEM], made, folder / "cache")
        masked_text(windows(words, 14, 16, None), made, 0).batch([0], 0)

    good = json.loads(trained.to_str())
    return Reader(bad_json(good), _file(path, read))


def text(folder: Path) -> Reader:
    trained = build_tokenizer([POEM], "wordpiece", 64, folder / "cache")
    path = folder / "text" / "poem.txt"
    path.parent.mkdir()

    def read() -> None:
        tokens = encode_documents(read_documents(path.parent), trained, folder / "cache")
        masked_text(windows(tokens, 14, 16, path), trained, 0).batch([0], 0)

    return Reader(damaged_bytes(POEM[:200].encode()), _file(path, read))


def records(folder: Path) -> Reader:
    trained = build_tokenizer([POEM], "bpe", 300, folder / "cache")
    path = folder / "records.jsonl"
    said = [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog \u6c49"}]
    good: Any = [{"text": POEM[:50], "id": 3}, {"messages": said}]

    def one_a_line(entries: Any) -> bytes:
        return b"\n".join(map(written_json, entries)) if isinstance(entries, list) else written_json(entries)

    def read() -> None:
        words = encode_documents(read_records(path, "jsonl", None), trained, folder / "cache")
        CausalText(windows(words, 8, 8, path)).batch([0], 0)

    return Reader(bad_json(good, one_a_line) | bad_text(one_a_line(good)), _file(path, read))


def pairs(folder: Path) -> Reader:
    inner = folder / "pairs"
    inner.mkdir()
    (inner / "target.txt").write_text(POEM[:300])
    return Reader(bad_text(POEM[:300].encode()), _file(inner / "source.txt", lambda: read_pairs(inner)))


def shards(folder: Path) -> Reader:
    inner = folder / "shards"
    inner.mkdir()
    path = inner / "a.h5"
    write_hdf5(path, columns(4, 20))
    good = path.read_bytes()

    def read() -> None:
        read_shards(inner, 6, 64, next_sentence=True).batch([0, 3], 0)

    return Reader(damaged_bytes(good), _file(path, read))


def model(folder: Path) -> Reader:
    (folder / "run.yml").write_text("model: config.json\n")
    return Reader(
        bad_json(MODEL),
        _file(folder / "config.json", lambda: build_model(read_config(folder / "run.yml"), "meta")),
    )


MAKERS: dict[str, Callable[[Path], Reader]] = {
    "config": config,
    "setting": settings,
    "plan": plan_file,
    "maps": maps,
    "profile": profile,
    "PipeDream graph": pipedream_graph,
    "schedule CSV": schedule,
    "manifest": manifest,
    "tensors": tensors,
    "pretrained index": pretrained_index,
    "events": events,
    "metrics": metrics,
    "summary": _reported("summary.json"),
    "plan of a run": _reported("plan.json"),
    "config of a run": _reported("config.yml"),
    "tokenizer": tokenizer,
    "text": text,
    "records": records,
    "pairs": pairs,
    "shards": shards,
    "model": model,
}
