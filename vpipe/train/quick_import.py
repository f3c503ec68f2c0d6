"""The import of transformers, without what it looks up again each time.

It lists the files of all installed packages, and reads all of its own models twice for the names that they define:
0.8 of the 4.6 s of a processor that a rank's imports take. Both are kept for the user, by the state of those files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from vpipe.system import user_cache
from vpipe.system.files import write_text

MODULE = "transformers.utils.import_utils"
"""The module of transformers that does this."""
KIND = "imports"
"""Where it is kept for all runs of the user."""


def install() -> None:
    """From now on an import of transformers is quick."""
    if MODULE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads the module as ever, with two functions that remember."""

    def __init__(self, usual: Loader) -> None:
        self._usual = usual

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        real = importlib.metadata.packages_distributions
        importlib.metadata.packages_distributions = lambda: packages(real)
        try:
            self._usual.exec_module(module)
        finally:
            importlib.metadata.packages_distributions = real
        create: Callable[[Any], Any] | None = getattr(module, "create_import_structure_from_path", None)
        if create is not None:
            module.create_import_structure_from_path = structure(create)  # type: ignore[attr-defined]


def packages(real: Callable[[], Any]) -> Any:
    """The installed packages of each name that can be imported."""
    known = (file for entry in sys.path for file in Path(entry or ".").glob("*.*-info"))
    return remembered([sys.version, *sorted(_states(known))], lambda: dict(real()))


def structure(create: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function, which remembers the names of the folder of all models."""

    @wraps(create)
    def quick(path: Any) -> Any:
        folder = Path(path)
        folder = folder.parent if folder.suffix == ".py" else folder
        if folder.name != "models":
            return create(path)
        files = (Path(where, name) for where, _, names in os.walk(folder) for name in names)
        state = _states(file for file in files if file.suffix == ".py")
        return unpacked(remembered(sorted(state), lambda: packed(create(path))))

    return quick


def remembered(state: list[str], compute: Callable[[], Any]) -> Any:
    """What was computed when the state was the same, or is computed now: what JSON can hold."""
    name = hashlib.sha256("\n".join(state).encode()).hexdigest()[:16] + ".json"
    file = user_cache.find(KIND, name)
    if file is not None:
        with suppress(OSError, ValueError):
            return json.loads(file.read_text(encoding="utf-8"))
    made = compute()
    user_cache.keep(KIND, name, lambda path: write_text(path, json.dumps(made)))
    return made


def packed(node: Any) -> Any:
    """Names by folders, needed libraries (frozensets) and files, for JSON; their order stays."""
    if isinstance(node, dict):
        return [
            [sorted(key) if isinstance(key, frozenset) else key, packed(value)] for key, value in node.items()
        ]
    return {"names": sorted(node)}


def unpacked(node: Any) -> Any:
    if isinstance(node, dict):
        return set(node["names"])
    return {frozenset(key) if isinstance(key, list) else key: unpacked(value) for key, value in node}


def _states(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        with suppress(OSError):
            found = path.stat()
            yield f"{path} {found.st_size} {found.st_mtime_ns}"
