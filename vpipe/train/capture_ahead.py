"""A process that captures the model of a run while its ranks import torch: for hosts whose ranks are not forked.

    launcher   ▪ starts all of them
    this one     import ──── capture ──────────┐ kept for all runs of the user
    ranks        import ──── meet, build ─ ─ ─ ┴ read it, go on

Each rank would capture the model itself, and begin with it seconds later. A rank that comes too early waits
(`vpipe/system/user_cache.py`); where this process fails, the ranks capture, and report what is wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vpipe import __version__
from vpipe.config.file import read_config, resolved_yaml
from vpipe.launch.mps import count_gpus
from vpipe.launch.rank import LAUNCHER, end_with_launcher
from vpipe.system import user_cache
from vpipe.system.files import is_folder, read_text, write_text
from vpipe.train.preload import MODEL

if TYPE_CHECKING:
    from vpipe.config import RunConfig

CAPTURED = "captured"
"""Where names of models are kept whose graphs were captured: for those no process is started again."""
_PROGRAM = (
    "import sys; from vpipe.train.capture_ahead import capture_for_ranks; capture_for_ranks(*sys.argv[1:])"
)


@contextmanager
def capturing_ahead(config: RunConfig) -> Iterator[None]:
    """Around the start of ranks that are new interpreters, if their model was not captured before."""
    forked = not count_gpus()  # then the launcher captures
    if forked or config.code or config.container or not user_cache.keeps(CAPTURED) or _known(config):
        yield
        return
    with TemporaryDirectory(prefix="vpipe-capture-") as name:
        described = Path(name, "config.yml")
        write_text(described, resolved_yaml(config))
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(described), _name(config)],
            env={**os.environ, LAUNCHER: str(os.getpid()), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C of the terminal is the launcher's
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()


def capture_for_ranks(described: str, name: str) -> None:
    """The work of the process: what is captured is kept by `vpipe/graph/kept.py`."""
    end_with_launcher()
    from vpipe.pipeline.captured import captured
    from vpipe.system.start import collector_off
    from vpipe.train.workload import build_workload

    config = read_config(Path(described))
    with collector_off():
        work = build_workload(config, "meta")
        captured(work.model, work.batch, work.loss_fn, config.precision, config.chunked_loss)
    user_cache.keep(CAPTURED, name, lambda path: write_text(path, ""))


def _known(config: RunConfig) -> bool:
    return user_cache.find(CAPTURED, _name(config)) is not None


def _name(config: RunConfig) -> str:
    """A hash of what the graph of a named model depends on, as far as it is known without torch."""
    facts = config.model_dump(mode="json", include=set(MODEL))
    if config.model is not None:
        path = config.path(config.model)
        facts["model"] = read_text(path / "config.json" if is_folder(path) else path)
    versions = [__version__, sys.version, version("torch"), version("transformers")]
    return hashlib.sha256(json.dumps([facts, versions], sort_keys=True).encode()).hexdigest()[:32]
