"""Models by name: built from configurations alone, each with a batch that it can be trained on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.models import bert_config
from vpipe.config import RunConfig
from vpipe.config.file import read_config
from vpipe.errors import ConfigError
from vpipe.graph import capture
from vpipe.train.description import about_architecture
from vpipe.train.models import build_model, synthetic_batch

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 32,
    "sequence_length": 8,
    "batch_size": 3,
}


def local(folder: Path, settings: Any, architecture: str | None = None) -> RunConfig:
    """A run whose model is a directory with this configuration."""
    settings.architectures = architecture and [architecture]
    settings.save_pretrained(folder / "own")
    path = folder / "run.yml"
    path.write_text("model: own\nsequence_length: 8\nbatch_size: 3\n")
    return read_config(path)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("bert", "BertForMaskedLM"), ("cpm", "GPT2LMHeadModel"), ("translation", "T5ForConditionalGeneration")],
)
def test_names(model_type: str, architecture: str) -> None:
    config = RunConfig(**TINY, model_type=model_type)
    model, batch = build_model(config)
    assert type(model).__name__ == architecture
    assert batch["input_ids"].shape == (3, 8)
    output = model(**batch)
    assert torch.isfinite(output.loss)
    assert output.logits.shape[-1] == 32
    again = build_model(config).model
    other = build_model(config.model_copy(update={"seed": 1})).model
    key = next(name for name, p in model.named_parameters() if p.ndim == 2)
    assert torch.equal(model.state_dict()[key], again.state_dict()[key])
    assert not torch.equal(model.state_dict()[key], other.state_dict()[key])


def test_bert_large_has_its_sizes_and_takes_no_memory() -> None:
    config = RunConfig(hidden_size=1024, num_layers=24, num_heads=16, vocab_size=30522, dropout=0.0)
    model, _ = build_model(config, "meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) == 335_174_458
    assert model.config.intermediate_size == 4096


def test_blocks_on_meta() -> None:
    model, batch = build_model(RunConfig(**TINY), "meta")
    assert len(capture(model, batch).blocks) == 5


@pytest.mark.parametrize(
    ("settings", "architecture", "built"),
    [
        (bert_config(1), "BertForPreTraining", "BertForPreTraining"),
        (bert_config(1), "BertForSequenceClassification", "BertForSequenceClassification"),
        (bert_config(1), "BertForTokenClassification", "BertForTokenClassification"),
        (bert_config(1), "BertModel", "BertForMaskedLM"),
        (bert_config(1), None, "BertForMaskedLM"),
        (
            hf.LlamaConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
            ),
            None,
            "LlamaForCausalLM",
        ),
        (
            hf.ViTConfig(
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=32,
            ),
            None,
            "ViTForImageClassification",
        ),
    ],
)
def test_local_configurations(tmp_path: Path, settings: Any, architecture: str | None, built: str) -> None:
    model, batch = build_model(local(tmp_path, settings, architecture))
    assert type(model).__name__ == built
    assert torch.isfinite(model(**batch).loss)


@pytest.mark.parametrize("problem", [None, "multi_label_classification", "regression"])
@pytest.mark.parametrize("count", [1, 4])
def test_samples_have_classes_or_numbers(tmp_path: Path, problem: str | None, count: int) -> None:
    settings = bert_config(1, num_labels=count, problem_type=problem)
    model, batch = build_model(local(tmp_path, settings, "BertForSequenceClassification"))
    loss = model(**batch).loss
    loss.backward()
    assert loss.isfinite()


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    bert_config(1).save_pretrained(tmp_path)
    config = RunConfig(model=str(tmp_path / "config.json"), sequence_length=8, batch_size=2)
    assert type(build_model(config, "meta").model).__name__ == "BertForMaskedLM"


def test_a_t5_begins_with_its_padding_if_its_file_does_not_say(tmp_path: Path) -> None:
    """The model itself asks for the attribute in its forward, and had ended the capture with an AttributeError."""
    settings = hf.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, pad_token_id=3
    )
    assert "decoder_start_token_id" not in settings.to_dict()
    model, batch = build_model(local(tmp_path, settings))
    assert model.config.decoder_start_token_id == 3
    assert torch.isfinite(model(**batch).loss)


@pytest.mark.parametrize("architecture", [None, "LlamaForCausalLM"])
def test_weights_are_float32_whatever_the_file_says(tmp_path: Path, architecture: str | None) -> None:
    """Files of language models say bfloat16; what was built without `architectures` had taken that."""
    settings = hf.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        dtype="bfloat16",
    )
    model, _ = build_model(local(tmp_path, settings, architecture), "meta")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_another_class_than_the_file_names_is_said(tmp_path: Path) -> None:
    for named, other in (
        ("BertForQuestionAnswering", True),
        ("BertForMaskdLM", True),
        ("BertForMaskedLM", False),
    ):
        config = local(tmp_path, bert_config(1), named)
        model, _ = build_model(config, "meta")
        line = about_architecture(config, model)
        assert (line is not None) == other
        assert line is None or line.startswith(
            f"own names {named}, which is no class of transformers that takes"
        )
    assert about_architecture(RunConfig(**TINY), model) is None


def test_batches_differ_by_their_seed_alone() -> None:
    model = build_model(RunConfig(**TINY), "meta").model
    one, same, other = (synthetic_batch(model, 2, 8, seed) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["input_ids"], other["input_ids"])
    assert (one["labels"] != -100).any(1).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no config.json at"),
        ("{", "cannot be read as JSON"),
        (json.dumps({"model_type": "no such model"}), "transformers cannot read it"),
        (json.dumps({"auto_map": {"AutoConfig": "evil.Config"}}), "transformers cannot read it"),
        (
            json.dumps({"model_type": "marian", "vocab_size": 64}),
            "its decoder_start_token_id is 58100, but its vocabulary has 64 tokens: give one from 0 to 63",
        ),
        (
            json.dumps({"model_type": "bert", "architectures": ["GPT2LMHeadModel"]}),
            "its architectures name GPT2LMHeadModel, which is no model of its model_type 'bert'",
        ),
        (
            json.dumps({"model_type": "bert", "architectures": "BertForMaskedLM"}),
            "its architectures are 'BertForMaskedLM': give a list",
        ),
        ("[1, 2]", "config.json holds [1, 2]: it must hold settings by name"),
        ("null", "config.json holds None: it must hold settings by name"),
        (json.dumps({"model_type": "encodec"}), "no architecture for 'encodec' computes a loss from labels"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "config.json").write_text(content)
        (tmp_path / "own" / "evil.py").write_text("raise SystemExit('code beside a configuration was run')")
    run = tmp_path / "run.yml"
    run.write_text("model: own")
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        build_model(read_config(run), "meta")
    assert str(run) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_models_of_several_parts_have_no_synthetic_batch() -> None:
    model = torch.nn.Module()
    model.config = hf.CLIPConfig()
    model.forward = lambda pixel_values, labels: None
    with pytest.raises(
        ConfigError, match="the configuration of 'clip' has no image_size: no synthetic batch"
    ):
        synthetic_batch(model, 2, 8)


def test_a_sequence_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    config = local(tmp_path, bert_config(1)).model_copy(update={"sequence_length": 65})
    with pytest.raises(ConfigError, match="sequence_length is 65, but the model has positions for 64"):
        build_model(config, "meta")


def test_a_roberta_has_fewer_positions_than_its_file_says(tmp_path: Path) -> None:
    """It counts from behind its padding, token 1; the longest sequences had failed at the first minibatch."""
    settings = hf.RobertaConfig(
        **bert_config(1).to_dict() | {"pad_token_id": 1, "max_position_embeddings": 10}
    )
    config = local(tmp_path, settings)
    model, batch = build_model(config)
    assert torch.isfinite(model(**batch).loss)
    with pytest.raises(
        ConfigError, match="sequence_length is 9, but the model has positions for 8: give that"
    ):
        build_model(config.model_copy(update={"sequence_length": 9}))


def test_a_vocabulary_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the model's vocab_size is 3: ids below 3 are padding.*give 4 or more"
    ):
        build_model(
            local(tmp_path, hf.LlamaConfig(vocab_size=3, hidden_size=32, num_hidden_layers=1)), "meta"
        )


def test_outputs_that_nobody_reads_do_not_keep_a_model_from_being_written(tmp_path: Path) -> None:
    """transformers writes no file with `output_attentions`, which it had said at the end of the run."""
    settings = bert_config(1)
    config = local(tmp_path, settings)
    file = tmp_path / "own" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"output_attentions": True}))
    model, _ = build_model(config)
    model.save_pretrained(tmp_path / "written")
    assert (tmp_path / "written" / "model.safetensors").is_file()
