"""Runs whose plan leaves a rank idle, by each launcher; with the weights of a run that never had that rank."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.command import end, rank_process, start, vpipe, wait_for_line, wait_until_gone
from tests.end_to_end.ssh_hosts import ENDLESS, MACHINES, Bench
from tests.faults.runs import SMALL, failures, final_weights
from tests.waiting import TIMEOUT

PLAN = {"partition": [3, 2], "schedule": "vpipe", "replicas": [1, 1], "idle": 1}
THREE = [f"localhost:{rank}" for rank in range(3)]
KILL = "rank=1,step=7,point=fwd,kind=kill"
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "3")


def write(folder: Path, **keys: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    values = SMALL | {"partition": "plan.json", "machines": THREE} | keys
    (folder / "run.yml").write_text(yaml.safe_dump(values))


def newest(folder: Path) -> Path:
    return max(folder.glob("runs/2*"))


def plain_weights(folder: Path) -> dict[str, str]:
    write(folder, partition=PLAN["partition"], machines=THREE[:2])
    ended = vpipe("train", "run.yml", cwd=folder)
    assert ended.code == 0, ended.said
    return final_weights(newest(folder))


def test_our_launcher_starts_no_idle_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is killed, and the run restarted; then it is evaluated."""
    work = tmp_path / "work"
    write(work)
    monkeypatch.setenv("VPIPE_FAULT", KILL)
    ended = vpipe("train", "run.yml", "--max-restarts", 1, cwd=work)
    monkeypatch.delenv("VPIPE_FAULT")
    assert ended.code == 0, ended.said
    assert "plan.json uses 2 of 3 ranks: it is faster so" in ended.err
    assert not (newest(work) / "output.log.2").exists()
    assert [line.get("rank") for line in failures(newest(work))][:1] == [1]
    assert final_weights(newest(work)) == plain_weights(tmp_path / "plain")
    ended = vpipe("eval", "run.yml", cwd=work)
    assert ended.code == 0, ended.said
    assert "Evaluation loss: " in ended.out


@pytest.mark.long
@pytest.mark.timeout(600)
def test_under_torchrun_a_rank_waits_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with a stage is killed, and torchrun starts all three again; then the run is evaluated."""
    work = tmp_path / "work"
    write(work)
    monkeypatch.setenv("VPIPE_FAULT", KILL)
    again = (*TORCHRUN, "--max-restarts", "1", "-m", "vpipe")
    ended = vpipe("train", "run.yml", "--resume", "auto", cwd=work, launcher=again)
    monkeypatch.delenv("VPIPE_FAULT")
    assert ended.code == 0, ended.said
    line = "rank 2 is idle: plan.json uses 2 of 3 ranks; it waits for the end of the run"
    assert ended.out.count(line) == 2
    assert "stopped because rank 1 failed" in ended.err
    assert final_weights(newest(work)) == plain_weights(tmp_path / "plain")
    ended = vpipe("eval", "run.yml", cwd=work, launcher=(*TORCHRUN, "-m", "vpipe"))
    assert ended.code == 0, ended.said
    assert "Evaluation loss: " in ended.out
    wait_until_gone(str(work))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_torchrun_ends_an_idle_rank_with_the_others(tmp_path: Path, how: str) -> None:
    """Ctrl-C, or the idle rank is killed: the others save."""
    write(tmp_path, **ENDLESS)
    process = start("train", "run.yml", cwd=tmp_path, launcher=(*TORCHRUN, "-m", "vpipe"))
    try:
        wait_for_line("Iteration 3", tmp_path)
        idle = rank_process(2, tmp_path)
        assert idle is not None
        if how == "interrupt":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(idle, signal.SIGKILL)
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        end(process)
    assert process.returncode == 1, err
    assert "which are saved in " in out
    if how == "kill":
        assert "rank      : 2 (local_rank: 2)\n  exitcode  : -9" in err.partition("Root Cause")[2]
    wait_until_gone(str(tmp_path))


def planned(bench: Bench, machines: list[str]) -> dict[str, Any]:
    """The keys of a run on these machines, of which the plan leaves the last one idle."""
    path = bench.folder.parent / "plan.json"
    path.write_text(json.dumps(PLAN))
    return {"partition": str(path), "machines": machines}


def compare(bench: Bench, weights: dict[str, str], counts: tuple[int, int], keys: dict[str, Any]) -> None:
    """The run that has ended and one under torchrun, with so many ranks on each host, have these weights."""
    assert final_weights(bench.latest) == weights
    first, second = bench.torchrun(counts=counts, **keys)
    assert (first.code, second.code) == (0, 0), first.said + second.said
    assert "rank 2 is idle: " in second.out
    assert final_weights(bench.latest) == weights
    bench.wait_until_empty()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_idle_rank_of_another_host(bench: Bench, tmp_path: Path) -> None:
    """By ssh its host, which has no other rank, needs no sshd; torchrun waits for it there."""
    keys = planned(bench, [*[MACHINES[0]] * 2, MACHINES[1]])
    ended = bench.run(**keys)
    assert ended.code == 0, ended.said
    compare(bench, plain_weights(tmp_path / "plain"), (2, 1), keys)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_idle_rank_beside_one_that_is_not(bench: Bench, tmp_path: Path) -> None:
    """By ssh the host is given the plan, and starts one rank of its two; the rank is killed, and the run goes on."""
    bench.hosts.serve(1, own=bench.folder)
    keys = planned(bench, [MACHINES[0], *[MACHINES[1]] * 2])
    restart = ("train", "run.yml", "--max-restarts", "1")
    ended = bench.run(*restart, variables={"VPIPE_FAULT": KILL}, **keys)
    assert ended.code == 0, ended.said
    assert [line.get("rank") for line in failures(bench.latest)][:1] == [1]
    compare(bench, plain_weights(tmp_path / "plain"), (1, 2), keys)
