"""Runs over two hosts: `vpipe train` by ssh, torchrun, and what goes wrong between hosts."""

import json
import os
import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.command import end, vpipe, wait_for_line
from tests.end_to_end.ssh_hosts import ADDRESSES, ENDLESS, MACHINES, REPOSITORY, Bench
from tests.end_to_end.tiny import MODEL
from tests.faults.hosts import enter
from tests.faults.runs import SMALL, failures, final_weights
from tests.waiting import TIMEOUT, wait_until

SAMPLES, NARROW, WIDTH = 64, 512, 16384
WIDE = f"""
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones({WIDTH}))

    def forward(self, x):
        return torch.tanh(x * self.weight)

class Net(nn.Module):
    def __init__(self, narrow):
        super().__init__()
        self.front = nn.Linear({NARROW}, {WIDTH})
        self.middle = nn.Sequential(*[Scale() for _ in range(4)])
        self.narrow = nn.Linear({WIDTH}, {NARROW}) if narrow else nn.Identity()
        self.head = nn.Linear({NARROW} if narrow else {WIDTH}, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.narrow(self.middle(self.front(x)))), y)

def build():
    return Net(False)

def narrow_behind():
    return Net(True)

def samples():
    torch.manual_seed(0)
    return [dict(x=torch.randn({NARROW}), y=torch.randint(4, ())) for _ in range(1024)]
"""


def plain_weights(folder: Path, **keys: Any) -> dict[str, str]:
    """Of the same run on this host."""
    folder.mkdir()
    machines = ["localhost:0", "localhost:0"]
    (folder / "run.yml").write_text(yaml.safe_dump(SMALL | {"machines": machines} | keys))
    ended = vpipe("train", "run.yml", cwd=folder)
    assert ended.code == 0, ended.said
    return final_weights(max(folder.glob("runs/2*")))


def test_each_mistake_of_a_host_is_one_line_that_names_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank starts."""
    shutil.copytree(
        REPOSITORY / "vpipe", tmp_path / "other" / "vpipe", ignore=shutil.ignore_patterns("__pycache__")
    )
    other = tmp_path / "other" / "vpipe" / "__init__.py"
    other.write_text(re.sub(r'__version__ = ".*"', '__version__ = "0.0.7"', other.read_text()))
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    hosts = bench.hosts
    hosts.serve(1, {"PYTHONPATH": str(tmp_path / "other")})

    monkeypatch.setenv("PATH", hosts.environment()["PATH"])

    def said(**keys: Any) -> str:
        bench.write(**keys)
        enter_first = partial(enter, hosts.network.names[0])
        ended = vpipe("train", "run.yml", cwd=bench.folder, prepare=enter_first)
        assert ended.code == 2, ended.said
        (line,) = [line for line in ended.err.splitlines() if "starting 2 ranks" not in line]
        return line

    where = f"error: {ADDRESSES[1]}: "
    assert said().startswith(where + "has vpipe 0.0.7 and here ")
    assert said(python=str(bare)).startswith(where + f"{bare} has no vpipe, or another one (")
    assert said(python="/no/python").startswith(where + "there is no /no/python (")
    (hosts.folder / "known").write_text("")
    assert said().startswith(
        where + "its host key is not known here (Host key verification failed.): run `ssh "
    )
    (hosts.folder / "known").write_text(hosts.known)
    (hosts.folder / "authorized").write_text("")
    assert said().startswith(where + "it does not accept your key (")
    nobody = "10.231.7.9"
    assert said(machines=[MACHINES[0], f"{nobody}:0"]).startswith(f"error: {nobody}: it cannot be reached (")
    bench.wait_until_empty()


def test_a_module_that_another_host_does_not_have(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank starts; the line has the user's own paths, not those of what was brought to the host."""
    hosts = bench.hosts
    (bench.folder / "wide.py").write_text(WIDE)
    hosts.serve(1, own=bench.folder)
    left_out = dict.fromkeys((*MODEL, "synthetic_data", "max_samples"))
    own = {"model": "wide:build", "data": "wide:samples", "batch_size": 4, "partition": [1, 1]}
    bench.write(**left_out | own)
    monkeypatch.setenv("PATH", hosts.environment()["PATH"])
    enter_first = partial(enter, hosts.network.names[0])
    line = (
        f"error: {ADDRESSES[1]}: run.yml: model is 'wide:build': this host has no module 'wide', neither in "
        f"{bench.folder} nor among its installed packages: copy {bench.folder}/wide.py to the same path on this host, "
        "or set python_path to a folder that all hosts have"
    )
    for command in (("train", "run.yml"), ("doctor", "--machines", "run.yml")):
        ended = vpipe(*command, cwd=bench.folder, prepare=enter_first)
        assert ended.code == (2 if command[0] == "train" else 1), ended.said
        assert [said for said in ended.err.splitlines() if said.startswith("error")] == [line]
    bench.wait_until_empty()


def test_the_doctor_examines_all_hosts(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has another clock, and a configuration of its own."""
    (tmp_path / "late").mkdir()
    clock = "import time\nnow = time.time\ntime.time = lambda: now() - 3600\n"
    (tmp_path / "late" / "sitecustomize.py").write_text(clock)
    hosts = bench.hosts
    bench.write()
    path = {"PYTHONPATH": f"{tmp_path / 'late'}:{REPOSITORY}"}
    hosts.serve(1, path, bench.folder, {"run.yml": "stages: 7"})
    monkeypatch.setenv("PATH", hosts.environment()["PATH"])
    enter_first = partial(enter, hosts.network.names[0])
    ended = vpipe("doctor", "--machines", "run.yml", "--json", cwd=bench.folder, prepare=enter_first)
    assert ended.code == 1, ended.said
    where = f"error: {ADDRESSES[1]}: "
    clock_line, config_line = [line for line in ended.err.splitlines() if line.startswith("error")]
    assert clock_line.startswith(where + "its clock is 3600 s behind this host's: ")
    assert config_line.startswith(where + f"{bench.folder / 'run.yml'} has other content than here: ")
    found = json.loads(ended.out)
    assert [host["interface"].partition(" (")[2] for host in found["hosts"]] == [f"{a})" for a in ADDRESSES]
    hosts_file = json.loads((bench.folder / "links.json").read_text())["hosts"]
    assert hosts_file["ranks"] == [[0], [1]]
    links = hosts_file["links"]
    assert [(link["from"], link["to"]) for link in links] == [(0, 1), (1, 0)]
    assert all(link["bandwidth"] > 0 and link["latency"] > 0 for link in links)
    bench.wait_until_empty()


@pytest.mark.parametrize("machine", ["-oProxyCommand=touch x:0", "-b:0", "a b:0", "a;b:0", "$(x):0"])
def test_a_host_that_ssh_would_take_for_something_else_is_refused(machine: str, tmp_path: Path) -> None:
    from vpipe.config.file import read_config
    from vpipe.errors import ConfigError

    (tmp_path / "run.yml").write_text(yaml.safe_dump({"machines": ["localhost:0", machine]}))
    with pytest.raises(ConfigError, match="host:GPU"):
        read_config(tmp_path / "run.yml")


@pytest.mark.long
def test_two_hosts_train_as_one_does(bench: Bench, tmp_path: Path) -> None:
    bench.hosts.serve(1)
    ended = bench.run()
    assert ended.code == 0, ended.said
    assert "Iteration 12" in ended.out
    assert final_weights(bench.latest) == plain_weights(tmp_path / "plain")
    for rank in (0, 1):
        assert "Iteration 12" in (bench.latest / f"output.log.{rank}").read_text()
    bench.wait_until_empty()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_hosts_need_no_shared_folder(bench: Bench, tmp_path: Path) -> None:
    """Rank 1's host sees nothing of the launcher's folder; a rank there is killed, and the run resumes."""
    bench.hosts.serve(1, own=bench.folder)
    fault = "rank=1,step=7,point=fwd,kind=kill"
    ended = bench.run("train", "run.yml", "--max-restarts", "1", variables={"VPIPE_FAULT": fault})
    assert ended.code == 0, ended.said
    (failed, recovered) = failures(bench.latest)
    assert failed["rank"] == 1
    assert failed["how"].startswith("killed by SIGKILL (stage 1, its last action was ")
    assert "recovered" in recovered
    assert final_weights(bench.latest) == plain_weights(tmp_path / "plain")
    log = (bench.latest / "output.log.1").read_text()
    assert "VPIPE_FAULT: kill" in log
    assert "Iteration 12" in log
    assert (bench.latest / "events.1.json").exists()
    folders = [bench.folder / "runs", bench.hosts.seen_by(0, bench.folder / "runs")]
    before = [sorted(path.iterdir()) for path in folders]
    ended = bench.run("eval", "run.yml")
    assert ended.code == 0, ended.said
    assert "Evaluation loss: " in ended.out
    assert [sorted(path.iterdir()) for path in folders] == before
    bench.wait_until_empty()


@pytest.mark.long
def test_all_ranks_on_another_host(bench: Bench, tmp_path: Path) -> None:
    """The launcher's host has no rank and shares no folder: logs and figures come to it, checkpoints stay there."""
    bench.hosts.serve(1, own=bench.folder)
    process = bench.start(machines=[MACHINES[1], MACHINES[1]], max_updates=40)
    try:
        wait_until(lambda: bool(list(bench.folder.glob("runs/2*/status.1.json"))), "a status, while it runs")
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        end(process)
    assert process.returncode == 0, err
    assert "Iteration 30" in out
    left = {path.name for path in bench.latest.iterdir()}
    assert {"summary.json", "report.html", "metrics.jsonl", "output.log.0", "output.log.1"} <= left
    assert "checkpoints" not in left
    assert f"checkpoints and model are in {bench.latest} of {ADDRESSES[1]}" in err
    bench.wait_until_empty()


def torchrun(bench: Bench, **keys: Any) -> str:
    """The run under torchrun on two hosts that share no folder; the output of rank 0."""
    ended = bench.torchrun(**keys)
    assert [each.code for each in ended] == [0, 0], [each.said for each in ended]
    return ended[0].out


@pytest.mark.long
def test_torchrun_on_two_hosts_trains_as_one_host_does(bench: Bench, tmp_path: Path) -> None:
    torchrun(bench)
    assert final_weights(bench.latest) == plain_weights(tmp_path / "plain")


def measured_rates(run: Path) -> list[float]:
    """Of the links between hosts, in Mbit/s, that the profile of a run has."""
    links = json.loads((run / "profile.json").read_text())["hosts"]["links"]
    return [link["bandwidth"] * 8e-6 for link in links]


@pytest.mark.long
def test_torchrun_plans_for_the_hosts_that_it_finds(bench: Bench, tmp_path: Path) -> None:
    """Without `machines`; the weights are those of a run on one host that is given the plan."""
    said = torchrun(bench, machines=None, stages=2, partition="auto", compress="auto")
    assert "partition: auto: " in said
    assert "compress: auto: no link bounds an update" in said  # of 8 KiB
    assert len(measured_rates(bench.latest)) == 2
    plan = str(bench.latest / "plan.json")
    assert final_weights(bench.latest) == plain_weights(tmp_path / "plain", partition=plan)


def run_wide(bench: Bench, **keys: Any) -> str:
    """A run of a model of our own, with a plan of its own, over 100 Mbit/s, on hosts that share no folder."""
    bench.hosts.network.slow_down("100mbit")
    (bench.folder / "wide.py").write_text(WIDE)
    bench.hosts.serve(1, own=bench.folder, files={"wide.py": WIDE})
    keys |= {"data": "wide:samples", "batch_size": SAMPLES, "schedule": "1f1b", "minibatches": 2}
    left_out = dict.fromkeys((*MODEL, "synthetic_data", "max_samples"))
    ended = bench.run(**left_out | keys, optimizer="sgd", stages=2, partition="auto", max_updates=6)
    assert ended.code == 0, ended.said
    assert all(20 < rate < 105 for rate in measured_rates(bench.latest))
    bench.wait_until_empty()
    return ended.out


@pytest.mark.long
def test_hosts_plan_by_the_links_between_them(bench: Bench) -> None:
    """The cut is where 128 KiB go from stage to stage and not 4 MiB, though it is at one end of the model."""
    run_wide(bench, model="wide:narrow_behind")
    profile = json.loads((bench.latest / "profile.json").read_text())
    plan = json.loads((bench.latest / "plan.json").read_text())
    assert profile["blocks"][plan["partition"][0] - 1]["boundary_bytes"] == 4 * SAMPLES * NARROW


@pytest.mark.long
def test_hosts_compress_where_a_link_bounds_an_update(bench: Bench) -> None:
    """The cable carries a half or a quarter of the activations, and what measures it and evaluates."""
    before = bench.hosts.network.sent()
    said = run_wide(bench, model="wide:build", compress="auto")
    sent = bench.hosts.network.sent() - before
    ((link, mode),) = yaml.safe_load((bench.latest / "config.yml").read_text())["compress"].items()
    assert link == "/".join(ADDRESSES)
    assert f"compress: auto: {mode} between {ADDRESSES[0]} and {ADDRESSES[1]}: an update takes " in said
    activations = {"bf16": 1 / 2, "int8": 1 / 3.94}[mode] * 4 * SAMPLES * WIDTH
    assert 12 * activations < sent < 13 * activations + 8e6


@pytest.mark.long
def test_a_link_that_is_cut_and_restored(bench: Bench, tmp_path: Path) -> None:
    """Row 38 of docs/reliability.md."""
    bench.hosts.serve(1)
    # Far more updates than are made before the link is cut.
    keys = {"max_updates": 400, "epochs": 20, "checkpoint_interval": 20, "heartbeat_limit": 10}
    process = bench.start("train", "run.yml", "--max-restarts", "1", **keys)
    try:
        wait_for_line("Iteration 30", bench.folder)
        bench.hosts.network.cut()
        wait_until(lambda: bool(failures(bench.latest)), "the failure")
        (failed,) = failures(bench.latest)
        assert failed["rank"] == 1
        lost = f"host {ADDRESSES[1]}, of stage 1, is lost: nothing was heard from it for "
        heartbeat = "no heartbeat for "
        assert failed["how"].startswith((lost, heartbeat))
        wait_until(lambda: not bench.hosts.processes(1), "the end of the host that was cut off")
        bench.hosts.network.restore()
        _, err = process.communicate(timeout=TIMEOUT)
    finally:
        end(process)
    assert process.returncode == 0, err
    assert "the run trains again, " in err
    assert final_weights(bench.latest) == plain_weights(tmp_path / "plain", **keys)
    bench.wait_until_empty()


@pytest.mark.long
@pytest.mark.parametrize("how", ["interrupt", "kill", "ssh", "agent"])
def test_nothing_is_left_on_any_host(bench: Bench, how: str) -> None:
    """Ctrl-C; the launcher, its ssh, or the other host's agent killed."""
    bench.hosts.serve(1)
    process = bench.start(**ENDLESS)
    try:
        wait_for_line("Iteration 3", bench.folder)
        if how == "interrupt":
            os.killpg(process.pid, signal.SIGINT)
        elif how == "kill":
            process.kill()
        else:
            number, text = (0, "ssh") if how == "ssh" else (1, "vpipe.train.host")
            (victim, *_) = [p for p in bench.hosts.processes(number) if text in _command(p)[:60]]
            os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        end(process)
    bench.wait_until_empty()
    if how == "interrupt":
        assert process.returncode == 75, err
        assert "go on with --resume auto" in out
    if how in ("ssh", "agent"):
        assert process.returncode == 1
        lost = f"rank 1 failed: host {ADDRESSES[1]}, of stage 1, is lost: the connection to it ended"
        assert f"error: {lost}" in err
        assert f"stopped because {lost}" in (bench.latest / "output.log.0").read_text()


def _command(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
