"""`vpipe checkpoint`: what it prints, what it finds, what it deletes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.announced import besides_announcements
from tests.checkpoints import rewrite
from tests.unit.test_save_policy import TINY, the_model
from vpipe import Pipeline, checkpoint, cli
from vpipe.checkpoint import writing
from vpipe.checkpoint.files import sha256
from vpipe.data import build_tokenizer
from vpipe.errors import VPipeError
from vpipe.pipeline.threads import run_ranks
from vpipe.train.save_policy import find_checkpoint
from vpipe.weights import optimizer_factory

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def vpipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `vpipe checkpoint ...`; its exit code and what it says."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["vpipe", "checkpoint", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        reported = capsys.readouterr()
        return int(ended.value.code or 0), reported.out + "".join(
            f"{line}\n" for line in besides_announcements(reported.err)
        )

    return run


def test_a_run_is_listed_and_a_checkpoint_described(vpipe: Run, saved: Path) -> None:
    code, said = vpipe("show", saved)
    assert code == 0
    assert [line for line in said.splitlines() if "step-0000000" in line] != []
    code, said = vpipe("show", saved / "step-00000002")
    assert code == 0
    assert "1f1b" in said
    assert "AdamW" in said
    assert "stage-000.safetensors" in said
    code, said = vpipe("show", saved, "--json")
    first, second = json.loads(said)
    assert (first["updates"], second["updates"]) == (1, 2)
    size = (saved / "step-00000001" / "stage-000.safetensors").stat().st_size
    assert first["bytes"] == size
    assert first["files"]["stage-000.safetensors"]["sha256"] == sha256(
        saved / "step-00000001" / "stage-000.safetensors"
    )
    code, said = vpipe("show", saved / "nowhere")
    assert code == 2
    assert said.startswith("error: there is no checkpoint in ")


def test_verify_finds_flipped_bits_and_numbers_that_are_not_finite(vpipe: Run, saved: Path) -> None:
    assert vpipe("verify", saved) == (
        0,
        "".join(f"{saved / name}: good\n" for name in ("step-00000001", "step-00000002")),
    )
    path = saved / "step-00000001"
    file = path / "stage-000.safetensors"
    weights = load_file(file)
    weights["model.0.bias"][1] = torch.inf
    save_file(weights, file, {"optimizers": "[]"})
    code, said = vpipe("verify", saved)
    assert code == 1
    assert "step-00000001/stage-000.safetensors is damaged" in said
    assert "step-00000002: good" in said
    entry = {"size": file.stat().st_size, "sha256": sha256(file)}
    rewrite(path, lambda c: c["files"]["stage-000.safetensors"].update(entry))
    code, said = vpipe("verify", path, "--json")
    assert code == 1
    assert "tensor 'model.0.bias' holds numbers that are not finite" in json.loads(said)[str(path)]


def test_prune_keeps_the_newest_that_verifies(vpipe: Run, saved: Path) -> None:
    file = saved / "step-00000002" / "stage-000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    code, said = vpipe("prune", saved, "--keep", 1)
    assert code == 0
    assert said.startswith("warning: checkpoint ")
    assert "step-00000002 is skipped: " in said
    assert said.count("\n") == 1
    raw[-1] ^= 1
    file.write_bytes(raw)
    code, said = vpipe("prune", saved, "--keep", 1)
    assert (code, said) == (0, f"deleted {saved / 'step-00000001'}\n")
    code, said = vpipe("prune", saved / "step-00000002", "--keep", 1)
    assert code == 2
    assert "is a checkpoint: give the folder of a run" in said
    assert vpipe("prune", saved, "--keep", 0)[0] == 2


@pytest.mark.usefixtures("capture_once")
def test_export_writes_what_from_pretrained_reads(vpipe: Run, tmp_path: Path) -> None:
    import transformers as hf

    example = the_model()
    run = tmp_path / "run"

    def work(world: object) -> dict[str, torch.Tensor]:
        with Pipeline(
            example.model, example.batch, optimizer=optimizer_factory("sgd", 0.1), minibatches=1, world=world
        ) as pipe:
            checkpoint.save(pipe, run / "checkpoints", {})
            return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}

    (weights,) = run_ranks(1, work)
    code, said = vpipe("export", run, tmp_path / "model")
    assert code == 2
    assert "config.yml does not exist" in said
    (run / "config.yml").write_text(yaml.safe_dump(TINY))
    code, said = vpipe("export", run, tmp_path / "model")
    assert code == 0, said
    model = hf.AutoModelForMaskedLM.from_pretrained(str(tmp_path / "model"), local_files_only=True)
    written = model.state_dict()
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items() if name in written)
    assert len(written.keys() & weights.keys()) > 10
    assert not list((tmp_path / "model").glob("tokenizer*"))  # it trained on random tokens
    text = ["some words, and some more words, and a last word"] * 9
    build_tokenizer(text, "wordpiece", TINY["vocab_size"], tmp_path / "cache").save(
        str(run / "tokenizer.json")
    )
    code, said = vpipe("export", run / "checkpoints" / "step-00000000", tmp_path / "model")
    assert code == 0, said
    tokenizer = hf.AutoTokenizer.from_pretrained(str(tmp_path / "model"), local_files_only=True)
    assert tokenizer.decode(tokenizer.encode("a last word", add_special_tokens=False)) == "a last word"
    assert tokenizer.mask_token == "[MASK]"


@pytest.fixture
def linked(saved: Path, tmp_path: Path) -> Path:
    """A run whose newest checkpoint, and whose oldest, were moved away and linked."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (saved / "step-00000001").rename(run / "checkpoints" / "step-00000001")
    (saved / "step-00000002").rename(tmp_path / "moved")
    (run / "checkpoints" / "step-00000002").symlink_to(tmp_path / "moved")
    (run / "checkpoints" / "step-00000000").symlink_to("nowhere")
    return run


LINK = "step-00000002 is a symbolic link to"
DANGLING = "step-00000000 is a symbolic link to 'nowhere'"


def test_row_31_links_are_reported_by_every_command(
    vpipe: Run,
    linked: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, said = vpipe("verify", linked)
    assert code == 1
    assert LINK in said
    assert DANGLING in said
    assert "step-00000001: good" in said
    for arguments in (
        ["show", linked],
        ["prune", linked, "--keep", "1"],
        ["export", linked, tmp_path / "model"],
    ):
        _, said = vpipe(*arguments)
        assert LINK in said, arguments
        assert DANGLING in said, arguments
    assert (tmp_path / "moved" / "manifest.json").is_file()
    assert (linked / "checkpoints" / "step-00000002").is_symlink(), "no link is deleted"
    for arguments in (
        ["report", linked, "-o", tmp_path / "report.html"],
        ["diagnose", linked],
        ["top", linked],
    ):
        monkeypatch.setattr(sys, "argv", ["vpipe", *map(str, arguments)])
        with pytest.raises(SystemExit):
            cli.main()
        said = capsys.readouterr().err
        assert LINK in said, arguments
        assert DANGLING in said, arguments


def test_row_31_a_link_that_is_named_itself_is_refused_alike(
    vpipe: Run, linked: Path, tmp_path: Path
) -> None:
    for link in ("step-00000002", "step-00000000"):
        path = linked / "checkpoints" / link
        for arguments in (["verify", path], ["show", path], ["export", path, tmp_path / "model"]):
            code, said = vpipe(*arguments)
            assert code == 2, arguments
            assert "is a symbolic link to" in said, arguments
            assert "name the place where it is" in said
    assert vpipe("verify", tmp_path / "moved")[0] == 0
    assert vpipe("verify", linked.parent / "run")[0] == 1


def test_row_31_a_run_resumes_from_what_is_no_link(linked: Path) -> None:
    reports: list[str] = []
    good = linked / "checkpoints" / "step-00000001"
    assert find_checkpoint(str(linked), linked.parent, reports.append) == good
    assert [LINK in line or DANGLING in line for line in reports] == [True, True]
    (linked / "config.yml").write_text("")
    assert find_checkpoint("auto", linked.parent, lambda line: None) == good
    with pytest.raises(VPipeError, match=LINK):
        checkpoint.read_manifest(linked / "checkpoints" / "step-00000002")


def test_a_link_that_has_the_name_of_a_new_checkpoint_gives_way(saved: Path, tmp_path: Path) -> None:
    (saved / "step-00000002").rename(tmp_path / "moved")
    (saved / "step-00000002").symlink_to(tmp_path / "moved")
    folder = saved / ".step-00000002.tmp-0"
    folder.mkdir()
    writing._show(folder, saved / "step-00000002", "0")
    assert not (saved / "step-00000002").is_symlink()
    assert (tmp_path / "moved" / "manifest.json").is_file()
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000001", "step-00000002"]
