"""The examination of this machine: what it has, what would not work on it, and why.

It runs without any of vpipe's dependencies, so that it can name the ones that are missing.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.errors import printable
from vpipe.system.host_memory import cores, free_memory

if TYPE_CHECKING:
    from rich.table import Table

MIB, GIB = 2**20, 2**30
LITTLE_MEMORY = 2 * GIB
FEW_FILES = 1024
SHARED_MEMORY = Path("/dev/shm")

REQUIREMENT = re.compile(r"([\w.-]+)(?:>=([\d.]+))?")
MODULES = {"PyYAML": "yaml"}
"""What a package is imported as, where that is not its name."""
CONSEQUENCES = {
    "torch": "nothing but `vpipe schedule` works",
    "transformers": "no model can be built",
    "pydantic": "no configuration can be read",
    "PyYAML": "no configuration can be read",
    "typer": "no command but this one works",
    "rich": "no command but this one works",
}
EXTRAS = (
    ("pytorch-optimizer", "lamb", "`optimizer: lamb` is refused: it takes LAMB from there"),
    ("h5py", "hdf5", "`data_dir` cannot be a folder of HDF5 shards: nothing else reads them"),
    ("tensorboard", "tensorboard", "no TensorBoard scalars are written; metrics.jsonl always is"),
    ("matplotlib", "plot", "`vpipe compare` draws no plot: its table needs nothing"),
)


@dataclass(frozen=True)
class MachineFact:
    """One thing that was looked at. `ok`: it works, it does not, or (None) it is only good to know."""

    what: str
    value: str
    ok: bool | None = None
    advice: str = ""


def examine() -> list[MachineFact]:
    try:
        torch: Any = importlib.import_module("torch")
        failure = ""
    except Exception as error:  # a broken installation may raise anything
        torch, failure = None, " ".join(f"{type(error).__name__}: {error}".split())[:200]
    findings = [
        _python(),
        *(_dependency(each, failure if _parse(each)[0] == "torch" else "") for each in declared()),
    ]
    if torch is not None:
        findings += [_devices(torch), *_backends(torch)]
    findings += [_mps(torch), _cores(), _memory(), _channel(), _shared_memory(), _open_files(), _loopback()]
    return [*findings, *(_extra(*extra) for extra in EXTRAS)]


def declared() -> list[str]:
    """The dependencies that vpipe's own distribution declares, such as `pydantic>=2`, without those of its extras."""
    try:
        return [text for text in metadata.requires("vpipe") or [] if "extra ==" not in text]
    except metadata.PackageNotFoundError:  # run from its source
        return list(CONSEQUENCES)


def without_dependency(error: ModuleNotFoundError, arguments: Sequence[str]) -> int:
    """Run `vpipe doctor`, or refuse another command, where a dependency cannot be imported; the exit code."""
    if list(arguments[:1]) != ["doctor"]:
        print(
            f"error: {error.name} cannot be imported, and vpipe needs it: `vpipe doctor` lists what is missing",
            file=sys.stderr,
        )
        return 2
    print_facts("--json" in arguments)
    return 0


def is_dependency(module: str | None) -> bool:
    """Whether a module belongs to one of the declared dependencies."""
    top = (module or "").partition(".")[0]
    return top in [_module(_parse(requirement)[0]) for requirement in declared()]


def print_facts(as_json: bool) -> None:
    """As JSON or as a table; as plain lines where rich is missing."""
    findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
        return
    try:
        from vpipe.system.console import show
    except ModuleNotFoundError:
        print(_title(findings))
        for found in findings:
            mark = {True: "ok", False: "NO", None: "  "}[found.ok]
            line = f"{mark} {found.what}: {found.value}" + (f": {found.advice}" if found.advice else "")
            print(printable(line))
    else:
        show(doctor_table(findings))


def doctor_table(findings: Sequence[MachineFact]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=_title(findings))
    for column in ("", "what", "found", "what follows"):
        table.add_column(column, overflow="fold")
    marks = {True: Text("✓", style="green"), False: Text("✗", style="bold red"), None: Text("·")}
    for finding in findings:
        table.add_row(marks[finding.ok], finding.what, finding.value, finding.advice)
    return table


def _title(findings: Sequence[MachineFact]) -> str:
    wrong = sum(finding.ok is False for finding in findings)
    return "This machine: " + (f"{wrong} of these will not work" if wrong else "all is well")


def _python() -> MachineFact:
    found = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 10)
    return MachineFact("python", found, ok, "" if ok else "vpipe needs Python 3.10 or newer")


def _dependency(requirement: str, failure: str = "") -> MachineFact:
    """A declared dependency; `failure` says why it cannot be imported, where that was tried."""
    name, least = _parse(requirement)
    found = _version(name)
    fix = f"pip install '{requirement}'"
    if found is None or failure:
        follows = CONSEQUENCES.get(name, "vpipe does not train")
        return MachineFact(name, failure or "not installed", False, f"{follows}: {fix}")
    ok = _at_least(found, least)
    return MachineFact(name, found, ok, "" if ok else f"vpipe needs {least} or newer: {fix}")


def _parse(requirement: str) -> tuple[str, str]:
    """Name and smallest version of a declared dependency."""
    match = REQUIREMENT.match(requirement)
    return (match[1], match[2] or "0") if match else (requirement, "0")


def _devices(torch: Any) -> MachineFact:
    """Each GPU is looked at: a driver that does not answer is a finding too."""
    try:
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        return MachineFact(
            "devices", reason, False, "see what `nvidia-smi` says; ranks are CPU processes meanwhile"
        )
    if not found:
        advice = "ranks are CPU processes; `machines` then only counts them"
        return MachineFact("devices", "no CUDA device", None, advice)
    described = [
        f"{number}: {one.name}, {one.total_memory / GIB:.0f} GiB" for number, one in enumerate(found)
    ]
    return MachineFact("devices", ", ".join(described), True)


def _backends(torch: Any) -> list[MachineFact]:
    distributed = torch.distributed
    if not distributed.is_available():
        advice = "ranks cannot meet: install a build of torch with torch.distributed"
        return [MachineFact("torch.distributed", "not in this build", False, advice)]
    gloo, nccl = distributed.is_gloo_available(), distributed.is_nccl_available()
    # NCCL is of no use without a GPU.
    missed = False if torch.cuda.is_available() else None
    far = "ranks on several hosts cannot exchange tensors"
    return [
        MachineFact("gloo", "yes" if gloo else "no", gloo, "" if gloo else far),
        MachineFact(
            "nccl", "yes" if nccl else "no", nccl or missed, "" if nccl else f"{far} from GPU to GPU"
        ),
    ]


def _mps(torch: Any) -> MachineFact:
    """NVIDIA's daemon that lets the kernels of several processes run on one GPU at the same time."""
    path = shutil.which("nvidia-cuda-mps-control")
    if path is not None:
        return MachineFact("MPS control daemon", path, True)
    shared = torch is not None and torch.cuda.is_available()
    advice = "ranks that share a GPU take turns on it: install NVIDIA MPS to let them run side by side"
    return MachineFact(
        "MPS control daemon", "not found", None, advice if shared else "of use only with a GPU"
    )


def _cores() -> MachineFact:
    number = cores()
    threads = os.environ.get("OMP_NUM_THREADS")
    found = f"{number:g}, OMP_NUM_THREADS " + ("not set" if threads is None else f"is {threads}")
    if threads is None:
        advice = "vpipe gives each rank its share; under torchrun set OMP_NUM_THREADS yourself"
        return MachineFact("cores", found, None, advice)
    ok = threads.isdigit() and 1 <= int(threads) <= max(1, number)
    advice = f"the ranks would contend for cores: unset it, or set 1 to {max(1, int(number))}"
    return MachineFact("cores", found, ok, "" if ok else advice)


def _memory() -> MachineFact:
    free = free_memory()
    if free is None:
        return MachineFact("free memory", "unknown", None, "there is no /proc/meminfo here")
    ok = free >= LITTLE_MEMORY
    advice = "" if ok else "each rank is a process with torch in it: use fewer of them"
    return MachineFact("free memory", f"{free / GIB:.1f} GiB", ok, advice)


def _channel() -> MachineFact:
    """Ranks of one host exchange tensors in memory that has no name and so no place in /dev/shm."""
    ok = hasattr(os, "memfd_create")
    advice = "it counts as memory, not as /dev/shm" if ok else "needs Linux: give Pipeline channel='gloo'"
    return MachineFact("shared-memory channel", "memfd" if ok else "no memfd_create", ok, advice)


def _shared_memory() -> MachineFact:
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return MachineFact("/dev/shm", "none", None, "vpipe needs none; NCCL between GPUs of one host does")
    little = "; NCCL may: docker run --shm-size=1g" if free < 64 * MIB else ""
    return MachineFact(
        "/dev/shm", f"{free / GIB:.2f} GiB free", None, "vpipe itself does not use it" + little
    )


def _open_files() -> MachineFact:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MachineFact("open files", "no limit", True)
    advice = "" if soft >= FEW_FILES else f"ranks may run out of descriptors: ulimit -n {4 * FEW_FILES}"
    return MachineFact("open files", f"{soft} a process", soft >= FEW_FILES, advice)


def _loopback() -> MachineFact:
    """Ranks of one host meet at a port of the loopback interface."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    except OSError as error:
        return MachineFact(
            "loopback", f"no port: {error.strerror}", False, "ranks cannot meet: bring the interface lo up"
        )
    try:
        addresses = {
            str(entry[4][0]) for entry in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)
        }
    except OSError as error:
        advice = "torchrun with --master-addr localhost fails: add `127.0.0.1 localhost` to /etc/hosts"
        return MachineFact("loopback", f"localhost does not resolve: {error.strerror}", False, advice)
    return MachineFact("loopback", f"port {port} is free, localhost is {', '.join(sorted(addresses))}", True)


def _extra(package: str, extra: str, without: str) -> MachineFact:
    found = _version(package)
    if found is not None:
        return MachineFact(package, found, True)
    return MachineFact(package, "not installed", None, f"{without} (pip install 'vpipe[{extra}]')")


def _version(package: str) -> str | None:
    """The version of what is installed, without importing it."""
    try:
        if find_spec(_module(package)) is None:
            return None
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"
    except (ImportError, ValueError):
        return None


def _module(package: str) -> str:
    return MODULES.get(package, package.replace("-", "_"))


def _at_least(version: str, least: str) -> bool:
    """Whether a version is this one or newer; one that is not known is taken for new enough."""
    wanted = [int(part) for part in least.split(".")]
    numbers = [int(part) if part.isdigit() else 0 for part in version.split(".")[: len(wanted)]]
    return numbers >= wanted or not version[:1].isdigit()
