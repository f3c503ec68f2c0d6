"""Samples: what a model reads, the same for the same seed, epoch and sample, in whatever batch."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from torch import Tensor, nn

from tests.models import bert_config
from vpipe.config import RunConfig
from vpipe.data import (
    CausalText,
    Dataset,
    MaskedText,
    Synthetic,
    build_tokenizer,
    encode_documents,
    masked_text,
    special_id,
    translation_pairs,
    windows,
)
from vpipe.data.tokens import ID
from vpipe.errors import ConfigError
from vpipe.train.datasets import named_batch
from vpipe.train.models import synthetic_batch

WORDS = [*"天地玄黄", "one", "two", "three", "four", "five", "eleven", "and", "the", "fox"]


def corpus(documents: int, words: int) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, words)) for _ in range(documents)]


def tokens(documents: list[str], tokenizer: Tokenizer) -> Any:
    with TemporaryDirectory() as cache:
        return np.array(encode_documents(documents, tokenizer, Path(cache)))


def causal_text(words: Any, length: int, path: Path | None) -> CausalText:
    return CausalText(windows(words, length, length, path))


def masked_rows(words: Any, tokenizer: Tokenizer, length: int, seed: int) -> MaskedText:
    return masked_text(windows(words, length - 2, length, Path("texts")), tokenizer, seed)


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(corpus(20, 100), "wordpiece", 150, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(corpus(20, 100), "bpe", 300, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def masked(wordpiece: Tokenizer) -> MaskedText:
    return masked_rows(tokens(corpus(20, 1000), wordpiece), wordpiece, 42, seed=3)


def unmasked(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


def test_masked_sample_is_its_text_between_cls_and_sep(masked: MaskedText, wordpiece: Tokenizer) -> None:
    batch = masked.batch([0, 1], epoch=0)
    text = unmasked(batch)
    assert text[:, 0].tolist() == [special_id(wordpiece, "begin")] * 2
    assert text[:, -1].tolist() == [special_id(wordpiece, "end")] * 2
    expected = wordpiece.encode(corpus(20, 1000)[0], add_special_tokens=False).ids[:80]
    assert text[:, 1:-1].flatten().tolist() == expected
    assert batch.keys() == {"input_ids", "labels"}


def test_masks_have_the_shares_of_bert(masked: MaskedText, wordpiece: Tokenizer) -> None:
    batches = [masked.batch(range(len(masked)), epoch) for epoch in range(5)]
    ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    asked = labels != -100
    assert asked.any(dim=1).all()
    assert not asked[:, [0, -1]].any()
    assert not (labels == special_id(wordpiece, "end")).any()
    # 6 of the 40 between [CLS] and [SEP], also where one of these ends a document: round(0.15 * 39).
    assert asked[:, 1:-1].float().mean().item() == pytest.approx(0.15, abs=1e-6)
    count = int(asked.sum())
    shown, text = ids[asked], labels[asked]
    hidden = shown == special_id(wordpiece, "mask")
    other = ~hidden & (shown != text)
    chance = 1 / len(masked.ordinary)  # that a random token is the one that stood there
    for share, expected in ((hidden, 0.8), (other, 0.1 * (1 - chance))):
        deviation = (expected * (1 - expected) / count) ** 0.5
        assert abs(share.float().mean().item() - expected) < 4 * deviation
    assert shown[~hidden].min() >= 5  # no special token is drawn


def test_every_place_and_every_token_has_its_turn(masked: MaskedText) -> None:
    batches = [masked.batch(range(len(masked)), epoch) for epoch in range(3)]
    asked = torch.cat([batch["labels"] for batch in batches]) != -100
    by_place = asked[:, 1:-1].float().mean(dim=0)
    assert by_place.min() > 0.1
    assert by_place.max() < 0.2


def test_masks_depend_on_seed_epoch_and_sample_alone(masked: MaskedText, wordpiece: Tokenizer) -> None:
    def masks(dataset: MaskedText, indices: list[int], epoch: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(len(indices))
        np.random.seed(epoch)
        return dataset.batch(indices, epoch)

    together = masks(masked, [5, 2, 7, 5], 4)
    for row, sample in enumerate([5, 2, 7, 5]):
        alone = masks(masked, [sample], 4)
        assert all(torch.equal(alone[name][0], together[name][row]) for name in together)
    assert not torch.equal(together["labels"], masks(masked, [5, 2, 7, 5], 5)["labels"])
    other = masked_rows(tokens(corpus(20, 1000), wordpiece), wordpiece, 42, seed=4)
    assert not torch.equal(together["labels"], masks(other, [5, 2, 7, 5], 4)["labels"])


@pytest.mark.parametrize("length", [4, 5, 9])
def test_short_samples_have_a_label_each(length: int, wordpiece: Tokenizer) -> None:
    dataset = masked_rows(tokens(["one", "two", "地", "ten"] * 20, wordpiece), wordpiece, length, seed=0)
    labels = dataset.batch(range(len(dataset)), 0)["labels"]
    assert ((labels != -100).sum(dim=1) >= 1).all()


def test_causal_samples_are_the_text_in_order(bpe: Tokenizer) -> None:
    texts = corpus(3, 50)
    dataset = causal_text(tokens(texts, bpe), 16, None)
    batch = dataset.batch(range(len(dataset)), 0)
    assert torch.equal(batch["input_ids"], batch["labels"])
    end = special_id(bpe, "end")
    expected = [token for text in texts for token in [*bpe.encode(text).ids, end]]
    assert batch["input_ids"].flatten().tolist() == expected[: len(expected) // 16 * 16]
    chinese = (
        causal_text(tokens(["天地玄黄，宇宙洪荒。"], bpe), 8, None).batch([0], 0)["input_ids"][0].tolist()
    )
    assert bpe.decode(chinese).startswith("天地")


def test_pairs_end_and_are_filled_up(bpe: Tokenizer) -> None:
    texts = [("one two", "天地"), ("one " * 50, "two " * 50)]
    batch = translation_pairs(texts, bpe, 12).batch([1, 0], 0)
    end, pad = special_id(bpe, "end"), special_id(bpe, "pad")
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(batch, (2, 12))
    for side, name, filled in ((0, "input_ids", pad), (1, "labels", -100)):
        short = [*bpe.encode(texts[0][side]).ids, end]
        assert batch[name][1].tolist() == short + [filled] * (12 - len(short))
        assert batch[name][0].tolist() == [*bpe.encode(texts[1][side]).ids[:11], end]
    assert torch.equal(batch["attention_mask"], (batch["input_ids"] != pad).long())


def models() -> dict[str, Any]:
    sizes: Any = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = hf.T5Config(**sizes)
    t5.decoder_start_token_id = 0
    return {
        "bert": hf.BertForMaskedLM(bert_config()),
        "gpt2": hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2)),
        "t5": hf.T5ForConditionalGeneration(t5),
    }


def test_models_read_the_fields_of_their_synthetic_batch(masked: MaskedText, bpe: Tokenizer) -> None:
    made = models()
    datasets: dict[str, Dataset] = {
        "bert": masked,
        "gpt2": causal_text(tokens(corpus(3, 50), bpe), 8, None),
        "t5": translation_pairs([("one", "two"), ("地", "ten")], bpe, 8),
    }
    for name, model in made.items():
        batch = datasets[name].batch([0, 1], 0)
        config = RunConfig(sequence_length=batch["input_ids"].shape[1])
        expected = named_batch(config, model, 2)
        assert {key: (v.dtype, v.shape) for key, v in batch.items()} == {
            key: (v.dtype, v.shape) for key, v in expected.items()
        }
    assert torch.isfinite(made["gpt2"](**datasets["gpt2"].batch([0, 1], 0)).loss)
    assert torch.isfinite(made["t5"](**datasets["t5"].batch([0, 1], 0)).loss)


def _drawn(model: nn.Module, count: int, seed: int) -> dict[str, Tensor]:
    return synthetic_batch(model, count, 8, seed)


def test_synthetic_data_have_the_fields_of_the_model() -> None:
    model = models()["gpt2"]
    dataset = Synthetic(partial(_drawn, model), 10, seed=1)
    assert len(dataset) == 10
    batch = dataset.batch([3, 1], 2)
    assert {name: t.shape for name, t in batch.items()} == {
        name: t.shape for name, t in synthetic_batch(model, 2, 8).items()
    }
    assert all(torch.equal(batch[name], dataset.batch([3, 1], 2)[name]) for name in batch)
    for other in (
        dataset.batch([1, 3], 2),
        dataset.batch([3, 1], 1),
        Synthetic(partial(_drawn, model), 10, 2).batch([3, 1], 2),
    ):
        assert not torch.equal(batch["input_ids"], other["input_ids"])


def test_too_little_text(wordpiece: Tokenizer, bpe: Tokenizer) -> None:
    with pytest.raises(ConfigError) as raised:
        masked_rows(tokens(["one two"], wordpiece), wordpiece, 32, 0)
    assert str(raised.value) == (
        "data_dir is 'texts': the text has 3 tokens, but one sample takes 30 (sequence_length is 32): give more "
        "text or a smaller sequence_length"
    )
    with pytest.raises(ConfigError, match=r"one sample takes 64 \(sequence_length is 64\): give more"):
        causal_text(tokens(["one two"], bpe), 64, Path("texts"))


def test_a_text_is_encoded_once(
    tmp_path: Path, bpe: Tokenizer, wordpiece: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, cache = corpus(3, 50), tmp_path / "cache"
    end = special_id(bpe, "end")
    plain = [token for text in texts for token in [*bpe.encode(text).ids, end]]
    assert (encode_documents(texts, bpe, cache) & ID).tolist() == plain
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("vpipe.data.tokens.encode", lambda *_, **__: pytest.fail("it was encoded again"))
        assert (encode_documents(texts, bpe, cache) & ID).tolist() == plain
    for damaged in (whole[:100], b"", whole[:-1]):
        file.write_bytes(damaged)
        assert (encode_documents(texts, bpe, cache) & ID).tolist() == plain
        assert file.read_bytes() == whole
    encode_documents(texts[:2], bpe, cache)
    encode_documents(texts, wordpiece, cache)
    assert len(list(cache.iterdir())) == 3  # by text and by tokenizer
