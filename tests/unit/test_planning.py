"""`vpipe plan CONFIG`: profiled once, planned for the run, and refused for another model."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.announced import besides_announcements
from vpipe.cli import main
from vpipe.config import RunConfig
from vpipe.config.arguments import build_schedule, check_plan
from vpipe.config.file import read_config
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Profile, read_plan, write_profile
from vpipe.errors import ConfigError, VPipeError
from vpipe.schedule.staleness import Staleness
from vpipe.system import user_cache
from vpipe.train import profiling
from vpipe.train.planning import plan_run, stale_training, write_run_plan

BLOCK = BlockCost("block", 0.01, 0.01, 0.01, 0.0, 100_000, 1_000, 10_000)
PROFILE = Profile((BLOCK,) * 5, DeviceCost(2**30, 1e8, 1e8), LinkCost(1e10, 1e-5), 3, fingerprint="abc")
CONFIG = """
hidden_size: 16
num_layers: 2
num_heads: 2
vocab_size: 32
sequence_length: 8
batch_size: 3
schedule: 1f1b
minibatches: 6
stages: 2
gpu_memory: 2MiB
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(user_cache.VARIABLE, str(tmp_path / "kept"))
    path = tmp_path / "run.yml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configurations that were measured; measuring takes no time here."""
    seen: list[RunConfig] = []

    def measure(config: RunConfig) -> Profile:
        seen.append(config)
        return PROFILE

    monkeypatch.setattr(profiling, "profile_config", measure)
    return seen


def vpipe(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["vpipe", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_a_run_is_profiled_once_and_planned_as_its_file_says(
    config: Path,
    profiled: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert vpipe(monkeypatch, "plan", config, "--json") == 0
    printed, written = json.loads(capsys.readouterr().out), read_plan(Path("plan.json"))
    assert (printed["schedule"], printed["minibatches"], printed["memory"]) == ("1f1b", 6, 2 * 2**20)
    assert sum(written.replicas) == 2
    assert written.fingerprint == "abc"
    assert vpipe(monkeypatch, "plan", config, "--ranks", 3, "--schedule", "vpipe", "-o", "other.json") == 0
    assert "vpipe on 3 ranks" in capsys.readouterr().out
    assert sum(read_plan(Path("other.json")).replicas) == 3
    assert vpipe(monkeypatch, "plan", config, "--ranks", 3, "--schedule", "zb-h1") == 0
    # The run would have another optimizer under vpipe. Another minibatch has other costs.
    assert [seen.chosen_optimizer for seen in profiled] == ["adamw", "muon"]
    assert vpipe(monkeypatch, "plan", config, "--set", "batch_size=4") == 0
    assert [seen.batch_size for seen in profiled] == [3, 3, 4]


@pytest.mark.parametrize(
    ("keys", "schedule", "optimizer", "predicts"),
    [
        ({}, None, "adamw", False),
        ({}, "gpipe", "adamw", False),
        ({}, "2bw", "muon", True),
        ({}, "auto", "muon", True),
        ({"optimizer": "sgd"}, "2bw", "sgd", False),
        ({"schedule": "vpipe", "minibatches": None}, None, "muon", True),
        ({"schedule": "vpipe", "minibatches": None}, "1f1b", "adamw", False),
        ({"schedule": "vpipe", "minibatches": None, "staleness": []}, "2bw", "muon", False),
        (
            {"schedule": "vpipe", "minibatches": None, "staleness": ["predict"], "optimizer": "adamw"},
            "2bw",
            "adamw",
            True,
        ),
        ({"schedule": "auto", "partition": "auto"}, None, "muon", True),
    ],
)
def test_costs_are_those_of_the_optimizer_that_the_run_will_have(
    config: Path,
    profiled: list[RunConfig],
    capsys: pytest.CaptureFixture[str],
    keys: dict[str, object],
    schedule: str | None,
    optimizer: str,
    predicts: bool,
) -> None:
    run = read_config(config, keys)
    found = plan_run(run, schedule=schedule, training=stale_training(run))
    (seen,) = profiled
    assert (seen.chosen_optimizer, seen.remedies.predict) == (optimizer, predicts)
    said = "compared by optimizer muon, since the file names none" in capsys.readouterr().err
    assert said == (schedule == "auto" and found.synchronous)


def test_a_synchronous_run_of_auto_has_the_optimizer_of_its_plan(
    config: Path, profiled: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"schedule": "auto", "partition": "auto"}
    write_run_plan(read_config(config, keys), Path("plan.json"))
    run = read_config(config, keys | {"partition": "plan.json"})
    assert not run.has_stale_weights
    assert run.chosen_optimizer == "muon"
    assert run.remedies == Staleness()
    assert "it trains with optimizer muon, by which schedules were compared" in capsys.readouterr().err
    named = read_config(config, keys | {"partition": "plan.json", "optimizer": "sgd"})
    assert named.chosen_optimizer == "sgd"


def test_a_run_is_planned_with_a_given_profile(
    config: Path,
    profiled: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Measured elsewhere, perhaps, and with another size of minibatches than the run's."""
    write_profile(replace(PROFILE, batch_size=6, fingerprint="given"), Path("given.json"))
    assert vpipe(monkeypatch, "plan", config, "--profile", "given.json") == 0
    written = read_plan(Path("plan.json"))
    assert (written.schedule, written.minibatches, written.batch_size) == ("1f1b", 6, 3)
    assert (sum(written.replicas), written.fingerprint) == (2, "given")
    assert profiled == []
    assert "whose updates take" not in capsys.readouterr().err
    write_profile(replace(PROFILE, optimizer="adamw"), Path("given.json"))
    for schedule, warned in (("1f1b", False), ("vpipe", True)):
        given = ("--profile", "given.json", "--schedule", schedule)
        assert vpipe(monkeypatch, "plan", config, *given) == 0
        said = "the updates of optimizer adamw, but the run has muon" in capsys.readouterr().err
        assert said == warned


def test_stages_are_placed_on_the_hosts_of_the_run(
    config: Path,
    profiled: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machines = "machines=['localhost:0', 'far.example:0']"
    assert vpipe(monkeypatch, "plan", config, "--set", machines, "--machines") == 2
    assert "2 hosts are given, but not what their network carries" in capsys.readouterr().err
    assert vpipe(monkeypatch, "plan", config, "--set", machines, "--machines", "--network", "1Gbit/s") == 0
    shown = capsys.readouterr().out
    assert "localhost" in shown
    assert "far.example" in shown
    assert vpipe(monkeypatch, "plan", config, "--set", machines, "--machines", "--hosts", "2x1") == 2
    assert "leave --hosts out" in capsys.readouterr().err


def test_the_run_itself_finds_the_same_profile(config: Path, profiled: list[RunConfig]) -> None:
    run = read_config(config, {"partition": "auto"})
    plan_run(run)
    write_run_plan(run, Path("plan.json"))
    assert len(profiled) == 1
    (kept,) = Path("kept", "profiles").iterdir()
    kept.write_text("{}")  # damaged: it is measured again
    plan_run(read_config(config, {"log_directory": "elsewhere"}))
    plan_run(read_config(config, {"log_directory": "anywhere"}))
    assert len(profiled) == 2


@pytest.mark.parametrize(
    ("optimizer", "chosen", "reason"),
    [
        ("muon", "2bw", "stale weights need 1.06 times as many samples"),
        ("sgd", "zb-v", "synchronous zb-v with 27.26 samples/s reaches a loss before 2bw"),
    ],
)
def test_a_run_chooses_its_schedule_by_the_time_to_loss(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    optimizer: str,
    chosen: str,
    reason: str,
) -> None:
    large = replace(PROFILE, blocks=(replace(BLOCK, parameter_bytes=300_000),) * 5)  # too much for one rank
    monkeypatch.setattr(profiling, "profile_config", lambda config: large)
    keys = {"schedule": "auto", "partition": "auto", "staleness": ["predict"], "optimizer": optimizer}
    keys |= {"minibatches": 1, "gpu_memory": "4MiB"}
    write_run_plan(read_config(config, keys), Path("plan.json"))
    said = " ".join(capsys.readouterr().err.split())
    run = read_config(config, keys | {"partition": "plan.json"})
    assert run.chosen_schedule == read_plan(Path("plan.json")).schedule == chosen
    with pytest.raises(
        ConfigError, match=r"schedule is 'auto', .* run `vpipe plan .*run.yml` and set partition"
    ):
        build_schedule(read_config(config, keys))
    assert f"schedule auto: {chosen} on 2 ranks" in said
    assert reason in said
    # Keys of the other kind of schedule were for that kind.
    assert (run.minibatches, run.staleness) == ((None, ["predict"]) if chosen == "2bw" else (1, None))


def test_without_a_place_to_keep_it_a_run_is_profiled_once(
    config: Path, profiled: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(user_cache.VARIABLE, "")
    write_run_plan(read_config(config, {"partition": "auto"}), Path("plan.json"))
    assert len(profiled) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a run's YAML file, or --profile and --ranks"),
        (("--profile", "profile.json"), "give a run's YAML file, or --profile and --ranks"),
        (("run.yml", "--profile", "profile.json"), "profile.json: cannot be read: No such file"),
        (
            ("run.yml", "--set", "schedule=order.csv", "--set", "minibatches=null"),
            "order.csv: cannot be read: No such file",
        ),
    ],
)
def test_mistakes(
    config: Path,
    profiled: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert vpipe(monkeypatch, "plan", *arguments) == 2
    (line,) = besides_announcements(capsys.readouterr().err)
    assert line.startswith("error: ")
    assert message in line


def test_a_cap_below_the_weights_alone(
    config: Path,
    profiled: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert vpipe(monkeypatch, "plan", config, "--memory", "10kB") == 2
    (line,) = besides_announcements(capsys.readouterr().err)
    assert "nothing fits a memory of 10000 bytes" in line
    assert "are missing on stage" in line
    assert "what would fit: a memory of" in line


def test_a_plan_for_another_model_is_refused(config: Path, profiled: list[RunConfig]) -> None:
    write_run_plan(read_config(config, {"partition": "auto"}), Path("plan.json"))
    run = read_config(config, {"partition": "plan.json"})
    assert (run.ranks, run.replicas) == (2, [2])  # two ranks of one stage are quicker here than two stages
    check_plan(run, "abc")
    with pytest.raises(
        ConfigError, match=r"plan.json: is a plan for another model: .* 'abc'.*'def'.*plan again"
    ):
        check_plan(run, "def")
    # The guides' file of two keys is for any model with so many blocks.
    Path("vpipe.json").write_text('{"partition": [2, 3]}')
    check_plan(read_config(config, {"partition": "vpipe.json"}), "def")
    check_plan(read_config(config, {"partition": [2, 3]}), "def")


def test_with_auto_graphs_are_left_out_where_no_plan_has_room_for_them(config: Path) -> None:
    graphs = replace(PROFILE, device=replace(PROFILE.device, graphs=True, slack=2**30))
    with pytest.raises(VPipeError, match="leave cuda_graphs out"):
        plan_run(read_config(config, {"cuda_graphs": True}), graphs)
    assert sum(plan_run(read_config(config, {"cuda_graphs": "auto"}), graphs).replicas) == 2


def test_a_kept_profile_is_planned_without_torch(config: Path, tmp_path: Path) -> None:
    """Its import takes seconds, in which no rank has been started yet."""
    write_profile(PROFILE, tmp_path / "profile.json")
    code = """
import sys
from pathlib import Path
from vpipe.config.file import read_config
from vpipe.cost import read_profile
from vpipe.train.planning import write_run_plan

write_run_plan(read_config(Path("run.yml")), Path("plan.json"), profile=read_profile(Path("profile.json")))
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=tmp_path)
    assert read_plan(tmp_path / "plan.json").schedule == "1f1b"
