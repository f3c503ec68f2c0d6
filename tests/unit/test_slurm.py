"""Tasks of SLURM as ranks, by the variables that SLURM sets; `tests/end_to_end/test_slurm.py` has a real cluster."""

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawing import draws
from vpipe.config import RunConfig
from vpipe.config.file import read_config
from vpipe.errors import ConfigError, PeerError
from vpipe.launch import meeting, slurm
from vpipe.launch.meeting import MEETING, Meeting, forget_meeting, read_meeting, write_meeting
from vpipe.launch.rank import LAUNCHED
from vpipe.launch.slurm import check_machine, job_folder, join_step, node_names, this_step
from vpipe.record.run_folder import make_log_directory
from vpipe.system.environment import LISTENER, SECRET

TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_CLUSTER_NAME": "here",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "1",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURMD_NODENAME": "node2",
    "SLURM_SRUN_COMM_PORT": "4711",
    "SLURM_CPUS_PER_TASK": "3",
}
"""What a task of `srun --nodes=2 --ntasks=2` finds in its environment."""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An environment of this test's own, which stands for that of a process."""
    own: dict[str, str] = {}
    for module in (slurm, meeting):
        fake = SimpleNamespace(**{name: getattr(os, name) for name in dir(os)})
        fake.environ = own
        monkeypatch.setattr(module, "os", fake)
    yield own
    if LISTENER in own:
        os.close(int(own[LISTENER]))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "run.yml").write_text("stages: 2\nrendezvous_limit: 200\n")
    return read_config(tmp_path / "run.yml")


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("gpu-[08-11]", ["gpu-08", "gpu-09", "gpu-10", "gpu-11"]),
        ("rack[1-2]n[01,07],login", ["rack1n01", "rack1n07", "rack2n01", "rack2n07", "login"]),
        ("a,b-2.cluster,c[3]", ["a", "b-2.cluster", "c3"]),
        ("x[1-2]-ib", ["x1-ib", "x2-ib"]),
        ("", []),
        ("odd[a-b],next", []),
    ],
)
def test_names_of_nodes(written: str, names: list[str]) -> None:
    assert list(node_names(written)) == names


@draws(50)
@given(st.lists(st.integers(0, 300), min_size=1, unique=True), st.integers(1, 4))
def test_every_node_is_named_once(numbers: list[int], width: int) -> None:
    names = [f"n{number:0{width}}" for number in numbers]
    written = f"n[{','.join(f'{number:0{width}}' for number in numbers)}]"
    assert list(node_names(written)) == names


def test_a_task_is_a_rank() -> None:
    step = this_step(TASK)
    assert step is not None
    assert (step.rank, step.size, step.local_rank, step.local_size) == (1, 2, 0, 1)
    assert step.nodes == ["node1", "node2"]


@pytest.mark.parametrize(
    "number",
    [None, "", "4294967290", "4294967291"],  # none; the shell of salloc; the batch script
)
def test_what_srun_has_not_started_is_no_task(number: str | None) -> None:
    kept = {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"}
    assert this_step(kept if number is None else kept | {"SLURM_STEP_ID": number}) is None


def test_a_step_without_its_other_variables_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"SLURM_STEP_ID is 0, but the other variables .*SLURM_PROCID"):
        this_step({name: value for name, value in TASK.items() if name != "SLURM_PROCID"})


def test_ranks_meet_by_a_file(
    environment: dict[str, str], config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes first and waits; then rank 0 writes where it listens."""
    runs = tmp_path / "runs"
    step = this_step(TASK)
    assert step is not None
    environment |= TASK
    found: list[Meeting] = []
    place = runs / step.meeting
    make_log_directory(runs)
    waiting = threading.Thread(target=lambda: found.append(read_meeting(place, 200)))
    waiting.start()
    first = step._replace(rank=0, node="node1", nodes=["node1"])
    join_step(first, config, ["train", "run.yml"], runs)
    waiting.join()
    assert found[0].secret == environment[SECRET]
    assert len(environment[SECRET]) == 64
    assert environment["MASTER_PORT"] == str(found[0].port)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert Path(environment[LAUNCHED]).parent == runs
    assert environment["OMP_NUM_THREADS"] == "3"
    forget_meeting()
    assert not place.exists()
    assert [path.name for path in runs.iterdir()] == [Path(environment[LAUNCHED]).name]


def test_another_number_of_tasks_than_ranks(environment: dict[str, str], config: RunConfig) -> None:
    step = this_step(TASK | {"SLURM_STEP_NUM_TASKS": "3"})
    assert step is not None
    with pytest.raises(
        ConfigError, match=r"describes 2 ranks and srun has started 3 tasks: use srun --ntasks=2"
    ):
        join_step(step, config, ["train"], config.source.parent)


def test_why_rank_0_cannot_listen_is_known_to_all(
    environment: dict[str, str], config: RunConfig, tmp_path: Path
) -> None:
    step = this_step(TASK)
    assert step is not None
    environment |= TASK | {"MASTER_ADDR": "203.0.113.1"}  # an address that no host has
    with pytest.raises(PeerError, match=r"rank 0 cannot listen on 203.0.113.1"):
        join_step(step._replace(rank=0), config, ["train"], tmp_path / "runs")
    with pytest.raises(PeerError, match=r"stopped because rank 0 failed: rank 0 cannot listen"):
        join_step(step, config, ["train"], tmp_path / "runs")


def test_a_log_directory_that_cannot_be_is_refused_by_every_rank(
    environment: dict[str, str], config: RunConfig, tmp_path: Path
) -> None:
    step = this_step(TASK)
    assert step is not None
    (tmp_path / "file").write_text("")
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=r"log_directory is .*: no folder can be made there"):
            join_step(step._replace(rank=rank), config, ["train"], tmp_path / "file/runs")


@pytest.mark.parametrize("what", ["mode", "link", "damaged", "another user"])
def test_a_file_that_somebody_else_may_have_made_is_not_believed(
    what: str, environment: dict[str, str], tmp_path: Path
) -> None:
    place = tmp_path / "meeting"
    write_meeting(place, Meeting("127.0.0.1", 1, "s"))
    assert environment[MEETING] == str(place)
    if what == "mode":
        place.chmod(0o640)
    elif what == "link":
        place.rename(tmp_path / "other")
        place.symlink_to(tmp_path / "other")
    elif what == "damaged":
        place.write_text('{"address": "127.0.0.1"}')
    elif os.geteuid():
        pytest.skip("only root can give a file to another user")
    else:
        os.chown(place, 65534, 65534)
    with pytest.raises(PeerError, match="meeting: "):
        read_meeting(place, 200)


def test_with_a_secret_of_the_users_the_file_has_none(
    environment: dict[str, str], config: RunConfig, tmp_path: Path
) -> None:
    step = this_step(TASK)
    assert step is not None
    environment |= TASK | {SECRET: "given"}
    join_step(step._replace(rank=0), config, ["train"], tmp_path)
    assert "given" not in (tmp_path / step.meeting).read_text()
    assert environment[SECRET] == "given"
    assert read_meeting(tmp_path / step.meeting, 200).secret == ""


def test_a_requeued_job_goes_on_in_its_own_folder(environment: dict[str, str], tmp_path: Path) -> None:
    def folder(**task: Any) -> Path:
        environment.clear()
        environment.update(TASK | {name: str(value) for name, value in task.items()})
        made = job_folder(tmp_path, arguments)
        (made / "config.yml").touch()
        return made

    arguments = ["train", "/a/run.yml"]
    first = folder()
    other = folder(SLURM_JOB_ID=8)
    arguments = ["train", "/a/other.yml"]
    second = folder()
    assert len({first, other, second}) == 3
    assert folder(SLURM_RESTART_COUNT=1) == second
    arguments = ["train", "/a/run.yml"]
    assert folder(SLURM_RESTART_COUNT=2) == first
    assert folder(SLURM_JOB_ID=9, SLURM_RESTART_COUNT=1) not in (first, other, second)
    assert folder() != first  # not requeued: another run


def test_machines_must_be_where_slurm_has_placed_the_ranks(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "this_step", lambda: this_step(TASK))
    (tmp_path / "run.yml").write_text("machines: ['localhost:0', 'node2:0', 'node3:0']\n")
    config = read_config(tmp_path / "run.yml")
    check_machine(config, 0)
    check_machine(config, 1)
    with pytest.raises(
        ConfigError, match=r"machines names 'node3:0' for rank 2, which SLURM has placed on node2"
    ):
        check_machine(config, 2)
