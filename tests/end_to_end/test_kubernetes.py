"""The commands of the manifests of examples/kubernetes, with two hosts of this machine in place of pods."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.command import end
from tests.end_to_end.ssh_hosts import ADDRESSES, Bench
from tests.end_to_end.tiny import MODEL
from tests.unit.test_kubernetes import documents
from tests.waiting import TIMEOUT

PORT = "29500"


def pods(name: str) -> tuple[dict[str, object], list[tuple[list[str], dict[str, str]]]]:
    """The configuration; the arguments of torchrun and the variables of each pod, as Kubernetes would set them."""
    config, job = documents(name)
    if job["kind"] == "TrainJob":
        trainer = job["spec"]["trainer"]
        given = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"]}
        given |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
        runtime = {f"PET_{key}": str(value) for key, value in given.items()}
        made = [(trainer["args"], runtime | {"PET_NODE_RANK": str(index)}) for index in (0, 1)]
    else:
        (container,) = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
        made = [
            ([arg.replace("$(JOB_COMPLETION_INDEX)", str(i)) for arg in container["args"]], {})
            for i in (0, 1)
        ]
    return yaml.safe_load(config["data"]["run.yml"]), made


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["jobset.yml", "trainjob.yml"])
def test_the_pods_train_together(name: str, bench: Bench) -> None:
    """A small model, and a folder that both see in place of the volumes."""
    run, made = pods(name)
    small = MODEL | {"max_updates": 2, "evaluation_samples": 4, "max_samples": 64}
    (bench.folder / "run.yml").write_text(
        yaml.safe_dump(run | small | {"log_directory": str(bench.folder / "runs")})
    )
    placed = {
        "/config/run.yml": "run.yml",
        "--master-addr=vpipe-nodes-0-0.vpipe": f"--master-addr={ADDRESSES[0]}",
    }
    processes = []
    try:
        for index, (args, variables) in enumerate(made):
            command = [sys.executable, "-m", "torch.distributed.run", *(placed.get(arg, arg) for arg in args)]
            processes.append(
                subprocess.Popen(
                    bench.hosts.inside(index, *command),
                    cwd=bench.folder,
                    env={**os.environ, **variables, "VPIPE_SECRET": "of the Secret", "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        said = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            end(process)
    assert [process.returncode for process in processes] == [0, 0], said
    (folder,) = Path(bench.folder).glob("runs/2*")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["updates"] == 2, summary
    assert (folder / "output.log.3").exists()
    bench.wait_until_empty()
