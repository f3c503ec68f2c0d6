"""The script for sbatch: what it asks for, what it runs, and that nothing in a configuration can add to it.

`tests/end_to_end/test_slurm.py` submits it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.drawing import draws
from vpipe.config import RunConfig
from vpipe.config.file import read_config
from vpipe.errors import ConfigError, VPipeError
from vpipe.launch.sbatch import Resources, sbatch_script, submit

_SRUN = """\
#!{python}
import json, os, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
sys.exit({code})
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    path = tmp_path_factory.mktemp("config") / "my run.yml"
    path.write_text("stages: 4\n")
    return read_config(path)


def options(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script, re.MULTILINE)
    assert len(found) == script.count("SBATCH")
    return dict(found)


@pytest.mark.parametrize(
    ("resources", "asked"),
    [
        ({}, {"ntasks": "4"}),
        ({"nodes": 2}, {"ntasks": "4", "nodes": "2", "ntasks-per-node": "2"}),
        ({"nodes": 3}, {"ntasks": "4", "nodes": "3", "ntasks-per-node": "2"}),
        (
            {"gpus_per_node": 2, "cpus_per_task": 8},
            {"nodes": "2", "ntasks-per-node": "2", "gpus-per-node": "2", "cpus-per-task": "8"},
        ),
        ({"time": "2-12", "partition": "gpu"}, {"time": "2-12", "partition": "gpu"}),
        (
            {"others": ["account=physics", "exclusive", "--signal=TERM@300"]},
            {"exclusive": "", "signal": "TERM@300"},
        ),
        ({"others": ["constraint=[rack1|rack2]&fast"]}, {"constraint": "[rack1|rack2]&fast", "requeue": ""}),
    ],
)
def test_what_the_job_asks_for(resources: dict[str, Any], asked: dict[str, str], config: RunConfig) -> None:
    found = options(sbatch_script(config, ["train"], Resources(**resources)))
    assert found.items() >= asked.items()
    assert found["job-name"] == "my_run"


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"nodes": 5}, r"--nodes is 5, and .* describes 4 ranks: give at most 4"),
        ({"nodes": 1, "gpus_per_node": 2}, r"describes 4 ranks, and 1 nodes with 2 GPUs have 2: give more"),
        ({"time": "soon"}, r"--time is 'soon': write minutes"),
        ({"time": "1:00\n#SBATCH --wrap=x"}, r"--time is .*: give one word"),
        ({"partition": "gpu --wrap=x"}, r"--partition is 'gpu --wrap=x': give one word"),
        ({"others": ["comment='x'"]}, r"--sbatch comment is "),
        ({"others": ["wrap=rm"]}, r"--sbatch is 'wrap=rm': write an option of sbatch"),
        ({"others": ["ntasks=3"]}, r"--sbatch is 'ntasks=3'"),
        ({"others": ["account =x"]}, r"--sbatch is 'account =x'"),
        ({"others": ["account=x\n"]}, r"--sbatch account is "),
    ],
)
def test_mistakes(resources: dict[str, Any], message: str, config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=message):
        sbatch_script(config, ["train"], Resources(**resources))


def run_script(script: str, folder: Path, code: int, terminate: bool = False) -> tuple[int, list[list[str]]]:
    """The script as bash runs it, with programs in place of srun and scontrol; how these were called."""
    calls = folder / "calls"
    calls.write_text("")
    for name in ("srun", "scontrol"):
        program = folder / name
        program.write_text(_SRUN.format(python=sys.executable, calls=str(calls), code=code))
        program.chmod(0o755)
    if terminate:
        (folder / "srun").write_text(f"#!/bin/bash\necho '[\"srun\"]' >> {calls}\nkill $PPID\nexit {code}\n")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=script, text=True, env=environment, timeout=200, check=False)
    return done.returncode, [json.loads(line) for line in calls.read_text().splitlines()]


@draws(10)
@given(
    arguments=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20), max_size=4
    )
)
@example(arguments=["--set", "prompt=$(touch x) `id` ' \" \\ \n#SBATCH --array=1-9\n{code} %s"])
def test_arguments_arrive_as_they_are(arguments: list[str], config: RunConfig, tmp_path_factory: Any) -> None:
    script = sbatch_script(config, arguments, Resources())
    code, calls = run_script(script, tmp_path_factory.mktemp("script"), 0)
    assert code == 0
    assert calls == [["srun", "--kill-on-bad-exit=0", sys.executable, "-m", "vpipe", *arguments]]


@pytest.mark.parametrize(("code", "steps"), [(0, 1), (2, 1), (74, 1), (75, 1), (1, 3), (137, 3)])
def test_what_ended_for_good_is_not_started_again(
    code: int, steps: int, config: RunConfig, tmp_path: Path
) -> None:
    ended, calls = run_script(sbatch_script(config, ["train"], Resources(), max_restarts=2), tmp_path, code)
    assert ended == code
    requeued = [["scontrol", "requeue", "7"]] if code == 75 else []
    assert [call for call in calls if call[0] == "scontrol"] == requeued
    assert len(calls) - len(requeued) == steps


@pytest.mark.parametrize("code", [75, 1])
def test_a_job_that_is_ended_from_outside_does_nothing_more(
    code: int, config: RunConfig, tmp_path: Path
) -> None:
    script = sbatch_script(config, ["train"], Resources(), max_restarts=2)
    assert run_script(script, tmp_path, code, terminate=True) == (code, [["srun"]])


def test_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VPipeError, match="--slurm: there is no sbatch here"):
        submit("")
