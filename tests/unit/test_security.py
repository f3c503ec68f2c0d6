"""Nothing that is read runs: rows 21 to 23 of docs/reliability.md, and a look at the package's own code."""

import ast
import importlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import vpipe
from tests.checkpoints import alone, rewrite
from tests.examples import example
from vpipe import checkpoint
from vpipe.checkpoint import files
from vpipe.config.file import read_config
from vpipe.config.settings import read_settings
from vpipe.errors import ConfigError, VPipeError
from vpipe.train.models import build_model
from vpipe.train.save_policy import find_checkpoint

pytestmark = pytest.mark.usefixtures("capture_once")
launching = importlib.import_module("vpipe.train.launcher")


class Trap:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def sprung(tmp_path: Path) -> Iterator[Path]:
    """The folder that a trap makes: it must not be there in the end."""
    path = tmp_path / "sprung"
    yield path
    assert not path.exists(), "code of a file was run"


def refused(read: Callable[[], Any], message: str) -> None:
    with pytest.raises(VPipeError, match=message) as caught:
        read()
    assert "\n" not in str(caught.value)


# Row 21: a pickle, or a .pt with code, offered as a checkpoint


@pytest.mark.parametrize("format", ["torch", "pickle"])
def test_row_21_pickles_are_refused_unread(saved: Path, tmp_path: Path, sprung: Path, format: str) -> None:
    pickled = tmp_path / "model.pt"
    if format == "torch":
        torch.save({"weights": Trap(sprung)}, pickled)
    else:
        pickled.write_bytes(pickle.dumps(Trap(sprung)))
    sprung.mkdir()
    with pytest.raises(FileExistsError):  # the trap works
        pickle.loads(pickle.dumps(Trap(sprung)))
    sprung.rmdir()
    refused(
        lambda: find_checkpoint(str(pickled), tmp_path, print),
        "there is no good checkpoint: give `auto`, the folder",
    )
    refused(lambda: checkpoint.verify(pickled), "is a file: a checkpoint is a folder with a manifest.json")

    step = saved / "step-00000002"  # in the place of a file, with the right size and hash
    shard = step / "stage-000.safetensors"
    shutil.copy(pickled, shard)
    entry = {"size": shard.stat().st_size, "sha256": files.sha256(shard)}
    rewrite(step, lambda content: content["files"][shard.name].update(entry))
    load = lambda: alone(lambda pipe: checkpoint.load(pipe, step), example("sequential", layers=2))  # noqa: E731
    refused(load, f"cannot read {shard}: ")

    shutil.copy(pickled, step / "manifest.json")
    refused(lambda: checkpoint.verify(step), "manifest.json is damaged: it is not JSON")

    folder = tmp_path / "pretrained"
    folder.mkdir()
    shutil.copy(pickled, folder / "pytorch_model.bin")
    pretrained = lambda: alone(  # noqa: E731
        lambda pipe: checkpoint.load_pretrained(pipe, torch.nn.Module(), folder),
        example("sequential", layers=2),
    )
    refused(pretrained, "pickled weights, such as pytorch_model.bin, are not read")
    shutil.copy(pickled, folder / "model.safetensors")
    refused(pretrained, "cannot read .*model.safetensors")


def test_code_beside_a_model_is_not_run(tmp_path: Path, sprung: Path) -> None:
    content = {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForMaskedLM": "mine.Mine"},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "mine.py").write_text(f"import os\nos.mkdir({str(sprung)!r})\n")
    (tmp_path / "run.yml").write_text("model: config.json\n")
    refused(lambda: build_model(read_config(tmp_path / "run.yml"), "meta"), "transformers cannot read it")


HUB = {
    "kernel": {"attn_implementation": "user/kernel"},
    "kernel with a revision": {"_attn_implementation": "user/kernel@main:forward"},
    "fallback to a kernel": {"attn_implementation": "flash_attention_2"},
    "a local folder": {"attn_implementation": "./kernel"},
    "by part": {"attn_implementation": {"": "eager", "text_config": "user/kernel"}},
    "experts": {"experts_implementation": "user/kernel"},
    "experts of a hub": {"_experts_implementation": "sonicmoe"},
    "in a part": {"model_type": "llava", "text_config": {"attn_implementation": "user/kernel"}},
    "internal": {"_attn_implementation_internal": "user/kernel"},
    "renamed": {"attribute_map": {"kernel": "_attn_implementation"}, "kernel": "user/kernel"},
    "backbone": {"model_type": "detr", "backbone": "user/model", "use_timm_backbone": False},
    "another file": {"configuration_files": ["config.4.0.0.json"]},
    "too deep": {"a": json.loads("[" * 30 + "]" * 30)},
}


@pytest.mark.parametrize("name", HUB)
def test_a_model_names_nothing_of_a_hub(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed: the loader of kernels is not reached."""
    reached: list[object] = []
    for loader in ("transformers.modeling_utils.lazy_import_flash_attention",
                   "transformers.integrations.hub_kernels.get_kernel"):  # fmt: skip
        monkeypatch.setattr(loader, lambda *args, **keys: reached.append(args))
    content = {"model_type": "bert", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(content | HUB[name]))
    (tmp_path / "config.4.0.0.json").write_text(json.dumps(content | HUB["kernel"]))
    (tmp_path / "run.yml").write_text("model: config.json\n")
    refused(
        lambda: build_model(read_config(tmp_path / "run.yml"), "meta"), "code from a hub|elsewhere|nested"
    )
    assert not reached


def test_code_that_a_known_model_names_is_neither_run_nor_exported(tmp_path: Path, sprung: Path) -> None:
    content = {
        "model_type": "bert",
        "num_hidden_layers": 1,
        "attn_implementation": "eager",
        "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForMaskedLM": "user/repo--mine.Mine"},
        "custom_pipelines": {"x": {"impl": "mine.Mine"}},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "mine.py").write_text(f"import os\nos.mkdir({str(sprung)!r})\n")
    (tmp_path / "run.yml").write_text("model: config.json\n")
    model: Any = build_model(read_config(tmp_path / "run.yml"), "meta").model
    assert type(model).__name__ == "BertForMaskedLM"
    assert not {"auto_map", "custom_pipelines"} & set(model.config.to_dict())


# Row 22: a manifest with ../, an absolute path, a symlink


@pytest.mark.parametrize(
    "name",
    ["../stage-000.safetensors", "/etc/stage-000.safetensors", "a/stage-000.safetensors", "stage-000.safetensors\n",
     "stage-000.safetensors/../../x", "..", "", "stage-000.pt", "stage-０00.safetensors", "manifest.json"],
)  # fmt: skip
def test_row_22_files_elsewhere_are_refused(saved: Path, name: str) -> None:
    step = saved / "step-00000002"
    rewrite(step, lambda content: content.update(files={name: next(iter(content["files"].values()))}))
    refused(lambda: checkpoint.verify(step), "manifest.json: files")


@pytest.mark.parametrize("what", ["manifest.json", "stage-000.safetensors"])
def test_row_22_links_are_refused(saved: Path, what: str) -> None:
    step = saved / "step-00000002"
    outside = saved / "outside"
    shutil.move(step / what, outside)
    (step / what).symlink_to(outside)
    refused(lambda: checkpoint.verify(step), "is a symbolic link|has no manifest.json")
    assert checkpoint.newest(saved, lambda text: None) == saved / "step-00000001"


# Row 23: configurations that would like to be more than data


CONFIGS = {
    "misspelt key": ("bach_size: 3", "unknown key 'bach_size' .*did you mean 'batch_size'?"),
    "wrong type": ("batch_size: many", "batch_size is 'many': expected a whole number"),
    "object": ("seed: !!python/object/apply:os.mkdir ['TRAP']", "line 1: could not determine a constructor"),
    "name": ("seed: !!python/name:os.system", "line 1: could not determine a constructor"),
    "option for ssh": (
        "machines: ['-oProxyCommand=mkdir TRAP:0']",
        "expected host:GPU, such as 'localhost:0'",
    ),
    "option without blanks": ("machines: ['-oProxyCommand=x:0']", "expected host:GPU, such as 'localhost:0'"),
    "command": ("machines: ['localhost; mkdir TRAP:0']", "expected host:GPU, such as 'localhost:0'"),
    "substitution": ("machines: ['$(mkdir${IFS}TRAP):0']", "expected host:GPU, such as 'localhost:0'"),
    "shell in a number": ("module: 'vgpus=2; mkdir TRAP'", "module is .* expected text such as 'vgpus=4'"),
    "brackets without end": ("seed: " + "[" * 50_000, "line 1: brackets are nested too deep"),
    "a key twice": ("seed: 1\nbatch_size: 2\nseed: 3", "line 3: 'seed' stands twice"),
    "aliases": ("a: &a [x]\nb: *a", "line 2: aliases .* are not read"),
    "a few lines that stand for gigabytes": (
        "a: &a [x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{n}: &{n} [{', '.join(['*' + m] * 8)}]\n" for m, n in zip("abcdefghi", "bcdefghij", strict=True)
        ),
        "aliases .* are not read",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_row_23_configurations_run_nothing(tmp_path: Path, sprung: Path, name: str) -> None:
    text, message = CONFIGS[name]
    path = tmp_path / "run.yml"
    path.write_text(text.replace("TRAP", str(sprung)))
    refused(lambda: read_config(path), message)


@pytest.mark.parametrize(
    "key", ["log_directory", "directory", "data_dir", "container", "tokenizer", "prompt"]
)
def test_row_23_shells_see_no_names(
    tmp_path: Path, sprung: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may be as odd as it likes: it goes to the ranks as one argument of a list, or is refused."""
    monkeypatch.chdir(tmp_path)
    started: list[Any] = []
    monkeypatch.setattr(launching, "run_ranks_here", lambda *args, **kwargs: started.append((args, kwargs)))
    kind = {"model_type": "cpm"} if key == "prompt" else {}
    (tmp_path / "run.yml").write_text(yaml.safe_dump({**kind, key: f"x; mkdir {sprung} #"}))
    config = read_config(tmp_path / "run.yml")
    with suppress(ConfigError):  # there is no such directory
        launching.launch(config, ["train", str(tmp_path / "run.yml")])
    for (ranks, *_), _ in started:
        assert all(isinstance(argument, str) for argument in ranks.arguments)


def test_row_23_settings_of_the_command_line(sprung: Path) -> None:
    for value in (
        f"!!python/object/apply:os.mkdir ['{sprung}']",
        "!!bool x",
        "!!timestamp x",
        "&a [*a]",
        "[" * 3000,
    ):
        refused(lambda value=value: read_settings([f"seed={value}"]), "the value cannot be read as YAML")  # type: ignore[misc]


# The code of the package


FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing",
}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput",
    "subprocess.getstatusoutput", "torch.load", "torch.save", "torch.hub.load", "torch.jit.load", "yaml.unsafe_load",
    "yaml.full_load", "yaml.load_all", "tempfile.mktemp", "shutil.unpack_archive", "runpy.run_path", "runpy.run_module",
}  # fmt: skip
PICKLING_METHODS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "extractall",
}  # fmt: skip
"""Whatever object they are called on."""


def faults(source: str) -> list[str]:
    """What of a module could run or unpickle what it is given."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                whole = base + alias.name
                names[alias.asname or alias.name.split(".")[0]] = (
                    whole if alias.asname or base else alias.name.split(".")[0]
                )
                if FORBIDDEN_MODULES & set(whole.split(".")):
                    found.append(f"line {node.lineno}: imports {whole}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = _dotted(node.func, names)
            keywords = {k.arg: k.value for k in node.keywords}
            first = node.args[0] if node.args else None
            if called in FORBIDDEN_CALLS or called.rpartition(".")[2] in PICKLING_METHODS:
                found.append(f"line {node.lineno}: calls {called}")
            if called == "yaml.load" and not (
                len(node.args) == 2 and _dotted(node.args[1], names) == "_PlainLoader"
            ):
                found.append(f"line {node.lineno}: calls yaml.load with another loader")
            for key, allowed in (("shell", False), ("trust_remote_code", False), ("allow_pickle", False)):
                if key in keywords and getattr(keywords[key], "value", None) is not allowed:
                    found.append(f"line {node.lineno}: {key} is not {allowed}")
            if called.startswith("subprocess.") and isinstance(
                first, ast.Constant | ast.JoinedStr | ast.BinOp
            ):
                found.append(f"line {node.lineno}: a command that is one text")
    return found


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return "?"


PACKAGE = Path(vpipe.__file__).parent


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_the_package_neither_unpickles_nor_runs_what_it_reads(path: Path) -> None:
    assert not faults(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from multiprocessing import Pipe", "import torch.multiprocessing as mp", "eval('1')",
     "import torch as t\nt.load('x')", "from torch import load\nload('x')", "import os as o\no.system('x')",
     "import subprocess as s\ns.run('ls -l')", "import subprocess\nsubprocess.run(f'ls {x}')",
     "from subprocess import Popen\nPopen(['a'], shell=True)", "import yaml\nyaml.load(x, yaml.Loader)",
     "import yaml\nyaml.load(x)", "import torch.distributed as dist\ndist.all_gather_object(a, b)",
     "AutoModel.from_pretrained(x, trust_remote_code=True)", "import numpy as np\nnp.load(f, allow_pickle=flag)"],
)  # fmt: skip
def test_the_look_finds_what_it_looks_for(source: str) -> None:
    assert faults(source)


def test_the_look_lets_the_rest_pass() -> None:
    assert not faults(
        "import re, subprocess\nre.compile('x')\nmodel.eval()\nsubprocess.Popen([x, 'y'], shell=False)"
    )
