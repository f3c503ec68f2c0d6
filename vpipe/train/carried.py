"""The files of a run that its other hosts are given: configuration, plan, table, model and tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vpipe.config.code import find_module
from vpipe.config.file import resolved_values, write_yaml
from vpipe.config.settings import is_path
from vpipe.system.files import LARGE, is_folder, read_text

if TYPE_CHECKING:
    from vpipe.config import RunConfig

MODULES = "modules.json"
"""Where the launcher's host has the modules that keys name, for messages of hosts that do not have them."""
CONFIG, PLAN = "run.yml", "plan.json"
FILES = {
    "schedule": "schedule.csv",
    "model": "config.json",
    "tokenizer": "tokenizer.json",
    "links": "links.json",
}
"""Keys that name a small file, or a folder that holds one of this name."""


def carried_files(config: RunConfig) -> dict[str, str]:
    """Names and texts. The configuration has every key, and names the others as files beside it."""
    files: dict[str, str] = {}
    changed: dict[str, Any] = {"config_file": None}  # partition and replicas have what it says
    for key, name in FILES.items():
        written = getattr(config, key)
        if is_path(key, written):
            path = config.path(written)
            files[name] = read_text(path / name if is_folder(path) else path, most=LARGE)
            changed[key] = name
    if config.planned is not None:
        files[PLAN] = read_text(config.planned[0])
        changed["partition"] = PLAN
    if config.code:
        files[MODULES] = json.dumps({key: find_module(config, key) for key in config.code})
    return files | {CONFIG: write_yaml(resolved_values(config) | changed)}
