"""The findings of `vpipe doctor`, also where things are missing."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomllib

from tests.announced import besides_announcements
from vpipe.cli import doctor
from vpipe.cli.doctor import EXTRAS, MachineFact, doctor_table, examine, print_facts
from vpipe.system.console import PlainConsole
from vpipe.system.host_memory import cores, free_memory

ROOT = Path(__file__).parents[2]


def found(what: str) -> MachineFact:
    (one,) = [finding for finding in examine() if finding.what == what]
    return one


def shown(findings: list[MachineFact]) -> str:
    console = PlainConsole(width=200, file=io.StringIO(), record=True)
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
    assert {package for package, _, _ in EXTRAS} < set(names)
    assert found("torch").value == metadata.version("torch")
    # What does not work says what follows from it.
    assert all(finding.advice for finding in findings if finding.ok is False)


def test_as_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [MachineFact("torch", "2.13", True), MachineFact("h5py", "not installed", None, "no shards")]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    print_facts(as_json=True)
    assert json.loads(capsys.readouterr().out) == [
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
    [
        ("2.8.1", False),
        ("2.9.0", True),
        ("2.13.0+cpu", True),
        ("3.0", True),
        ("1.99", False),
        ("of unknown version", True),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, ok: bool) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: version)
    finding = doctor._dependency("torch>=2.9")
    assert (finding.what, finding.value, finding.ok) == ("torch", version, ok)
    assert finding.advice == ("" if ok else "vpipe needs 2.9 or newer: pip install 'torch>=2.9'")


def test_every_declared_dependency_is_looked_at() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert all(doctor.REQUIREMENT.fullmatch(requirement) for requirement in declared), (
        "else it is not understood"
    )
    names = [re.split("[>=<~!]", requirement)[0] for requirement in declared]
    assert all(found(name).ok for name in names)
    assert set(doctor.CONSEQUENCES) <= set(names)


# Without torch it takes a second less; what is missing besides is the point.
BLOCKED = """
import sys
sys.modules["torch"] = sys.modules[sys.argv.pop(1)] = None
from vpipe.cli import main
main()
"""


def blocked(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """`vpipe` with these arguments, where this module cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, module, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("package", [*doctor.CONSEQUENCES, "numpy"])
def test_a_missing_dependency_is_named_whatever_needs_it(package: str) -> None:
    ended = blocked({"PyYAML": "yaml"}.get(package, package), "doctor", "--json")
    assert (ended.returncode, besides_announcements(ended.stderr)) == (0, [])
    wrong = [finding["what"] for finding in json.loads(ended.stdout) if finding["ok"] is False]
    assert set(wrong) == {"torch", package}


def test_the_text_where_no_table_can_be_drawn() -> None:
    ended = blocked("rich", "doctor")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("This machine: 2 of these will not work\nok python: ")
    assert "\nNO rich: not installed: no command but this one works: pip install 'rich'\n" in ended.stdout


def test_other_commands_say_what_they_miss() -> None:
    ended = blocked("pydantic", "train", "run.yml")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "error: pydantic cannot be imported, and vpipe needs it: `vpipe doctor` lists what is missing\n"
    )


def test_dependencies_where_vpipe_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", fail)
    assert doctor.declared() == list(doctor.CONSEQUENCES)


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
    for package, extra, without in EXTRAS:
        finding = found(package)
        assert (finding.ok, finding.value) == (None, "not installed")
        assert finding.advice == f"{without} (pip install 'vpipe[{extra}]')"


def test_the_extras_are_those_of_the_package() -> None:
    provided = metadata.metadata("vpipe").get_all("Provides-Extra")
    assert provided is not None
    assert {extra for _, extra, _ in EXTRAS} <= set(provided)


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
