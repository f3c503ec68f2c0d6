"""The map of docs/architecture.md: its rows, the imports that there are, and the contracts that hold them."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]


def rows() -> dict[str, set[str]]:
    """Room to the rooms that it imports, as the map says."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+)` \|.*\| ([\w, ]+) \|$", text, flags=re.MULTILINE)
    return {room: set() if named == "nothing" else set(named.split(", ")) for room, named in found}


def imports() -> dict[str, set[str]]:
    """Room to the rooms that its files import."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "vpipe").rglob("*.py"):
        room = path.relative_to(ROOT / "vpipe").parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "vpipe":
                modules = [f"vpipe.{name.name}" for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Import):
                modules = [name.name for name in node.names]
            else:
                continue
            named = {module.split(".")[1] for module in modules if module.startswith("vpipe.")}
            found[room] |= named - {room, "__version__"}
    return {room: found[room] for room in found if not room.startswith("__")}


def test_each_row_names_what_its_room_imports() -> None:
    assert rows() == imports() | {"errors": set()}


def test_each_row_has_its_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    forbidden = {c["name"]: {m.removeprefix("vpipe.") for m in c["forbidden_modules"]} for c in contracts}
    for room, named in rows().items():
        assert forbidden[room] == set(rows()) - named - {room}, room


def test_arrows_point_down() -> None:
    above: set[str] = set()
    for room, named in rows().items():
        assert named <= above, f"{room} imports {sorted(named - above)}, which stand below it"
        above.add(room)


def test_no_other_file_stands_loose() -> None:
    loose = {path.name for path in (ROOT / "vpipe").glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "errors.py"}


def test_class_names_are_unique() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "vpipe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def names_of(module: str) -> set[str]:
    """What a module of vpipe binds at its top, and the modules in it."""
    path = ROOT.joinpath(*module.split("."))
    folder = {inner.stem for inner in path.glob("*")} if path.is_dir() else set()
    file = path / "__init__.py" if folder else path.with_suffix(".py")
    found = set(folder)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant):  # names that a package gives out lazily
            found.add(str(node.value))
    return found


def test_benchmarks_and_examples_import_what_there_is() -> None:
    """Nobody runs all of them after each change."""
    for path in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vpipe":
                missing = {alias.name for alias in node.names} - names_of(node.module or "")
                assert not missing, (
                    f"{path.relative_to(ROOT)}, line {node.lineno}: {node.module} has no {missing}"
                )
