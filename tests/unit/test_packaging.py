"""The package that users install: its version, its files, and what it needs."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import tomllib
from typer.testing import CliRunner

import vpipe
from vpipe.cli import make_app

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST, NEWEST = (3, 10), (3, 13)
IMPORTED_AS = {"pyyaml": "yaml", "pytorch-optimizer": "pytorch_optimizer"}
OTHERS = {"pydantic_core", "sympy", "triton"}
"""Packages that come with pydantic and torch."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what the build reads, so that nothing is left in the clone."""
    source = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "vpipe", source / "vpipe", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = source.glob("*.whl")
    return built


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path for path in (ROOT / "vpipe").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert packed == {str(path.relative_to(ROOT)) for path in files}
    assert {"vpipe/py.typed", "vpipe/observe/report/report.html", "vpipe/observe/report/page.js"} <= packed


def test_the_wheel_runs_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for arguments in (["--version"], ["schedule", "1f1b", "--stages", "2", "--minibatches", "2"]):
        command = [sys.executable, "-m", "vpipe", *arguments]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
    assert "rank 1" in ended.stdout


def test_the_version_stands_in_one_place(wheel: Path) -> None:
    assert metadata(wheel)["Version"] == vpipe.__version__
    printed = CliRunner().invoke(make_app(), ["--version"])
    assert printed.stdout == f"vpipe {vpipe.__version__}\n"


def test_users_need_no_tools_of_developers(wheel: Path) -> None:
    """The metadata require at most what `dependencies` names; the code imports that and what is optional."""
    required = [line for line in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {package(line) for line in required} == set(map(package, PROJECT["dependencies"]))
    extras = PROJECT["optional-dependencies"]
    optional = {package(line) for name in extras.keys() - {"dev", "docs"} for line in extras[name]}
    allowed = {IMPORTED_AS.get(name, name) for name in {*map(package, PROJECT["dependencies"]), *optional}}
    assert set(imported()) - allowed - sys.stdlib_module_names - {"vpipe"} <= OTHERS


def package(requirement: str) -> str:
    found = re.match(r"[\w-]+", requirement)
    assert found is not None
    return found[0].lower()


def imported() -> Iterator[str]:
    """The first part of each module that vpipe imports."""
    for path in (ROOT / "vpipe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (name.name.split(".")[0] for name in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield str(node.module).split(".")[0]


def test_python_versions_are_declared() -> None:
    assert PROJECT["requires-python"] == ">={}.{}".format(*OLDEST)
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert named == [f"3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]


def test_every_file_has_the_grammar_of_the_oldest_python() -> None:
    for folder in ("vpipe", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=OLDEST)


COMPLETIONS = {
    "vpipe sch": ["schedule"],
    "vpipe schedule zb": ["zb-h1", "zb-v"],
    "vpipe schedule --sv": ["--svg"],
    "vpipe checkpoint ver": ["verify"],
    "vpipe train con": [],  # the shell offers files
}


@pytest.mark.parametrize("typed", COMPLETIONS)
def test_shells_complete_commands_options_and_schedules(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_VPIPE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        make_app()(prog_name="vpipe")
    assert not ended.value.code
    assert capsys.readouterr().out.split() == COMPLETIONS[typed]
