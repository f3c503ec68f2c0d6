"""Keys of the command line: `--set key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from vpipe.config.code import names_code
from vpipe.errors import ConfigError
from vpipe.system.files import parse_yaml

AUTO = "auto"
"""The value of `partition`, and of `schedule`, for a plan that is made before the run."""
PATHS = (
    "model", "pretrained", "data_dir", "tokenizer", "partition", "config_file", "directory", "container", "links",
)  # fmt: skip


def read_settings(written: Sequence[str]) -> dict[str, Any]:
    """Values as YAML reads them: `--set batch_size=16 --set replicas=[2,1]`.

    A path on the command line is relative to the current directory, unlike one in a file.
    """
    settings: dict[str, Any] = {}
    for text in written:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {_shown(text)}: write key=value, such as --set batch_size=16")
        try:
            settings[key.strip()] = parse_yaml(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {_shown(text)}: the value cannot be read as YAML") from None
    return {key: _from_here(key, value) for key, value in settings.items()}


def _from_here(key: str, value: Any) -> Any:
    if key == "python_path" and isinstance(value, list):
        return [str(Path(path).absolute()) if isinstance(path, str) else path for path in value]
    return str(Path(value).absolute()) if is_path(key, value) else value


def rank_arguments(config: Path, settings: Sequence[str]) -> list[str]:
    """The arguments that give a rank the same configuration in another directory: paths are absolute."""
    arguments = [str(config.absolute())]
    for key, value in read_settings(settings).items():
        text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
        arguments += ["--set", f"{key}={text}"]
    return arguments


def _shown(text: str) -> str:
    """The text, shortened to one line."""
    return text if len(text) <= 80 and text.isprintable() else repr(text[:80])


def is_path(key: str, value: Any) -> bool:
    """Whether the value is the path of a file or a directory."""
    if not isinstance(value, str):
        return False
    if (key == "partition" and value == AUTO) or (key == "model" and names_code(value)):
        return False
    return key in PATHS or (key == "schedule" and value.endswith(".csv"))
