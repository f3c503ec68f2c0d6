"""Hugging Face directories: read into any partition, written so that `from_pretrained` gives equal logits."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from tests import models
from tests.examples import example, varied
from vpipe import Pipeline, checkpoint
from vpipe.errors import VPipeError
from vpipe.pipeline.threads import run_ranks
from vpipe.weights import optimizer_factory

pytestmark = pytest.mark.usefixtures("capture_once")

ADAMW = optimizer_factory("adamw", 1e-3)


def on_ranks(ranks: int, tiny: models.Example, work: Callable[[Pipeline], Any], **options: Any) -> Any:
    """What `work` returns, which is the same on every rank."""
    model, batch, loss_fn = tiny

    def on_rank(world: Any) -> Any:
        with Pipeline(
            model, batch, optimizer=ADAMW, loss_fn=loss_fn, minibatches=2, world=world, **options
        ) as pipe:
            return work(pipe)

    results = run_ranks(ranks, on_rank)
    assert all(result == results[0] for result in results)
    return results[0]


def evaluated(model: nn.Module, batch: dict[str, Any]) -> float:
    model.eval()
    with torch.no_grad():
        return model(**batch).loss.item()


def pretrained(tiny: models.Example, directory: Path, **options: Any) -> nn.Module:
    """A model of the same kind with other weights, saved by transformers."""
    model = copy.deepcopy(tiny[0])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(directory, **options)
    return model


def load_and_evaluate(tiny: models.Example, directory: Path, ranks: int) -> tuple[list[str], float]:
    def work(pipe: Pipeline) -> tuple[list[str], float]:
        missing = checkpoint.load_pretrained(pipe, tiny[0], directory)
        return missing, pipe.evaluate([tiny[1]])

    return on_ranks(ranks, tiny, work)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama", "mixtral"])
def test_any_partition_gives_the_original_models_loss(tmp_path: Path, name: str, ranks: int) -> None:
    tiny = example(name, layers=1)
    original = pretrained(tiny, tmp_path)
    missing, loss = load_and_evaluate(tiny, tmp_path, ranks)
    assert missing == []
    assert loss == pytest.approx(evaluated(original, tiny[1]), rel=1e-12)
    assert loss != pytest.approx(evaluated(copy.deepcopy(tiny[0]), tiny[1]), rel=1e-6)


def test_the_experts_of_a_mixtral_are_many_tensors_in_a_file(tmp_path: Path) -> None:
    tiny = example("mixtral", layers=1)
    pretrained(tiny, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    experts = tiny[0].config.num_local_experts
    assert sum(name.endswith(".w1.weight") for name in written) == experts > 1
    del written["model.layers.0.block_sparse_moe.experts.1.w3.weight"]
    save_file(written, tmp_path / "model.safetensors")
    with pytest.raises(
        VPipeError, match=r"tensor 'model.layers.0.mlp.experts.gate_up_proj' cannot be made of"
    ):
        load_and_evaluate(tiny, tmp_path, 1)


def test_shards_with_an_index(tmp_path: Path) -> None:
    tiny = example("bert", layers=1)
    original = pretrained(tiny, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    missing, loss = load_and_evaluate(tiny, tmp_path, 2)
    assert missing == []
    assert loss == pytest.approx(evaluated(original, tiny[1]), rel=1e-12)


def test_a_bare_base_model_leaves_the_head_as_it_is(tmp_path: Path) -> None:
    tiny = example("bert", layers=1)
    original = pretrained(tiny, tmp_path / "whole")
    original.bert.save_pretrained(tmp_path / "base")
    assert not any(name.startswith("bert.") for name in load_file(tmp_path / "base/model.safetensors"))
    missing, loss = load_and_evaluate(tiny, tmp_path / "base", 2)
    assert missing
    assert all(name.startswith("cls.") for name in missing)
    expected = copy.deepcopy(tiny[0])
    expected.bert.load_state_dict(original.bert.state_dict())
    assert loss == pytest.approx(evaluated(expected, tiny[1]), rel=1e-12)


def test_old_names_of_layer_norms_and_the_other_name_of_a_tied_weight(tmp_path: Path) -> None:
    tiny = example("bert", layers=1)
    original = pretrained(tiny, tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["cls.predictions.decoder.weight"] = weights.pop("bert.embeddings.word_embeddings.weight")
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in weights.items()
    }
    assert any(name.endswith("gamma") for name in old)
    save_file(old, path)
    missing, loss = load_and_evaluate(tiny, tmp_path, 2)
    assert missing == []
    assert loss == pytest.approx(evaluated(original, tiny[1]), rel=1e-12)


def test_weights_of_masters_under_mixed_precision(tmp_path: Path) -> None:
    tiny = example("bert", torch.float32, layers=1)
    original = pretrained(tiny, tmp_path)

    def work(pipe: Pipeline) -> bool:
        checkpoint.load_pretrained(pipe, tiny[0], tmp_path)
        expected = original.state_dict()
        return all(torch.equal(t, expected[n]) for n, t in pipe.state_dict().items() if n in expected)

    assert on_ranks(2, tiny, work, precision="bf16")


def refused(directory: Path, message: str) -> None:
    with pytest.raises(VPipeError, match=message):
        load_and_evaluate(example("bert", layers=1), directory, 1)


def test_mistakes(tmp_path: Path) -> None:
    refused(tmp_path, "has neither model.safetensors nor model.safetensors.index.json")
    path = tmp_path / "model.safetensors"
    save_file({"something": torch.ones(2)}, path)
    refused(tmp_path, "none of its 1 tensors is one of the model's: it has 'something', the model 'bert.emb")
    save_file({"cls.predictions.bias": torch.ones(2)}, path)
    refused(tmp_path, r"tensor 'cls.predictions.bias' has the shape \[2\] and the model's has \[67\]")
    path.write_bytes(b"\x80\x04pickle")
    refused(tmp_path, "cannot read .*model.safetensors")
    path.unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    refused(tmp_path, "is not an index of weights")
    index.write_text(json.dumps({"weight_map": {"cls.predictions.bias": "../secret.safetensors"}}))
    refused(tmp_path, r"names the file '../secret.safetensors': only files beside it are read")
    index.write_text(json.dumps({"weight_map": {"cls.predictions.bias": "gone.safetensors"}}))
    refused(tmp_path, "cannot read .*gone.safetensors")


# Export


def trained(tiny: models.Example, directory: Path, ranks: int, **options: Any) -> tuple[Path, nn.Module]:
    """A checkpoint of some training, and the plain model with the trained weights."""
    states: list[dict[str, Any]] = []

    def work(pipe: Pipeline) -> Path:
        for _ in pipe.train(varied(tiny[1], 4)):
            pass
        state = pipe.full_state_dict()
        if state is not None:
            states.append(state)
        return checkpoint.save(pipe, directory, {})

    path = on_ranks(ranks, tiny, work, **options)
    plain = copy.deepcopy(tiny[0])
    plain.load_state_dict(states[0], strict=False)
    return path, plain.eval()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama", "mixtral"])
def test_from_pretrained_gives_the_trained_models_logits(tmp_path: Path, name: str, device: str) -> None:
    tiny = example(name, layers=1)
    path, plain = trained(tiny, tmp_path, 2)
    with torch.device(device):
        model = type(tiny[0])(copy.deepcopy(tiny[0].config)).double()
    assert checkpoint.export_pretrained(path, model, tmp_path / "exported") == []
    again = type(tiny[0]).from_pretrained(tmp_path / "exported").eval()
    if name == "mixtral":
        again.config._experts_implementation = "batched_mm"  # another kernel rounds in another way
    with torch.no_grad():
        assert torch.equal(again(**tiny[1]).logits, plain(**tiny[1]).logits)
    assert again.config.architectures == [type(tiny[0]).__name__]


def test_there_and_back(tmp_path: Path) -> None:
    """A run that starts from what another one exported has its weights."""
    tiny = example("bert", layers=1)
    path, plain = trained(tiny, tmp_path, 3)
    checkpoint.export_pretrained(path, copy.deepcopy(tiny[0]), tmp_path / "exported")
    missing, loss = load_and_evaluate(tiny, tmp_path / "exported", 2)
    assert missing == []
    assert loss == pytest.approx(evaluated(plain, tiny[1]), rel=1e-12)


class WithSpareLayer(hf.BertForMaskedLM):
    """No stage reads the spare layer, so that no checkpoint has it."""

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__(config)
        self.spare = nn.Linear(3, 3)


def test_parameters_that_training_never_used(tmp_path: Path) -> None:
    config = models.bert_config(layers=1)
    model = WithSpareLayer(config)
    path, _ = trained((model, models.language_batch(), None), tmp_path, 1)
    assert checkpoint.export_pretrained(path, model, tmp_path / "exported") == []
    written = load_file(tmp_path / "exported/model.safetensors")
    assert torch.equal(written["spare.weight"], model.spare.weight)
    with torch.device("meta"):
        skeleton = WithSpareLayer(config)
    assert checkpoint.export_pretrained(path, skeleton, tmp_path / "again") == ["spare.weight", "spare.bias"]


def test_a_model_of_ones_own_is_exported_as_its_state_dict(tmp_path: Path) -> None:
    tiny = example("sequential", layers=2)
    path, _ = trained(tiny, tmp_path, 1)
    assert checkpoint.export_pretrained(path, tiny[0], tmp_path / "exported") == []
    model = copy.deepcopy(tiny[0])
    model.load_state_dict(load_file(tmp_path / "exported/model.safetensors"))
    assert not torch.equal(next(model.parameters()), next(tiny[0].parameters()))


def test_a_checkpoint_that_was_just_written_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = example("sequential", layers=2)
    path, _ = trained(tiny, tmp_path, 1)
    checkpoint.export_pretrained(path, tiny[0], tmp_path / "hashed")
    monkeypatch.setattr("vpipe.checkpoint.pretrained.verify", None)
    checkpoint.export_pretrained(path, tiny[0], tmp_path / "exported", just_written=True)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("hashed", "exported"))
    assert first == second


def test_mistakes_of_an_export(tmp_path: Path) -> None:
    tiny = example("sequential", layers=2)
    path, _ = trained(tiny, tmp_path, 1)
    bert = example("bert", layers=1)[0]
    with pytest.raises(VPipeError, match=r"tensor '.*' is not one of the model's"):
        checkpoint.export_pretrained(path, bert, tmp_path / "exported")
    (tmp_path / "file").write_text("")
    with pytest.raises(VPipeError, match="it is a file; give a directory"):
        checkpoint.export_pretrained(path, bert, tmp_path / "file")
