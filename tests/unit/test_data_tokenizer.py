"""Tokenizers: trained to the same result everywhere, cached by the text's hash, never larger than requested."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vpipe.data.tokenizer
from tests.drawing import draws
from vpipe.data import build_tokenizer, encode_documents, special_id, translation_pairs
from vpipe.data.tokenizer import Kind
from vpipe.errors import ConfigError

ENGLISH = ["the quick brown fox jumps over the lazy dog\n" * 20, "the dog sleeps, the fox does not\n" * 20]
CHINESE = [
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。\n" * 20,
    "寒来暑往，秋收冬藏。闰余成岁，律吕调阳。\n" * 20,
]


@pytest.mark.parametrize(
    ("kind", "specials"),
    [("wordpiece", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]), ("bpe", ["<pad>", "<s>", "</s>"])],
)
def test_specials_come_first_and_training_is_deterministic(
    kind: Kind, specials: list[str], tmp_path: Path
) -> None:
    tokenizer = build_tokenizer(ENGLISH, kind, 300, tmp_path / "a")
    assert [tokenizer.id_to_token(number) for number in range(len(specials))] == specials
    assert tokenizer.get_vocab_size() <= 300
    assert tokenizer.to_str() == build_tokenizer(ENGLISH, kind, 300, tmp_path / "b").to_str()


def test_bpe_gives_any_text_back(tmp_path: Path) -> None:
    tokenizer = build_tokenizer([*ENGLISH, *CHINESE], "bpe", 400, tmp_path)
    for text in (*ENGLISH, *CHINESE, "未见过的字 naïve 🙂\tx"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(CHINESE[0]).ids) < len(CHINESE[0].encode()) / 2


@draws(50)
@given(text=st.text())
def test_bpe_gives_every_text_back(text: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(ENGLISH, "bpe", 300, tmp_path)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chinese_characters_are_words_of_wordpiece(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(CHINESE, "wordpiece", 200, tmp_path)
    assert tokenizer.encode("天地，秋收", add_special_tokens=False).tokens == list("天地，秋收")
    assert tokenizer.encode("天").tokens == ["[CLS]", "天", "[SEP]"]


def test_more_characters_than_the_vocabulary_has_room_for(tmp_path: Path) -> None:
    """The trainer alone would make 5 + 1000 characters of it; the frequent ones have to remain."""
    rare = [chr(0x4E00 + number) for number in range(1000)]
    tokenizer = build_tokenizer(
        ["".join(rare), "天地玄黄" * 10, "words and parts " * 9], "wordpiece", 60, tmp_path
    )
    assert tokenizer.get_vocab_size() <= 60
    assert tokenizer.encode("天地玄黄", add_special_tokens=False).tokens == list("天地玄黄")


def test_specials_in_the_text_are_text(tmp_path: Path) -> None:
    words = build_tokenizer(["a [MASK] and [SEP] " * 9], "wordpiece", 100, tmp_path)
    assert not {special_id(words, "mask"), special_id(words, "end")} & set(
        words.encode("[MASK] [SEP]", add_special_tokens=False).ids
    )
    assert (
        special_id(build_tokenizer(ENGLISH, "bpe", 300, tmp_path), "end")
        not in build_tokenizer(ENGLISH, "bpe", 300, tmp_path).encode("</s>").ids
    )


def test_cache_is_found_by_content_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_tokenizer(ENGLISH, "wordpiece", 100, tmp_path / "deep" / "cache").to_str()
    (file,) = (tmp_path / "deep" / "cache").iterdir()
    assert (len(file.stem), file.suffix) == (64, ".json")
    file.write_text(file.read_text()[:100])
    assert build_tokenizer(ENGLISH, "wordpiece", 100, file.parent).to_str() == first
    assert file.read_text() == first

    def never(*_: object) -> None:
        raise AssertionError("it was trained again")

    with monkeypatch.context() as patch:
        patch.setattr(vpipe.data.tokenizer, "_train_wordpiece", never)
        assert build_tokenizer(ENGLISH, "wordpiece", 100, file.parent).to_str() == first
    build_tokenizer(ENGLISH, "wordpiece", 101, file.parent)
    build_tokenizer(ENGLISH[:1], "wordpiece", 100, file.parent)
    build_tokenizer(["".join(ENGLISH)], "wordpiece", 100, file.parent)
    assert len(list(file.parent.iterdir())) == 4


def test_ranks_may_train_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as ranks:
        made = ranks.map(lambda _: build_tokenizer(ENGLISH, "wordpiece", 100, tmp_path).to_str(), range(4))
    assert len(set(made)) == 1
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"the tokenizer cannot be kept in .*file"):
        made = build_tokenizer(ENGLISH, "wordpiece", 100, tmp_path / "file")
    assert made.to_str() == build_tokenizer(ENGLISH, "wordpiece", 100, tmp_path / "cache").to_str()


def test_given_tokenizer_goes_before(tmp_path: Path) -> None:
    made = build_tokenizer(ENGLISH, "bpe", 300, tmp_path / "cache")
    made.enable_truncation(2)
    made.enable_padding()
    made.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        found = build_tokenizer([], "wordpiece", 300, tmp_path / "unused", path)
        assert found.get_vocab() == made.get_vocab()
        assert found.truncation is None
        assert found.padding is None
    assert not (tmp_path / "unused").exists()


def test_given_tokenizer_that_is_none(tmp_path: Path) -> None:
    def mistake(content: str | None, vocab_size: int = 300) -> str:
        file = tmp_path / "tokenizer.json"
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigError) as raised:
            build_tokenizer([], "bpe", vocab_size, tmp_path / "cache", tmp_path)
        assert str(raised.value).startswith(f"tokenizer is {str(tmp_path)!r}: ")
        return str(raised.value)

    assert "there is no file" in mistake(None)
    assert "is no tokenizer.json of `tokenizers`" in mistake("{")
    assert "is no tokenizer.json of `tokenizers`" in mistake(json.dumps({"model": 1}))
    made = build_tokenizer(ENGLISH, "bpe", 300, tmp_path / "cache")
    size = made.get_vocab_size()
    assert f"ids go up to {size - 1}, but vocab_size is 270: set vocab_size to {size}" in mistake(
        made.to_str(), 270
    )


def test_vocabulary_too_small_for_the_characters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size is 258: .* give 259 or more"):
        build_tokenizer(ENGLISH, "bpe", 258, tmp_path)
    with pytest.raises(ConfigError, match=r"vocab_size is 6: beside 5 special tokens no character"):
        build_tokenizer(ENGLISH, "wordpiece", 6, tmp_path)


def test_missing_special_is_named(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(ENGLISH, "bpe", 300, tmp_path)
    with pytest.raises(ConfigError, match=r"no mask token \(\[MASK\] or <mask>\)"):
        special_id(tokenizer, "mask")


@pytest.mark.parametrize("pairs", [False, True])
def test_a_text_that_it_has_no_ids_for_is_reported(pairs: bool, tmp_path: Path) -> None:
    """Found by `make fuzz`: the model of the file said that the unknown token is one that the vocabulary lacks."""
    content = json.loads(build_tokenizer(ENGLISH, "wordpiece", 300, tmp_path).to_str())
    content["model"]["unk_token"] = "[WHAT]"
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    tokenizer = build_tokenizer(CHINESE, "wordpiece", 300, tmp_path, file)
    reported = r"the tokenizer cannot encode the text: .*: give one that has an id"
    if pairs:
        with pytest.raises(ConfigError, match=reported):
            translation_pairs([(CHINESE[0], ENGLISH[0])], tokenizer, 8)
    else:
        with pytest.raises(ConfigError, match=reported):
            encode_documents(CHINESE, tokenizer, tmp_path)
