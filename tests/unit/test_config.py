"""The configuration: every key, every mistake in one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vpipe.config import RunConfig
from vpipe.config.arguments import build_schedule, check_blocks
from vpipe.config.file import KEYS, check_values, read_config, resolved_yaml
from vpipe.config.names import MEANT
from vpipe.config.settings import read_settings
from vpipe.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
GUIDES = {
    "directory": "/srv/vpipe",
    "module": "vgpus=4",
    "partition": "vpipe.json",
    "config_file": "mp_conf.json",
    "machines": ["localhost:0", "localhost:1", "node-2:0", "10.0.0.7:1"],
    "sync_mode": "asp",
    "distributed_backend": "gloo",
    "model_type": "bert",
    "log_directory": "logs",
    "container": "image.sif",
    "batch_size": 16,
    "learning_rate": 5e-5,
    "learning_rate_policy": "polynomial",
    "weight_decay": 0.01,
    "epochs": 3,
    "print_frequency": 100,
    "verbose_frequency": 0,
    "macrobatch": False,
    "synthetic_data": True,
}


def write(folder: Path, text: str | dict[str, Any], name: str = "run.yml") -> Path:
    path = folder / name
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


def mistake(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    message = str(caught.value)
    assert message.startswith(str(path.parent))
    assert "\n" not in message
    return message


def test_every_key_of_the_guides(tmp_path: Path) -> None:
    plan = {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]}
    write(tmp_path, json.dumps(plan), "vpipe.json")
    write(
        tmp_path, json.dumps({"stage_to_rank_map": {str(rank): [rank] for rank in range(4)}}), "mp_conf.json"
    )
    config = read_config(write(tmp_path, GUIDES))
    for key, value in GUIDES.items():
        if key != "partition":
            assert getattr(config, key) == value
    assert config.partition == [12, 13, 13, 11]
    assert config.policies == ["keep"] * 9 + ["recompute"] * 3 + ["keep"] * 37  # int(0.3 * 12)
    assert (config.chosen_schedule, config.positions, config.ranks) == ("vpipe", 4, 4)
    assert config.path("data") == tmp_path / "data"


def test_every_field_is_described() -> None:
    assert all(field.description for field in RunConfig.model_fields.values())


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yml")), ids=lambda path: path.name)
def test_the_configs_that_come_along(path: Path) -> None:
    config = read_config(path)
    assert config.partition is None or len(config.partition) == config.positions


@pytest.mark.parametrize(
    ("values", "schedule"),
    [
        ({}, "1f1b"),
        ({"sync_mode": "bsp"}, "1f1b"),
        ({"sync_mode": "asp"}, "vpipe"),
        ({"macrobatch": True}, "2bw"),
        ({"macrobatch": True, "sync_mode": "asp"}, "2bw"),
        ({"schedule": "zb-h1", "sync_mode": "bsp"}, "zb-h1"),
        ({"schedule": "pipedream", "sync_mode": "asp", "macrobatch": False}, "pipedream"),
        ({"schedule": "2bw", "macrobatch": True}, "2bw"),
        ({"schedule": "tables/own.csv"}, "tables/own.csv"),
    ],
)
def test_the_schedule_that_is_chosen(values: dict[str, Any], schedule: str) -> None:
    assert RunConfig(**values).chosen_schedule == schedule


@pytest.mark.parametrize(
    ("values", "positions", "ranks"),
    [
        ({}, 1, 1),
        ({"stages": 3}, 3, 3),
        ({"replicas": [2, 1]}, 2, 3),
        ({"stages": 2, "replicas": [2, 2], "machines": ["a:0", "a:1", "b:0", "b:1"]}, 2, 4),
        ({"machines": ["a:0", "a:0"]}, 2, 2),
        ({"module": "vgpus=8"}, 8, 8),
        ({"partition": [2, 3, 4]}, 3, 3),
    ],
)
def test_positions_and_ranks(values: dict[str, Any], positions: int, ranks: int) -> None:
    config = RunConfig(**values)
    assert (config.positions, config.ranks) == (positions, ranks)


@pytest.mark.parametrize(
    ("values", "ratio"),
    [
        ({}, 0.0),
        ({"recompute": True}, 1.0),
        ({"recompute": False}, 0.0),
        ({"recompute": True, "recompute_ratio": [1, 1]}, [1, 1]),
        ({"recompute_ratio": [0.5, 0]}, [0.5, 0]),
    ],
)
def test_the_share_that_is_recomputed(values: dict[str, Any], ratio: object) -> None:
    assert RunConfig(**values).ratio == ratio


def test_another_schedule_leaves_behind_what_it_does_not_take(tmp_path: Path) -> None:
    path = write(tmp_path, {"schedule": "interleaved", "chunks": 3, "minibatches": 8, "stages": 2})
    changed = read_config(path, schedule="pipedream")
    assert (changed.schedule, changed.chunks, changed.minibatches, changed.stages) == (
        "pipedream",
        None,
        None,
        2,
    )
    assert changed.source == path
    stale = {"sync_mode": "asp", "update_interval": 4, "staleness": ["predict"], "depth": [3, 0], "stages": 2}
    changed = read_config(write(tmp_path, stale), schedule="gpipe")
    assert (changed.schedule, changed.sync_mode, changed.update_interval) == ("gpipe", None, None)
    assert (changed.staleness, changed.depth) == (None, None)


def test_what_is_set_is_for_the_other_schedule(tmp_path: Path) -> None:
    path = write(tmp_path, {"schedule": "1f1b", "minibatches": 8, "stages": 2})
    changed = read_config(path, {"staleness": ["predict"], "update_interval": 2}, "vpipe")
    assert (changed.staleness, changed.update_interval, changed.minibatches) == (["predict"], 2, None)
    with pytest.raises(ConfigError, match="minibatches is 4: schedule 'vpipe' is asynchronous"):
        read_config(path, {"minibatches": 4}, "vpipe")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize: 16", "unknown key 'batchsize' (its value is 16): did you mean 'batch_size'?"),
        ("learning_rat: 1", "did you mean 'learning_rate'?"),
        ("xyzzy: [1]", "unknown key 'xyzzy' (its value is [1]): known keys are model_type,"),
        ("1: 2", "unknown key 1"),
        (
            "format: vpipe profile 1",
            "its format is 'vpipe profile 1', not a configuration: give a run's YAML",
        ),
        ("format: other", "unknown key 'format' (its value is 'other')"),
        ("batch_size: many", "batch_size is 'many': expected a whole number"),
        ("batch_size: true", "batch_size is True: expected a whole number"),
        ("batch_size: 1.5", "batch_size is 1.5: expected a whole number"),
        ("batch_size: 0", "batch_size is 0: expected 1 or more"),
        ("learning_rate: -1", "learning_rate is -1: expected more than 0"),
        ("learning_rate: .inf", "learning_rate is inf: expected a number that is not infinite"),
        ("dropout: 1", "dropout is 1: expected less than 1"),
        ("recompute: 3", "recompute is 3: expected true or false"),
        ("sync_mode: async", "sync_mode is 'async': expected 'asp' or 'bsp'"),
        ("machines: localhost:0", "machines is 'localhost:0': expected a list"),
        ("machines: [gpu0]", "machines, entry 0 is 'gpu0': expected host:GPU, such as 'localhost:0'"),
        ("machines: []", "machines is []: expected a list with something in it"),
        ("module: 4gpus", "module is '4gpus': expected text such as 'vgpus=4'"),
        ("data_dir: 5", "data_dir is 5: expected text"),
        ("schedule: gpip", "did you mean 'gpipe'?"),
        ("partition: [3, x]", "partition, entry 1 is 'x': expected a whole number"),
        ("recompute_ratio: [0.5, 2]", "recompute_ratio, entry 1 is 2: expected 1 or less"),
        ("optimizer_groups: {match: a}", "optimizer_groups is {'match': 'a'}: expected a list"),
        ("optimizer_groups: [a]", "optimizer_groups, entry 0 is 'a': expected a mapping"),
        (
            "optimizer_groups: [{match: []}]",
            "optimizer_groups, entry 0: match is []: expected text or a list with something in it",
        ),
        (
            "optimizer_groups: [{weight_decay: 0}]",
            "optimizer_groups, entry 0 is {'weight_decay': 0}: expected the key 'match'",
        ),
        (
            "optimizer_groups: [{match: a, lr: 1}]",
            "optimizer_groups, entry 0: unknown key 'lr' (its value is 1): did you mean 'learning_rate'?",
        ),
        (
            "optimizer_groups: [{match: a}, {match: b, learning_rate: 0}]",
            "optimizer_groups, entry 1: learning_rate is 0: expected more than 0",
        ),
        (
            "optimizer_groups: [{match: a, optimizer: adan}]",
            "optimizer_groups, entry 0: optimizer is 'adan': expected 'sgd', 'adam'",
        ),
        ("model: a\nhidden_size: 4", "hidden_size is 4: what `model` names says it"),
        ("hidden_size: 10", "hidden_size is 10: it must be a multiple of num_heads, which is 4"),
        ("nonfinite_limit: [3, 2]", "nonfinite_limit is [3, 2]: of 2 updates 3 cannot be skipped"),
        ("num_heads: 3", "hidden_size is 128: it must be a multiple of num_heads, which is 3"),
        ("macrobatch: true\nsync_mode: bsp", "macrobatch is True: it is an asynchronous mode"),
        ("schedule: auto", "schedule is 'auto': it is chosen with the plan: write partition: auto too"),
        (
            "schedule: auto\npartition: auto\nsync_mode: asp",
            "sync_mode is 'asp': schedule is 'auto', which chooses",
        ),
        (
            "macrobatch: true\nschedule: vpipe",
            "macrobatch is True: schedule is 'vpipe', and macrobatch is the schedule",
        ),
        ("macrobatch: false\nschedule: 2bw", "macrobatch is False: schedule is '2bw'"),
        (
            "sync_mode: bsp\nschedule: vpipe",
            "sync_mode is 'bsp': schedule 'vpipe' is asynchronous: leave one",
        ),
        ("sync_mode: asp\nschedule: gpipe", "sync_mode is 'asp': schedule 'gpipe' is synchronous: leave one"),
        ("minibatches: 8\nsync_mode: asp", "minibatches is 8: schedule 'vpipe' is asynchronous"),
        ("update_interval: 8\nschedule: gpipe", "update_interval is 8: schedule 'gpipe' is synchronous"),
        ("update_interval: 8\nschedule: a.csv", "update_interval is 8: the table 'a.csv' says it"),
        ("replicas: [2, 1]\nschedule: a.csv", "replicas is [2, 1]: the table 'a.csv' says it"),
        (
            "recompute: true\nrecompute_ratio: 0.5",
            "recompute is True: everything is recomputed then, but recompute_ratio",
        ),
        (
            "recompute: false\nrecompute_ratio: [0, 1]",
            "recompute is False: nothing is recomputed then, but recompute_",
        ),
        (
            "recompute: false\npolicies: [keep, recompute]",
            "recompute is False: nothing is recomputed then, but policies",
        ),
        ("recompute_ratio: 0\npolicies: [keep]", "recompute_ratio is 0.0: `policies` says it for each block"),
        (
            "nonfinite_limit: [5, 50]",
            "nonfinite_limit is [5, 50]: no update is skipped: write on_nonfinite: skip",
        ),
        ("loss_scale: 1024", "loss_scale is 1024.0: precision is 'fp32', and only fp16 needs one"),
        (
            "synthetic_data: true\ndata_dir: text",
            "data_dir is 'text': synthetic_data is true, so no text is read",
        ),
        ("synthetic_data: true\ntokenizer: t.json", "tokenizer is 't.json': synthetic_data is true"),
        ("staleness: [predict]\nschedule: 1f1b", "staleness is ['predict']: schedule '1f1b' is synchronous"),
        (
            "gpu_memory: much",
            "gpu_memory is 'much': expected memory 'much' is not a size: write a number with",
        ),
        ("synthetic_data: true\ndocuments: padded", "documents is 'padded': synthetic_data is true"),
        ("prompt: Once", "prompt is 'Once': only `model_type: cpm` writes a sentence"),
        ("python_path: [src]", "python_path is ['src']: no key names a function"),
        ("module: vgpus=4\nstages: 2", "module is 'vgpus=4': stages and replicas make 2 ranks"),
        ("module: vgpus=4\nreplicas: [2, 1]", "module is 'vgpus=4': stages and replicas make 3 ranks"),
        ("lr: 0.1", "unknown key 'lr' (its value is 0.1): did you mean 'learning_rate'?"),
        ("lr_schedule: cosine", "did you mean 'learning_rate_policy'?"),
        ("gpus: 4", "did you mean 'machines'?"),
        ("num_stages: 4", "did you mean 'stages'?"),
        ("max_steps: 4", "did you mean 'max_updates'?"),
        ("Seq-Len: 4", "did you mean 'sequence_length'?"),
        (
            "global_batch_size: 10\nbatch_size: 4",
            "global_batch_size is 10, which is not a multiple of batch_size 4",
        ),
        (
            "global_batch_size: 4\nbatch_size: 8",
            "global_batch_size is 4, which is not a multiple of batch_size 8",
        ),
        (
            "global_batch_size: 9\nminibatches: 4",
            "is not a multiple of the 4 minibatches of an update (minibatches)",
        ),
        (
            "global_batch_size: 32\nbatch_size: 4\nminibatches: 4",
            "global_batch_size is 32, but batch_size 4 times the 4 minibatches of an update (minibatches) is 16",
        ),
        ("stages: 3\nreplicas: [1, 2]", "replicas is [1, 2]: give one number for each of the 3 stages"),
        ("stages: 3\nmachines: ['a:0']", "stages is 3: `machines` names 1 ranks"),
        ("module: vgpus=2\nmachines: ['a:0']", "module is 'vgpus=2': `machines` names 1 ranks"),
        ("replicas: [2, 1]\nmachines: ['a:0']", "replicas is [2, 1]: they add up to 3"),
        ("", "the file is empty"),
        ("# nothing", "the file is empty"),
        ("- a\n- b", "holds a list, not a mapping"),
        ("just text", "holds text, not a mapping"),
        ("a: 1\nb: [1, 2\nc: 3", "line 3: "),
        (
            "a: 1\nb: !!python/object/apply:os.system [ls]",
            "line 2: could not determine a constructor for the tag",
        ),
        ("stages: 2\n\tbatch_size: 3", "line 2: "),
        ("batch_size: \x00", "cannot be read as YAML"),
        ("[" * 5000, "line 1: brackets are nested too deep"),
        ("partition: nowhere.json", "nowhere.json: cannot be read: No such file"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in mistake(write(tmp_path, text))


def test_files_that_are_no_text(tmp_path: Path) -> None:
    binary = tmp_path / "run.yml"
    binary.write_bytes(bytes(range(256)))
    assert "is not a text file in UTF-8" in mistake(binary)
    assert "cannot be read: No such file or directory" in mistake(tmp_path / "nowhere.yml")
    assert "cannot be read: Is a directory" in mistake(tmp_path / "..")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "holds [1], not an object"),
        ('{"recompute_ratio": [1]}', "partition is missing"),
        ('{"partition": [1, 0]}', "partition, entry 1 is 0"),
        ('{"partition": [1], "recompute_ratio": [7]}', "recompute_ratio, entry 0 is 7"),
        ('{"partition": [1], "note": "mine"}', "unknown key 'note'"),
    ],
)
def test_mistakes_in_the_plan(tmp_path: Path, plan: str, message: str) -> None:
    path = write(tmp_path, plan, "vpipe.json")
    text = mistake(write(tmp_path, {"partition": "vpipe.json"}))
    assert text.startswith(f"{path}: ")
    assert message in text


def test_the_file_goes_before_the_plan(tmp_path: Path) -> None:
    write(tmp_path, '{"partition": [1, 2], "recompute_ratio": [1, 1]}', "vpipe.json")
    config = read_config(write(tmp_path, {"partition": "vpipe.json", "recompute_ratio": 0.5}))
    assert (config.partition, config.ratio) == ([1, 2], 0.5)


@given(
    st.dictionaries(
        st.sampled_from(KEYS),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
            ),
            max_leaves=4,
        ),
        max_size=4,
    )
)
def test_any_values_are_accepted_or_refused_in_one_line(values: dict[str, Any]) -> None:
    message = refusal(values)
    assert message is None or message.startswith("run.yml: ")
    assert message is None or "\n" not in message


def refusal(values: dict[str, Any]) -> str | None:
    try:
        check_values(values, Path("run.yml"))
    except ConfigError as error:
        return str(error)
    return None


def test_torch_is_not_needed() -> None:
    code = "import sys, vpipe.config.file, vpipe.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_other_names_are_hints_at_keys_that_exist() -> None:
    assert set(MEANT.values()) <= set(KEYS)
    assert not MEANT.keys() & set(KEYS)


@pytest.mark.parametrize(
    ("values", "size", "minibatches", "interval"),
    [
        ({"stages": 2}, 16, 4, None),
        ({"stages": 2, "batch_size": 8}, 8, 8, None),
        ({"stages": 2, "minibatches": 16}, 4, 16, None),
        ({"stages": 2, "minibatches": 16, "batch_size": 4}, 4, 16, None),
        ({"stages": 2, "sync_mode": "asp"}, 64, None, 1),
        ({"stages": 2, "sync_mode": "asp", "batch_size": 16}, 16, None, 4),
        ({"replicas": [2, 1], "sync_mode": "asp"}, 32, None, 2),
    ],
)
def test_the_batch_of_an_update(
    tmp_path: Path, values: dict[str, Any], size: int, minibatches: int | None, interval: int | None
) -> None:
    config = read_config(write(tmp_path, {"global_batch_size": 64, **values}))
    assert (config.batch_size, config.minibatches, config.update_interval) == (size, minibatches, interval)
    again = read_config(write(tmp_path, resolved_yaml(config), "config.yml"))
    assert again.model_dump() == config.model_dump()


@pytest.mark.parametrize(
    ("partition", "values", "sizes"),
    [
        ([12, 13, 13, 11], {}, (24, 1024, 16, 30522)),
        ([11, 11, 12, 12, 13, 13, 14, 11], {}, (48, 1024, 16, 30522)),
        ([12, 13, 13, 11], {"hidden_size": 64}, (24, 64, 4, 1024)),
        ([12, 13, 13, 11], {"dropout": 0}, (24, 1024, 16, 30522)),
        ([12, 13, 13, 11], {"model_type": "cpm"}, (24, 128, 4, 1024)),
        ([2, 3], {}, (2, 128, 4, 1024)),
        ([5, 4], {}, (4, 128, 4, 1024)),
        ([12, 13, 13, 11], {"num_layers": 3}, (3, 128, 4, 1024)),
        ([12, 13, 13, 11], {"model_type": "translation"}, (4, 128, 4, 1024)),
    ],
)
def test_sizes_follow_from_the_partition(
    tmp_path: Path, partition: list[int], values: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    config = read_config(write(tmp_path, {"partition": partition, **values}))
    assert (config.num_layers, config.hidden_size, config.num_heads, config.vocab_size) == sizes
    assert len(config.notes) == (sizes != (4, 128, 4, 1024) and "num_layers" not in values)


def test_a_partition_for_another_model_says_which_key_to_set(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {"partition": [12, 13, 13, 11], "num_layers": 3}))
    with pytest.raises(ConfigError, match=r"sums to 49, but the model has 7 blocks, or set num_layers: 24$"):
        check_blocks(config, build_schedule(config))


def test_the_guides_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`partition` and `config_file` are looked for beside the file, then in `directory`, wherever that is found."""
    maps = {"stage_to_rank_map": {"0": [0], "1": [1]}}
    for place in (tmp_path / "bert", tmp_path / "configs" / "near"):
        folder = place / "vgpus=2"
        folder.mkdir(parents=True)
        write(folder, '{"partition": [2, 3]}', "vpipe.json")
        write(folder, json.dumps(maps), "mp_conf.json")
    monkeypatch.chdir(tmp_path)
    keys = {"directory": "bert", "partition": "vgpus=2/vpipe.json", "config_file": "vgpus=2/mp_conf.json"}
    for directory in ("bert", "near"):
        config = read_config(write(tmp_path / "configs", keys | {"directory": directory}))
        assert (config.partition, config.replicas) == ([2, 3], [1, 1])
        written = read_config(write(tmp_path, resolved_yaml(config), "config.yml"))
        assert written.directory in (str(tmp_path / "bert"), str(tmp_path / "configs" / "near"))
        assert written.file("config_file").is_file()
    # The one beside the file goes first.
    write(tmp_path / "configs", '{"partition": [1, 4]}', "vpipe.json")
    write(tmp_path / "bert", '{"partition": [4, 1]}', "vpipe.json")
    found = read_config(write(tmp_path / "configs", {"directory": "bert", "partition": "vpipe.json"}))
    assert found.partition == [1, 4]


def test_a_plan_beside_recompute(tmp_path: Path) -> None:
    write(tmp_path, '{"partition": [1, 2], "recompute_ratio": [1, 1], "batch_size": 32}', "vpipe.json")
    config = read_config(write(tmp_path, {"partition": "vpipe.json", "recompute": True}))
    assert (config.policies, config.batch_size) == (["recompute"] * 3, 32)
    message = mistake(write(tmp_path, {"partition": "vpipe.json", "recompute": False}))
    assert (
        "recompute is False: nothing is recomputed then, but policies (or the plan) says otherwise" in message
    )


WHOLE = '{"partition": [1, 2], "schedule": "1f1b", "minibatches": 6, "replicas": [2, 1]}'


@pytest.mark.parametrize(
    "ranks",
    [{"stages": 3}, {"machines": ["localhost:0", "localhost:1", "localhost:2"]}, {"module": "vgpus=3"}],
)
def test_a_plan_may_leave_ranks_idle(tmp_path: Path, ranks: dict[str, object]) -> None:
    planned = {"partition": [3, 3], "schedule": "1f1b", "replicas": [1, 1], "idle": 1}
    write(tmp_path, json.dumps(planned), "plan.json")
    config = read_config(write(tmp_path, {"partition": "plan.json", **ranks}))
    assert config.ranks == 2
    assert config.machines in (None, ["localhost:0", "localhost:1"])
    assert "uses 2 of 3 ranks" in config.notes[0]
    assert config.idle == 1
    del planned["replicas"]
    write(tmp_path, json.dumps(planned), "plan.json")
    with pytest.raises(ConfigError, match="idle is 1, but there are no replicas"):
        read_config(write(tmp_path, {"partition": "plan.json", **ranks}))
    write(tmp_path, json.dumps(planned | {"idle": 2, "replicas": [1, 1]}), "plan.json")  # for a run of 4
    with pytest.raises(ConfigError):
        read_config(write(tmp_path, {"partition": "plan.json", **ranks}))


def test_a_plan_gives_its_schedule_and_replicas(tmp_path: Path) -> None:
    """Also where the file has a key without a value, as the one that other hosts are given."""
    write(tmp_path, WHOLE, "plan.json")
    for empty in ({}, {"replicas": None, "schedule": None, "minibatches": None}):
        config = read_config(write(tmp_path, {"partition": "plan.json", **empty}))
        assert (config.chosen_schedule, config.minibatches, config.replicas) == ("1f1b", 6, [2, 1])


def test_the_files_own_mode_goes_before_the_plans_schedule(tmp_path: Path) -> None:
    write(tmp_path, WHOLE, "plan.json")
    config = read_config(write(tmp_path, {"partition": "plan.json", "sync_mode": "asp"}))
    assert (config.chosen_schedule, config.minibatches) == ("vpipe", None)


def test_the_guides_two_keys_choose_no_schedule(tmp_path: Path) -> None:
    write(tmp_path, '{"partition": [1, 2]}', "vpipe.json")
    assert read_config(write(tmp_path, {"partition": "vpipe.json"})).chosen_schedule == "1f1b"


def test_what_a_run_writes_down_can_be_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "config.json").write_text("{}")
    path = write(tmp_path, {"model": "models/config.json", "data_dir": "text", "stages": 2})
    (tmp_path / "runs").mkdir()
    kept = read_config(write(tmp_path / "runs", resolved_yaml(read_config(path)), "config.yml"))
    assert kept.model is not None
    assert kept.path(kept.model) == tmp_path / "models" / "config.json"
    assert kept.data_dir == str(tmp_path / "text")
    assert kept.stages == 2


def test_auto_is_no_path() -> None:
    assert read_settings(["partition=auto"]) == {"partition": "auto"}
    assert read_settings(["partition=plan.json"]) == {"partition": str(Path("plan.json").absolute())}
