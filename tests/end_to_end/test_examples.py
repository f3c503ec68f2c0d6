"""The files of examples/, each run and compared: ranks are threads, and torchrun's processes in the long cases."""

import copy
import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import yaml

import vpipe
from tests.end_to_end.command import end, start
from tests.end_to_end.command import vpipe as run_vpipe
from tests.end_to_end.test_readme import README, blocks
from tests.waiting import TIMEOUT
from vpipe.config.file import read_config

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def load(name: str) -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_file_is_listed_and_says_how_it_is_started() -> None:
    listed = set(re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text()))
    assert {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"} <= listed | {
        "kubernetes"
    }
    for script in SCRIPTS:
        text = script.read_text()
        assert text.startswith('"""')
        assert re.search(rf"^    (python|torchrun) .*examples/{script.name}", text, re.MULTILINE), script.name


def test_the_script_of_the_readme_is_an_example() -> None:
    """`test_readme.py` runs it as pasted."""
    (pasted,) = blocks("python", README)
    docstring, _, script = (EXAMPLES / "own_model.py").read_text().partition('"""\n\n')
    assert docstring.startswith('"""A model of one\'s own')
    assert script == pasted


@pytest.mark.long
@pytest.mark.usefixtures("capture_once")
def test_lora_trains_the_adapters_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the plain model that is trained by hand; peft loads what was saved."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    example = load("lora")
    base, updates = tmp_path / "base", 3
    example.build_base(base)
    model = example.load_model(base)  # not in the threads: it draws random numbers
    plain = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    monkeypatch.setattr(example, "load_model", lambda _: model)
    vpipe.run_ranks(2, lambda world: example.main(tmp_path, base, updates, world))

    batches = list(example.minibatches(4 * updates, seed=1))
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    for update in range(updates):
        group = batches[4 * update : 4 * update + 4]
        optimizer.zero_grad()
        plain(**{name: torch.cat([batch[name] for batch in group]) for name in group[0]}).loss.backward()
        optimizer.step()

    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(os.listdir(tmp_path / "adapter"))
    loaded = peft.PeftModel.from_pretrained(
        hf.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    )
    expected, adapters = plain.state_dict(), 0
    for name, tensor in loaded.state_dict().items():
        if "lora_" in name:
            adapters += 1
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)
            assert not torch.equal(tensor, before[name])
        else:
            assert torch.equal(tensor, before[name])
    assert adapters == 16


@pytest.mark.usefixtures("capture_once")
def test_a_trainers_loop_resumes(tmp_path: Path) -> None:
    example = load("trainer")
    torch.manual_seed(0)
    model = example.build_model()

    def train(folder: str, epochs: int) -> Any:
        arguments = example.Arguments(str(tmp_path / folder), num_train_epochs=epochs, save_steps=2)
        copies = [copy.deepcopy(model) for _ in range(2)]
        work = lambda world: example.main(arguments, 64, copies[world.rank], world)  # noqa: E731
        return vpipe.run_ranks(2, work)

    whole = train("whole", 2)
    assert whole[0] == whole[1]
    assert whole[0].keys() == {"loss", "accuracy"}
    assert (tmp_path / "whole" / "report.html").is_file()
    saved = hf.BertForSequenceClassification.from_pretrained(tmp_path / "whole" / "model")
    train("parts", 1)
    assert train("parts", 2) == whole
    resumed = hf.BertForSequenceClassification.from_pretrained(tmp_path / "parts" / "model")
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])


def test_a_loop_like_accelerates() -> None:
    example = load("accelerate_style")
    torch.manual_seed(0)
    model = example.build_model()
    first, second = vpipe.run_ranks(2, lambda world: example.main(2, 512, model, world))
    assert first == second
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(example.build_data(512, 1), 32, shuffle=True, generator=order)
    for _ in range(2):
        for points, classes in torch.utils.data.DataLoader(list(_joined(loader, 4)), None):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(plain(points), classes).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
    points, classes = example.build_data(256, 2).tensors
    loss = torch.nn.functional.cross_entropy(plain(points), classes).item()
    assert first["loss"] == pytest.approx(loss, rel=1e-3)


def _joined(loader: Any, count: int) -> Any:
    """Batches of so many minibatches."""
    batches = list(loader)
    for first in range(0, len(batches), count):
        yield tuple(map(torch.cat, zip(*batches[first : first + count], strict=True)))


def test_a_schedule_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("own_schedule").main().ok
    assert "rank 0  F0 F1 F2 ·  B0" in capsys.readouterr().out


@pytest.mark.long
def test_three_systems(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures are of this machine; their order by memory is not."""
    example = load("three_systems")
    found = example.main(layers=2, seconds=0.2)
    assert example.largest(found["GPipe"]) < example.largest(found["PipeDream"])
    assert example.largest(found["vpipe"]) <= example.largest(found["PipeDream"])
    assert capsys.readouterr().out.count("samples/s") == 3


def test_the_gpts_configuration() -> None:
    config = read_config(EXAMPLES / "gpt_from_text.yml")
    assert config.stages == 2
    assert config.data_dir is None


@pytest.mark.long
def test_a_gpt_from_text(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 300, "warmup_updates": 0}
    keys = yaml.safe_load((EXAMPLES / "gpt_from_text.yml").read_text()) | sizes
    (tmp_path / "run.yml").write_text(yaml.safe_dump(keys | {"max_updates": 2, "data_dir": "text.txt"}))
    (tmp_path / "text.txt").write_text("def words(text):\n    return text.split()\n" * 400)
    ended = run_vpipe("train", "run.yml", cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert "'def ' goes on: " in ended.out


def commands(name: str) -> list[list[str]]:
    """The lines of its docstring that start it."""
    text = (EXAMPLES / name).read_text()
    lines = re.findall(rf"^    ((?:python|torchrun) .*examples/{name}.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def started(command: list[str], folder: Path, **replaced: str) -> Any:
    program, *arguments = [replaced.get(word, word) for word in command]
    given = [re.sub("^examples/", f"{EXAMPLES}/", word) for word in arguments]
    if program == "torchrun":
        if "--master-addr" not in given:
            given.insert(0, "--standalone")
        return start(*given, cwd=folder, launcher=("torch.distributed.run",))
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *given], cwd=folder, start_new_session=True, **pipes)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["accelerate_style.py", "lora.py", "own_model.py", "own_schedule.py", "trainer.py"]
)
def test_examples_start_as_they_say(name: str, tmp_path: Path) -> None:
    if name == "lora.py":
        pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    for command in commands(name):
        process = started(command, tmp_path)
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        finally:
            end(process)
        assert process.returncode == 0, out + err
        assert "Traceback" not in err


@pytest.mark.long
def test_two_hosts_on_one(tmp_path: Path) -> None:
    """Two torchruns that meet, as on two hosts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = commands("two_hosts.py")
    assert len(both) == 2
    processes: list[subprocess.Popen[str]] = []
    make = partial(started, folder=tmp_path, **{"HOST0": "127.0.0.1", "29500": str(port)})
    try:
        processes = [make([*command, "checkpoints"]) for command in both]
        said = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            end(process)
    assert [process.returncode for process in processes] == [0, 0], said
    assert "update 0, loss" in said[0][0]
    assert (tmp_path / "checkpoints" / "step-00000020").is_dir()
