"""Runs on a real SLURM, which the tests start: two nodes on this machine (`tests/cluster.py`)."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import apptainer
from tests.cluster import Cluster, cluster, missing
from tests.end_to_end.command import vpipe, wait_for_line, wait_until_gone
from tests.faults.runs import final_weights, half_done, write_config
from tests.waiting import TIMEOUT, wait_until
from vpipe.config.file import read_config
from vpipe.launch import sbatch
from vpipe.launch.sbatch import Resources, sbatch_script

ROOT = Path(__file__).parents[2]
ENDLESS: dict[str, Any] = {
    "schedule": "1f1b",
    "minibatches": 2,
    "epochs": 100_000,
    "max_updates": None,
    "print_frequency": 1,
    "checkpoint_interval": 0,
    "heartbeat_limit": 600.0,
}
"""A run that ends when it is asked to; where it was saved makes no difference to its weights."""
_MEET = """
import hashlib, json, os, sys
from pathlib import Path
from vpipe.config.file import read_config
from vpipe.launch.slurm import join_step, this_step
join_step(this_step(), read_config(Path("run.yml")), ["train"], Path("runs"))
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURMD_NODENAME")
secret = hashlib.sha256(os.environ["VPIPE_SECRET"].encode()).hexdigest()
sys.stdout.write(json.dumps({name: os.environ[name] for name in names} | {"secret": secret}) + "\\n")
"""
_TASK = """\
#!/bin/bash
trap 'exit 75' TERM
# At once, although an argument may have several lines: echo writes them one by one, and two tasks would mix theirs.
cat >> {tasks} <<< "$SLURM_PROCID ${{SLURM_RESTART_COUNT:-0}} $TORCHELASTIC_RESTART_COUNT $*"
{then}
while :; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with cluster() as made:
        yield made


def test_a_script_without_a_cluster(tmp_path: Path) -> None:
    write_config(tmp_path, 2)
    script = vpipe(
        "train", "run.yml", "--slurm", "--dry-run", "--nodes", 2, "--set", "epochs=3", cwd=tmp_path
    )
    assert script.code == 0, script.said
    assert "#SBATCH --ntasks-per-node=1\n" in script.out
    assert f"-m vpipe train {tmp_path}/run.yml --set epochs=3\n" in script.out
    assert not (tmp_path / "runs").exists()
    for options, message in (
        (("--nodes", 2), "error: the options of SLURM (--dry-run, --nodes and so on) are for --slurm: "),
        (("--slurm", "--nodes", 3), "error: --nodes is 3, and run.yml describes 2 ranks: give at most 2\n"),
        (
            ("--slurm", "--set", "compress=auto"),
            "error: run.yml: compress is 'auto', which simulates the plan ",
        ),
    ):
        mistaken = vpipe("train", "run.yml", *options, cwd=tmp_path)
        assert mistaken.code == 2
        assert mistaken.err.startswith(message)


def test_tasks_of_two_nodes_meet(slurm: Cluster, tmp_path: Path) -> None:
    """Each learns by SLURM's variables which rank it is, and by a file where rank 0 listens, and the secret."""
    write_config(tmp_path, 3)
    said = slurm.run("srun", "--nodes=2", "--ntasks=3", sys.executable, "-c", _MEET, cwd=tmp_path)
    first, second, third = sorted(map(json.loads, said.splitlines()), key=lambda rank: int(rank["RANK"]))
    assert {rank["WORLD_SIZE"] for rank in (first, second, third)} == {"3"}
    assert [rank["SLURMD_NODENAME"] for rank in (first, second, third)] == ["node1", "node1", "node2"]
    assert [rank["LOCAL_RANK"] for rank in (first, second, third)] == ["0", "1", "0"]
    assert [rank["LOCAL_WORLD_SIZE"] for rank in (first, second, third)] == ["2", "2", "1"]
    assert {rank["MASTER_ADDR"] for rank in (first, second, third)} == {slurm.addresses[0]}
    for name in ("MASTER_PORT", "secret"):
        assert len({rank[name] for rank in (first, second, third)}) == 1


@pytest.fixture
def submitted(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, Callable[[], list[str]]]]:
    """Submits the script of a run whose ranks are programs that only write down how they were started."""

    def submit(then: str, max_restarts: int = 0, settings: tuple[str, ...] = (), **resources: Any) -> Any:
        write_config(tmp_path, 2)
        program, tasks = tmp_path / "rank", tmp_path / "tasks"
        program.write_text(_TASK.format(tasks=tasks, then=then))
        program.chmod(0o755)
        monkeypatch.setattr(sbatch, "sys", SimpleNamespace(executable=str(program)))
        monkeypatch.chdir(tmp_path)
        for name in ("PATH", "SLURM_CONF"):
            monkeypatch.setenv(name, slurm.environment[name])
        arguments = ["train", str(tmp_path / "run.yml"), *settings]
        script = sbatch_script(
            read_config(Path("run.yml")), arguments, Resources(nodes=2, **resources), max_restarts
        )
        return sbatch.submit(script), partial(_tasks, tasks)

    return submit


def _tasks(path: Path) -> list[str]:
    """How each task was started: the first line of it, since an argument may have several."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted(line for line in lines if line[:1].isdecimal())


@pytest.mark.long
def test_a_job_that_has_saved_goes_back_into_the_queue(
    slurm: Cluster, submitted: Any, tmp_path: Path
) -> None:
    """`scancel --signal` signals the tasks alone, as SLURM does before the time limit."""
    nasty = "prompt=$(touch injected) `touch injected`; 'touch injected' \"\n#SBATCH --array=1-9"
    job, tasks = submitted('[ "${SLURM_RESTART_COUNT:-0}" = 1 ] && exit 0', settings=("--set", nasty))
    wait_until(lambda: len(tasks()) == 2, "both tasks")
    slurm.run("scancel", "--signal=TERM", job)
    wait_until(lambda: slurm.state(job) == "COMPLETED", "the end of the job")
    written = (tmp_path / "tasks").read_text()
    for rank in (0, 1):
        for restart in (0, 1):
            assert f"{rank} {restart} 0 -m vpipe train {tmp_path}/run.yml --set {nasty}\n" in written
    assert not (tmp_path / "injected").exists()


@pytest.mark.long
def test_a_job_that_was_preempted_comes_back_by_itself(slurm: Cluster, submitted: Any) -> None:
    job, tasks = submitted('[ "${SLURM_RESTART_COUNT:-0}" = 1 ] && exit 0')
    wait_until(lambda: len(tasks()) == 2, "both tasks")
    slurm.run("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true")
    wait_until(lambda: slurm.state(job) == "COMPLETED", "the end of the job")
    assert slurm.field(job, "Restarts") == "1"
    assert len(tasks()) == 4


@pytest.mark.long
def test_the_time_limit_comes_near(slurm: Cluster, submitted: Any) -> None:
    """SLURM sends the signal up to a minute early."""
    then = '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] && exit 0'
    job, tasks = submitted(then, time="2", others=("signal=TERM@60",))
    wait_until(lambda: slurm.state(job) == "COMPLETED", "the end of the job")
    assert slurm.field(job, "Restarts") == "1"
    assert len(tasks()) == 4


def test_a_cancelled_job_does_not_come_back(slurm: Cluster, submitted: Any) -> None:
    job, tasks = submitted("")
    wait_until(lambda: len(tasks()) == 2, "both tasks")
    slurm.run("scancel", job)
    wait_until(lambda: slurm.state(job) == "CANCELLED", "the end of the job")
    assert slurm.field(job, "Restarts") == "0"
    assert len(tasks()) == 2


@pytest.mark.long
def test_a_step_that_failed_is_started_again_in_the_same_job(slurm: Cluster, submitted: Any) -> None:
    job, tasks = submitted('[ "$TORCHELASTIC_RESTART_COUNT" = 0 ] && exit 1; exit 0', max_restarts=2)
    wait_until(lambda: slurm.state(job) == "COMPLETED", "the end of the job")
    assert [line.split()[:3] for line in tasks()] == [
        ["0", "0", "0"],
        ["0", "0", "1"],
        ["1", "0", "0"],
        ["1", "0", "1"],
    ]


@pytest.mark.parametrize(
    "given", [(), pytest.param(("../my run.yml", "--set", "epochs=2"), marks=pytest.mark.long)]
)
def test_the_script_of_the_guides(
    given: tuple[str, ...], slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sbatch ../run_vpipe.sh` in a folder below that of the script; a program stands in for vpipe."""
    shutil.copy(ROOT / "run_vpipe.sh", tmp_path)
    for name in ("bin", "runtime"):
        (tmp_path / name).mkdir()
    program = tmp_path / "bin/vpipe"
    program.write_text(_TASK.format(tasks=tmp_path / "tasks", then="exit 0"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    small = ("--gpus-per-node=0", "--nodes=2", "--wait")
    slurm.run("sbatch", *small, "../run_vpipe.sh", *given, cwd=tmp_path / "runtime")
    expected = " ".join(given or (f"{tmp_path}/configs/bert_4vpipe.yml",))
    lines = sorted((tmp_path / "tasks").read_text().splitlines())
    assert lines == [f"{rank} 0  train {expected}" for rank in range(4)]
    assert read_config(ROOT / "configs/bert_4vpipe.yml").ranks == 4


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_that_was_requeued_twice_ends_with_the_same_weights(slurm: Cluster, tmp_path: Path) -> None:
    """First its time limit comes near; then SLURM takes the nodes away. It goes on in its own folder."""
    write_config(tmp_path, 2, **ENDLESS)
    said = slurm.run(sys.executable, "-m", "vpipe", "train", "run.yml", "--slurm", "--nodes", 2, cwd=tmp_path)
    job = said.split()[2].rstrip(":")
    wait_for_line("Iteration 1,", tmp_path)
    slurm.run("scancel", "--signal=TERM", job)
    wait_for_line("resumed from", tmp_path)
    first = _updates(tmp_path)
    wait_for_line(f"Iteration {first + 1},", tmp_path)
    run = _take_nodes_away(slurm, job, tmp_path)
    assert slurm.field(job, "Restarts") == "2"
    assert (run / "output.log.0").read_text().count("resumed from") == 2
    assert not list((tmp_path / "runs").glob(".slurm-*"))
    _compare_with_undisturbed(run, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_tasks_plan_for_the_nodes_that_they_are_on(slurm: Cluster, tmp_path: Path) -> None:
    """The weights are those of a run on one host that is given the plan."""
    keys = {"machines": None, "stages": 2, "partition": "auto", "compress": "auto"}
    write_config(tmp_path, 2, **keys)
    said = slurm.run(
        "srun", "--nodes=2", "--ntasks=2", sys.executable, "-m", "vpipe", "train", "run.yml", cwd=tmp_path
    )
    assert "partition: auto: " in said
    assert "compress: auto: " in said
    (run,) = (tmp_path / "runs").glob("2*")
    nodes = len(set(slurm.addresses))
    assert len(json.loads((run / "profile.json").read_text()).get("hosts", {}).get("links", [])) == nodes * (
        nodes - 1
    )
    write_config(tmp_path, 2, partition=str(run / "plan.json"))
    _compare_with_undisturbed(run, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_launcher_in_a_job_goes_on_too(slurm: Cluster, tmp_path: Path) -> None:
    """A script that starts `vpipe train` without srun: all ranks are on one node. A shell would end at SIGTERM."""
    write_config(tmp_path, 2, **ENDLESS)
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\nexec {sys.executable} -m vpipe train run.yml\n")
    options = ("--parsable", "--requeue", "--open-mode=append", "--ntasks=2")
    job = slurm.run("sbatch", *options, "job.sh", cwd=tmp_path).strip()
    wait_for_line("Iteration 1,", tmp_path)
    run = _take_nodes_away(slurm, job, tmp_path)
    assert (run / "output.log.0").read_text().count("resumed from") == 1
    _compare_with_undisturbed(run, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ranks_in_containers_are_started_again_after_a_fault(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program stands in for Apptainer; a rank is killed in the first attempt."""
    (tmp_path / "image.sif").write_text("")
    (tmp_path / "work").mkdir()
    keys = {**ENDLESS, "max_updates": 12, "checkpoint_interval": 3, "directory": "work"}
    write_config(tmp_path, 2, **keys, container="image.sif")
    monkeypatch.setenv("PATH", apptainer.install(tmp_path / "bin")["PATH"])
    monkeypatch.setenv("VPIPE_FAULT", "rank=1,step=8,point=fwd,kind=kill")
    options = ("--slurm", "--nodes", 2, "--max-restarts", 1)
    said = slurm.run(sys.executable, "-m", "vpipe", "train", "run.yml", *options, cwd=tmp_path)
    job = said.split()[2].rstrip(":")
    wait_until(lambda: slurm.state(job) == "COMPLETED", "the end of the job")
    assert "stopped because rank 1 failed: " in (tmp_path / f"slurm-{job}.out").read_text()
    assert [call["rank"] for call in apptainer.calls(tmp_path / "bin")] == ["0", "0", "1", "1"]
    (run,) = (tmp_path / "runs").glob("2*")
    assert "resumed from" in (run / "output.log.0").read_text()
    monkeypatch.undo()  # a server that is started now outlives this test
    write_config(tmp_path, 2, **ENDLESS | {"max_updates": 12})
    _compare_with_undisturbed(run, tmp_path)


def _take_nodes_away(slurm: Cluster, job: str, folder: Path) -> Path:
    """Let SLURM requeue the job in mid-run, and the run end some updates later; its folder."""
    before = len(list(folder.glob("runs/*/checkpoints/step-*")))
    slurm.run("scontrol", "requeuehold", job)
    wait_until(lambda: slurm.state(job) == "PENDING", "the end of the attempt")
    assert len(list(folder.glob("runs/*/checkpoints/step-*"))) == before + 1
    write_config(folder, 2, **ENDLESS | {"max_updates": _updates(folder) + 3})
    slurm.run("scontrol", "release", job)
    wait_until(lambda: slurm.state(job) == "COMPLETED", "the end of the job")
    (run,) = (folder / "runs").glob("2*")
    assert not half_done(run)
    return run


def _compare_with_undisturbed(run: Path, folder: Path) -> None:
    elsewhere = folder / "undisturbed"
    elsewhere.mkdir()
    shutil.copy(folder / "run.yml", elsewhere)
    ended = vpipe("train", "run.yml", cwd=elsewhere)
    assert ended.code == 0, ended.said
    assert final_weights(run) == final_weights(next((elsewhere / "runs").glob("2*")))
    wait_until_gone(str(folder))


@pytest.mark.long
@pytest.mark.parametrize("mistake", ["tasks", "restarts", "machines", "option"])
def test_mistakes_are_one_line(mistake: str, slurm: Cluster, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"machines": ["node1:0", "node7:0"]} if mistake == "machines" else {}
    write_config(tmp_path, 2, **keys)
    train = [sys.executable, "-m", "vpipe", "train", "run.yml"]
    command, expected = {
        "tasks": (["srun", "--ntasks=3", *train], "run.yml describes 2 ranks and srun has started 3 tasks"),
        "restarts": (
            ["srun", "--ntasks=2", *train, "--max-restarts", "1"],
            "--max-restarts is 1: a rank that srun",
        ),
        "machines": (
            ["srun", "--nodes=2", *train],
            "machines names 'node7:0' for rank 1, which SLURM has placed on node2",
        ),
        "option": (
            [*train, "--slurm", "--partition", "none"],
            "error: sbatch refused the job: sbatch: error: ",
        ),
    }[mistake]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_task_that_the_plan_leaves_idle_waits(slurm: Cluster, tmp_path: Path) -> None:
    """The weights are those of a run without it."""
    planned = {"partition": [3, 2], "schedule": "1f1b", "minibatches": 2, "replicas": [1, 1], "idle": 1}
    (tmp_path / "plan.json").write_text(json.dumps(planned))
    write_config(tmp_path, 3, partition="plan.json", schedule="1f1b", max_updates=4)
    train = [sys.executable, "-m", "vpipe", "train", "run.yml"]
    said = slurm.run("srun", "--nodes=2", "--ntasks=3", *train, cwd=tmp_path)
    assert "rank 2 is idle: plan.json uses 2 of 3 ranks" in said
    assert not list(tmp_path.glob("runs/.slurm*"))  # where the tasks have met is forgotten
    write_config(tmp_path, 2, partition=[3, 2], schedule="1f1b", minibatches=2, max_updates=4)
    (run,) = (tmp_path / "runs").glob("2*")
    _compare_with_undisturbed(run, tmp_path)


def _updates(folder: Path) -> int:
    """Updates that the newest checkpoint has."""
    return max(int(path.name[5:]) for path in folder.glob("runs/*/checkpoints/step-*"))
