"""What `vpipe doctor` finds, also where things are missing."""

import io
import json
import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from vpipe.cli import doctor
from vpipe.cli.doctor import EXTRAS, MachineFact, describe, doctor_table, examine
from vpipe.system.host_memory import cores, free_memory


def found(what: str) -> MachineFact:
    (one,) = [finding for finding in examine() if finding.what == what]
    return one


def shown(findings: list[MachineFact]) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(doctor_table(findings))
    return console.export_text()


def test_everything_is_looked_at() -> None:
    findings = examine()
    names = [finding.what for finding in findings]
    assert len(set(names)) == len(names)
    assert {
        "python",
        "torch",
        "transformers",
        "devices",
        "gloo",
        "nccl",
        "MPS control daemon",
        "cores",
    } < set(names)
    assert {"free memory", "shared-memory channel", "/dev/shm", "open files", "loopback"} < set(names)
    assert {package for _, package, _, _ in EXTRAS} < set(names)
    assert found("torch").value == metadata.version("torch")
    # What does not work says what follows from it.
    assert all(finding.advice for finding in findings if finding.ok is False)


def test_as_data() -> None:
    findings = [MachineFact("torch", "2.13", True), MachineFact("h5py", "not installed", None, "no shards")]
    assert json.loads(json.dumps(describe(findings))) == [
        {"what": "torch", "value": "2.13", "ok": True, "advice": ""},
        {"what": "h5py", "value": "not installed", "ok": None, "advice": "no shards"},
    ]


def test_table() -> None:
    text = shown([MachineFact("torch", "2.13", True), MachineFact("gloo", "no", False, "pip install 'x[y]'")])
    assert "1 of these will not work" in text
    assert "✗" in text
    assert "pip install 'x[y]'" in text  # brackets are no markup
    assert "all is well" in shown([MachineFact("torch", "2.13", True), MachineFact("nccl", "no", None)])


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = found("torch")
    assert finding.ok is False
    assert "torch" in finding.value
    assert "devices" not in [finding.what for finding in examine()]


@pytest.mark.parametrize(
    ("version", "ok"),
    [("2.8.1", False), ("2.9.0", True), ("2.13.0+cpu", True), ("3.0", True), ("1.99", False)],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, ok: bool) -> None:
    assert doctor._torch(SimpleNamespace(__version__=version), "").ok is ok


def cuda(**answers: Any) -> SimpleNamespace:
    return SimpleNamespace(cuda=SimpleNamespace(**answers))


def test_devices() -> None:
    one = SimpleNamespace(name="H200", total_memory=140 * 2**30)
    assert doctor._devices(
        cuda(device_count=lambda: 2, get_device_properties=lambda number: one)
    ) == MachineFact("devices", "0: H200, 140 GiB, 1: H200, 140 GiB", True)
    none = doctor._devices(cuda(device_count=lambda: 0))
    assert (none.value, none.ok) == ("no CUDA device", None)
    assert "CPU processes" in none.advice

    def broken() -> int:
        raise RuntimeError("driver\ntoo old")

    assert doctor._devices(cuda(device_count=broken)).value == "driver too old"


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert found("transformers").ok is False
    for _, package, extra, without in EXTRAS:
        finding = found(package)
        assert (finding.ok, finding.value) == (None, "not installed")
        assert finding.advice == f"{without} (pip install 'vpipe[{extra}]')"


def test_the_extras_are_those_of_the_package() -> None:
    provided = metadata.metadata("vpipe").get_all("Provides-Extra")
    assert provided is not None
    assert {extra for _, _, extra, _ in EXTRAS} <= set(provided)


@pytest.mark.parametrize(("threads", "ok"), [("1", True), ("100000", False), ("0", False), ("many", False)])
def test_threads(monkeypatch: pytest.MonkeyPatch, threads: str, ok: bool) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    finding = found("cores")
    assert finding.ok is ok
    assert f"OMP_NUM_THREADS is {threads}" in finding.value


def test_localhost_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    finding = found("loopback")
    assert finding.ok is False
    assert "/etc/hosts" in finding.advice


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path / "nowhere")
    assert found("/dev/shm").value == "none"


def test_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert found("MPS control daemon") == MachineFact(
        "MPS control daemon", "/usr/bin/nvidia-cuda-mps-control", True
    )


GIB = 2**30


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 8),
        (  # a limit around the own group
            {
                "proc/self/cgroup": "0::/outer/own\n",
                "sys/fs/cgroup/outer/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/outer/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            2,
        ),
        (  # version 1
            {
                "proc/self/cgroup": "3:cpu:/\n2:memory:/docker/1\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{6 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            5,
        ),
    ],
)
def test_free_memory(tmp_path: Path, files: dict[str, str], free: int) -> None:
    assert free_memory(machine(tmp_path, MEMINFO | files)) == free * GIB


def test_memory_that_nobody_tells(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None


def test_cores(tmp_path: Path) -> None:
    all_of_them = cores(tmp_path)
    assert all_of_them >= 1
    assert cores(machine(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000\n"})) == 0.5
    assert cores(machine(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000\n"})) == all_of_them
