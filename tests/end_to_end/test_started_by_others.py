"""Ranks that torchrun has started: each key takes effect, or is refused with the reason."""

from pathlib import Path
from typing import Any

import pytest

from tests import apptainer
from tests.end_to_end.command import vpipe
from tests.end_to_end.ssh_hosts import ADDRESSES, MACHINES, Bench
from tests.faults.runs import write_config


@pytest.mark.parametrize(
    ("options", "keys", "expected"),
    [
        (("--max-restarts", 2), {}, "--max-restarts is 2: a rank that torchrun has started cannot start the others "),
        (("--slurm",), {}, "--slurm is given to a rank, and each would submit a job: "),
        ((), {"python": "python3"}, "run.yml: python is 'python3', which is for ranks that `vpipe train` starts by "),
        ((), {"port": 29777}, "run.yml: port is 29777, but torchrun has set MASTER_PORT to '29500': "),
        ((), {"directory": "nowhere"}, "run.yml: directory is 'nowhere': there is no such directory, neither "),
        ((), {"container": "no.sif"}, "run.yml: container is 'no.sif': "),
    ],
)  # fmt: skip
def test_what_only_our_launcher_could_do_is_refused(
    options: tuple[object, ...],
    keys: dict[str, Any],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_config(tmp_path, 2, **keys)
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    ended = vpipe("train", "run.yml", *options, cwd=tmp_path)
    assert ended.code == 2, ended.said
    assert ended.err.startswith(f"error: {expected}")
    assert ended.err.count("\n") == 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_directory_and_container_hold_on_both_hosts(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "image.sif").write_text("")
    (tmp_path / "elsewhere").mkdir()
    environment = bench.hosts.environment() | apptainer.install(tmp_path / "bin")
    monkeypatch.setattr(bench.hosts, "environment", lambda: environment)
    ended = bench.torchrun(container="../image.sif", directory="../elsewhere", max_updates=2)
    assert [each.code for each in ended] == [0, 0], [each.said for each in ended]
    calls = apptainer.calls(tmp_path / "bin")
    assert [(call["rank"], call["pwd"]) for call in calls] == [
        (r, [str(tmp_path / "elsewhere")]) for r in "01"
    ]
    assert len(list(bench.folder.glob("runs/2*"))) == 1  # where the command was, not in `directory`


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("machines", "problem"),
    [
        (MACHINES[::-1], f"machines names '{MACHINES[1]}' for rank 0, which was started on {ADDRESSES[0]}"),
        (["localhost:0"] * 2, "machines names 'localhost:0' for rank 0 and 'localhost:0' for rank 1, and they were "),
    ],
)  # fmt: skip
def test_ranks_elsewhere_than_machines_says_are_refused(
    machines: list[str], problem: str, bench: Bench
) -> None:
    for ended in bench.torchrun(machines=machines):
        assert ended.code == 1
        assert f"error: run.yml: {problem}" in ended.err
