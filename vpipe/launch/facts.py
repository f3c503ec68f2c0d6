"""The facts of a host that a run compares between hosts."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from vpipe import __version__
from vpipe.launch.mps import count_gpus
from vpipe.system.host_identity import host_identity


def host_facts() -> dict[str, Any]:
    try:
        torch = metadata.version("torch")  # to import it takes seconds
    except metadata.PackageNotFoundError:
        torch = "(not installed)"
    return {
        "vpipe": __version__,
        "source": _source(),
        "torch": torch,
        "python": ".".join(map(str, sys.version_info[:2])),
        "gpus": count_gpus(),
        "host": host_identity(),
        "ssh": os.environ.get("SSH_CONNECTION", "").split(),
        "time": time.time(),
    }


@cache
def _source() -> str:
    """A digest of vpipe's own code: an installation from a clone may have changed since its version."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
