"""The manifests of examples/kubernetes and the images of containers/: what can be checked without a cluster."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from vpipe.config import RunConfig
from vpipe.config.file import read_config

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None  # type: ignore[assignment]

ROOT = Path(__file__).parents[2]
GPU = "nvidia.com/gpu"


def documents(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    config, job = yaml.safe_load_all((ROOT / "examples/kubernetes" / name).read_text())
    return config, job


def run_of(config: dict[str, Any], tmp_path: Path) -> RunConfig:
    assert config["kind"] == "ConfigMap"
    (tmp_path / "run.yml").write_text(config["data"]["run.yml"])
    return read_config(tmp_path / "run.yml")


def check_container(container: dict[str, Any], run: RunConfig, name: str) -> list[str]:
    """The secret, and the command; what torchrun itself is given of it."""
    (secret,) = [entry for entry in container["env"] if entry["name"] == "VPIPE_SECRET"]
    assert secret["valueFrom"]["secretKeyRef"] == {"name": name, "key": "secret"}
    assert "value" not in secret
    assert container["command"] == ["torchrun"]
    args: list[str] = container["args"]
    start = args.index("-m")
    assert args[start:] == ["-m", "vpipe", "train", "/config/run.yml", "--resume", "auto"]
    assert run.log_directory.startswith("/training/")
    return args[:start]


def check_volumes(pod: dict[str, Any], container: dict[str, Any], name: str) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"config": "/config", "training": "/training"}
    assert volumes["config"]["configMap"] == {"name": name}
    assert "persistentVolumeClaim" in volumes["training"]


def test_jobset(tmp_path: Path) -> None:
    config, job = documents("jobset.yml")
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = job["spec"]["replicatedJobs"]
    inner = replicated["template"]["spec"]
    pod = inner["template"]["spec"]
    (container,) = pod["containers"]
    run = run_of(config, tmp_path)
    given = check_container(container, run, config["metadata"]["name"])
    assert "--node-rank=$(JOB_COMPLETION_INDEX)" in given
    options = get_args_parser().parse_args(
        [option.replace("$(JOB_COMPLETION_INDEX)", "1") for option in given] + ["script"]
    )
    assert int(options.nnodes) == inner["completions"] == inner["parallelism"]
    assert options.node_rank == 1
    assert int(options.nproc_per_node) == container["resources"]["limits"][GPU]
    assert int(options.nnodes) * int(options.nproc_per_node) == run.ranks
    first = f"{job['metadata']['name']}-{replicated['name']}-0-0.{job['spec']['network']['subdomain']}"
    assert options.master_addr == first
    assert container["ports"] == [{"containerPort": options.master_port}]
    assert inner["completionMode"] == "Indexed"  # it sets JOB_COMPLETION_INDEX
    check_volumes(pod, container, config["metadata"]["name"])


def test_trainjob(tmp_path: Path) -> None:
    config, job = documents("trainjob.yml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    run = run_of(config, tmp_path)
    # The runtime sets PET_NNODES and the like: what is given as an argument would be stronger.
    assert check_container(trainer, run, config["metadata"]["name"]) == []
    assert trainer["numNodes"] * trainer["numProcPerNode"] == run.ranks
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"][GPU]
    (override,) = job["spec"]["podTemplateOverrides"]
    (container,) = override["spec"]["containers"]
    check_volumes(override["spec"], container, config["metadata"]["name"])


@pytest.mark.skipif(tomllib is None, reason="no tomllib before Python 3.11")
@pytest.mark.parametrize("name", ["Dockerfile", "vpipe.def"])
def test_images_have_the_packages_of_the_project(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "containers" / name).read_text()
    (extras,) = re.findall(r'"/opt/vpipe\[([a-z0-9,]+)\]"', text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (torch,) = re.findall(r"pytorch/pytorch:(\d+\.\d+)", text)
    (least,) = re.findall(r"torch>=(\d+\.\d+)", " ".join(project["dependencies"]))
    assert tuple(map(int, torch.split("."))) >= tuple(map(int, least.split(".")))
    for copied in ("pyproject.toml", "README.md", "LICENSE", "vpipe"):
        assert re.search(rf"^\s*(COPY .*)?\b{re.escape(copied)} ", text, re.MULTILINE)
        assert (ROOT / copied).exists()
