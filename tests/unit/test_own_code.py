"""A user's own model, data and loss, named by a configuration: every command works, mistakes are one line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.own_model import RUN, SOURCE
from vpipe.cli import make_app
from vpipe.config.file import read_config, resolved_yaml
from vpipe.config.settings import read_settings
from vpipe.errors import ConfigError, VPipeError
from vpipe.train.datasets import own_datasets
from vpipe.train.planning import cached_profile
from vpipe.train.workload import build_workload
from vpipe.verify import verify_config


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration in a folder with its module; the process is elsewhere."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "net.py").write_text(SOURCE)
    (folder / "run.yml").write_text(RUN)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(str(folder))  # so that it is taken off again
    return folder / "run.yml"


def test_a_workload_is_the_users_own(run: Path) -> None:
    work = build_workload(read_config(run))
    assert type(work.model).__name__ == "Net"
    assert work.batch["ids"].shape == (4, 6)
    assert torch.equal(work.batch["weights"], work.make_batch(0)["weights"])  # drawn from the sample's number
    assert not torch.equal(work.batch["weights"], work.make_batch(1)["weights"])
    assert work.loss_fn is not None
    again = build_workload(read_config(run)).model  # the seed is the configuration's
    assert all(torch.equal(a, b) for a, b in zip(work.model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "vpipe"])
def test_verify(run: Path, schedule: str) -> None:
    assert verify_config(read_config(run, {"schedule": schedule}), updates=2).ok


def test_the_example_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/python.md").read_text(encoding="utf-8")
    (tmp_path / "run.yml").write_text(page.split("```yaml\n")[1].split("```")[0])
    (tmp_path / "my_module.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert verify_config(read_config(tmp_path / "run.yml"), updates=1).ok


def test_blocks_and_plan(run: Path) -> None:
    app, runner = make_app(), CliRunner()
    blocks = json.loads(runner.invoke(app, ["blocks", str(run), "--json"], catch_exceptions=False).stdout)
    assert blocks["model"] == "Net"
    assert len(blocks["blocks"]) == 4
    planned = runner.invoke(app, ["plan", str(run), "--json"], catch_exceptions=False)
    assert sum(json.loads(planned.stdout)["partition"]) == 4


def test_a_profile_is_kept_until_the_code_changes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VPIPE_CACHE", str(run.parent / "kept"))
    kept = cached_profile(read_config(run))
    monkeypatch.setattr("vpipe.train.profiling.profile_config", lambda config: pytest.fail("measured again"))
    assert cached_profile(read_config(run)) == kept
    (run.parent / "net.py").write_text(
        SOURCE.replace("nn.Linear(8, 16)", "nn.Linear(8, 32)").replace("16, 8", "32, 8")
    )
    (run.parent / "other").mkdir()
    (run.parent / "net.py").rename(run.parent / "other/net.py")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        cached_profile(read_config(run, {"python_path": ["other"]}))


def test_a_resolved_configuration_finds_the_code_from_anywhere(run: Path, tmp_path: Path) -> None:
    (tmp_path / "resolved.yml").write_text(resolved_yaml(read_config(run)))
    config = read_config(tmp_path / "resolved.yml")
    assert config.python_path == [str(run.parent), os.getcwd()]
    assert type(build_workload(config).model).__name__ == "Net"


def test_two_configurations_with_modules_of_the_same_name(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "net.py").write_text(SOURCE.replace("Net(", "Other("))
    (other / "run.yml").write_text(RUN)
    names = [type(build_workload(read_config(path)).model).__name__ for path in (run, other / "run.yml", run)]
    assert names == ["Net", "Other", "Net"]


def test_code_of_the_command_line(run: Path) -> None:
    assert read_settings(["model=net:build_model"]) == {"model": "net:build_model"}
    assert read_settings(["python_path=[src]"]) == {"python_path": [os.path.abspath("src")]}


def test_one_data_set_is_split(run: Path) -> None:
    (run.parent / "net.py").open("a").write("def one():\n    return Data(20)\n")
    made = own_datasets(read_config(run, {"data": "net:one", "validation_share": 0.25, "max_samples": 16}))
    assert (len(made.train), len(made.validation)) == (12, 4)


def test_nothing_is_imported_unless_a_key_names_it(run: Path, tmp_path: Path) -> None:
    (run.parent / "net.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    config = read_config(run)
    resolved_yaml(config)
    assert not (tmp_path / "sprung").exists()
    (run.parent / "plain.yml").write_text("synthetic_data: true\nhidden_size: 8\n")
    build_workload(read_config(run.parent / "plain.yml"), "meta")
    assert not (tmp_path / "sprung").exists()


MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no module": ({"model": "nett:build_model"}, "", r"there is no module 'nett', neither in .*mine nor .*elsewhere"),
    "no module inside": ({"model": "net.sub:f"}, "", r"there is no module 'net.sub'"),
    "no name": ({"model": "net:build_modell"}, "", r"net.py has no 'build_modell': did you mean 'build_model'\?"),
    "not callable": ({"model": "net:NUMBER"}, "", r"'NUMBER' of .*net.py is of type int, not a function"),
    "wrong model": ({"model": "net:f"}, "def f():\n    return 3", r"it returned int, not an nn.Module"),
    "wrong data": ({"data": "net:f"}, "def f():\n    return iter([])", r"is of type list_iterator: return a data set"),
    "no samples": ({"data": "net:f"}, "def f():\n    return [], []", r"has no sample for training or for validation"),
    "raises": (
        {"model": "net:f"},
        "def f():\n    g()\ndef g():\n    raise KeyError('x')",
        r"it raised KeyError: 'x' \(at .*net.py:\d+, in g: raise KeyError\('x'\)\)",
    ),
    "arguments": ({"model": "net:f"}, "def f(width):\n    return Net()", r"needs an argument 'width': give it a"),
    "syntax": ({}, "def f(:", r"importing it failed with SyntaxError \(at .*net.py:\d+: def f\(:\)"),
    "import": ({}, "import nowhere", r"failed with ModuleNotFoundError: No module named 'nowhere' \(at .*net.py:\d+"),
    "sample": (
        {"data": "net:Broken"},
        "class Broken(list):\n    def __len__(self):\n        return 9\n",
        r"sample \d of Broken cannot be read: IndexError",
    ),
    "batch": ({"data": "net:f"}, "def f():\n    return [torch.zeros(n) for n in range(9)]", "cannot be made"),
    "no data": ({"data": None}, "", r"not a model of transformers: say what it is trained on with `data: my_module"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(run: Path, name: str) -> None:
    keys, code, message = MISTAKES[name]
    (run.parent / "net.py").open("a").write(code + "\n")
    with pytest.raises(VPipeError, match=message) as caught:
        _ = build_workload(read_config(run, keys)).batch
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data": "net.py"}, "data is 'net.py': expected module:function, such as 'my_module:build_data'"),
        ({"data_dir": "text"}, "data_dir is 'text': the samples come from `data`, 'net:build_data'"),
        ({"synthetic_data": True}, "synthetic_data is True: the samples come from `data`"),
        ({"hidden_size": 8}, "hidden_size is 8: what `model` names says it"),
    ],
)
def test_mistakes_in_keys(run: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(run, keys)
