"""The folder of a run, named after the time it started."""

from __future__ import annotations

import time
from pathlib import Path

from vpipe.errors import ConfigError


def make_run_folder(log_directory: Path) -> Path:
    """`<log_directory>/<timestamp>`; a run that starts within the same second gets a number behind it."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        folder = log_directory / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if log_directory.is_dir():
                continue
            raise ConfigError(f"log_directory is {str(log_directory)!r}: it is not a directory") from None
        except OSError as error:
            raise ConfigError(
                f"log_directory is {str(log_directory)!r}: no folder can be made there ({error.strerror}): "
                "give a directory that you may write to"
            ) from None
        return folder
    raise ConfigError(f"log_directory is {str(log_directory)!r}: it holds a thousand runs of this second")


def newest_runs(log_directory: Path) -> list[Path]:
    """The runs of a log directory, the newest first."""
    if not log_directory.is_dir():
        return []
    runs = [path for path in log_directory.iterdir() if (path / "config.yml").is_file()]
    return sorted(runs, key=lambda path: ((path / "config.yml").stat().st_mtime_ns, path.name), reverse=True)
