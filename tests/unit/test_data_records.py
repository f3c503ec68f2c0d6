"""Records, tokens in files and packed documents, each compared with a plain reading of the same data."""

import importlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.drawing import draws
from vpipe.config.file import read_config
from vpipe.data import Batches, Sampler, TokenFiles
from vpipe.errors import ConfigError
from vpipe.train.datasets import Datasets, make_datasets
from vpipe.train.models import build_model

WORDS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "\n", ":", *"abcdefghijklmnopqrst"]
END = 0
CHAT = [
    {"role": "user", "content": "a b c"},
    {"role": "assistant", "content": "d e"},
    {"role": "user", "content": "f"},
    {"role": "assistant", "content": "g h i"},
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|endoftext|>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def make_folder(path: Path) -> Path:
    """With a tokenizer of one id for each letter."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=":"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    words.add_special_tokens(WORDS[:3])
    (path / "tok").mkdir()
    words.save(str(path / "tok" / "tokenizer.json"))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(folder: Path, data: str, **keys: Any) -> Datasets:
    """The data sets of a small GPT whose samples have six tokens."""
    settings: dict[str, Any] = {
        "model_type": "cpm", "vocab_size": 32, "num_layers": 1, "hidden_size": 8, "num_heads": 1,
        "sequence_length": 6, "data_dir": data, "tokenizer": "tok", **keys,
    }  # fmt: skip
    (folder / "run.yml").write_text(json.dumps(settings))
    config = read_config(folder / "run.yml")
    return make_datasets(config, build_model(config, "meta").model, folder / "cache")


def all_of(datasets: Datasets) -> dict[str, list[Any]]:
    """Every sample, in the order of the text."""
    whole = datasets.train.dataset
    return {name: tensor.tolist() for name, tensor in whole.batch(range(len(whole)), 0).items()}


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def joined(texts: list[str], length: int = 6) -> list[list[int]]:
    """Plainly: all documents with their end tokens, cut into pieces."""
    flat = [token for text in texts if text.strip() for token in [*ids(text), END]]
    return [flat[start : start + length] for start in range(0, len(flat) - length + 1, length)]


def save_as(kind: str, folder: Path, records: list[Any]) -> str:
    """The records in a file or folder of this kind; what data_dir is then."""
    if kind == "jsonl":
        write_lines(folder / "data.jsonl", records)
        return "data.jsonl"
    if kind == "lines":
        (folder / "data").mkdir()
        write_lines(folder / "data" / "a.jsonl", records[:3])
        write_lines(folder / "data" / "b.jsonl", records[3:])
        return "data"
    if kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        table = importlib.import_module("pyarrow").Table.from_pylist(records)
        parquet.write_table(table, folder / "data.parquet", row_group_size=2)
        return "data.parquet"
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    made = datasets.Dataset.from_list(records)
    if kind == "splits":
        made = datasets.DatasetDict({"train": made, "test": made.select([0])})
    made.save_to_disk(str(folder / "saved"))
    return "saved"


TEXTS = ["a b c d", "e", "f g h i j k l m", " ", "n o p", "q r s t a b c d e f"]
KINDS = ["jsonl", "lines", "parquet", "saved", "splits"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_records(folder: Path, kind: str) -> None:
    place = save_as(kind, folder, [{"id": number, "text": text} for number, text in enumerate(TEXTS)])
    expected = joined(TEXTS)
    found = all_of(read(folder, place))
    assert found["input_ids"] == found["labels"] == expected
    assert found.keys() == {"input_ids", "labels"}


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_records(folder: Path, kind: str) -> None:
    """Without a template: role, colon, content, end; the assistant's content and its end are the labels."""
    found = all_of(
        read(folder, save_as(kind, folder, [{"messages": CHAT}] * 4), documents="padded", sequence_length=24)
    )
    said: list[int] = []
    labels: list[int] = []
    for message in CHAT:
        role, content = (
            [WORDS.index(":")],
            [*ids(message["content"]), END],
        )  # "user:" is unknown to the tokenizer
        said += role + content
        labels += [-100] * len(role) + (content if message["role"] == "assistant" else [-100] * len(content))
    assert found["input_ids"][0][: len(said)] == said
    assert found["labels"][0] == labels + [-100] * (24 - len(labels))
    assert found["attention_mask"][0] == [1] * len(said) + [0] * (24 - len(said))
    assert len(found["labels"]) == 4


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_messages_by_the_tokenizers_template(folder: Path, template: str) -> None:
    config = {
        "chat_template": template,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
    }
    (folder / "tok" / "tokenizer_config.json").write_text(json.dumps(config))
    write_lines(folder / "chat.jsonl", [{"messages": CHAT}] * 3)
    made = read(folder, "chat.jsonl", documents="padded", sequence_length=16)
    found = all_of(made)
    user, assistant = WORDS.index("<|user|>"), WORDS.index("<|assistant|>")
    said = [user, *ids("a b c"), assistant, *ids("d e"), END, user, *ids("f"), assistant, *ids("g h i"), END]
    labels = [-100] * 5 + [*ids("d e"), END] + [-100] * 3 + [*ids("g h i"), END]
    assert found["input_ids"][0][: len(said)] == said
    assert found["labels"][0][: len(said)] == labels
    assert made.chat_template == template


def test_a_template_that_writes_a_message_differently_later(folder: Path) -> None:
    forgetful = "{% for m in messages %}<|{{ m['role'] }}|>{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    (folder / "tok" / "tokenizer_config.json").write_text(json.dumps({"chat_template": forgetful}))
    write_lines(folder / "chat.jsonl", [{"messages": CHAT}] * 3)
    with pytest.raises(
        ConfigError, match=r"chat\.jsonl, line 1: .* writes message 1 differently .*generation"
    ):
        read(folder, "chat.jsonl")
    strict = "{{ raise_exception('roles must alternate') }}"
    (folder / "tok" / "tokenizer_config.json").write_text(json.dumps({"chat_template": strict}))
    with pytest.raises(
        ConfigError, match=r"line 1: .* refuses the messages: roles must alternate: mend the record"
    ):
        read(folder, "chat.jsonl")


def test_samples_without_a_token_to_predict_are_left_out(folder: Path) -> None:
    long = [{"role": "user", "content": "a " * 20}, {"role": "assistant", "content": "b c"}]
    write_lines(folder / "chat.jsonl", [{"messages": CHAT}, {"messages": long}, {"messages": CHAT}])
    made = read(folder, "chat.jsonl", documents="padded", sequence_length=12)
    assert len(made.train) + len(made.validation) == 2
    assert made.note == "1 of 3 samples have no token to predict and are left out"
    write_lines(folder / "chat.jsonl", [{"messages": long}] * 3)
    with pytest.raises(ConfigError, match="no sample has a token to predict"):
        read(folder, "chat.jsonl", documents="padded")


@draws(15)
@given(st.lists(st.lists(st.sampled_from(WORDS[5:]), min_size=1, max_size=9), min_size=4, max_size=12))
def test_masked_documents_are_those_of_the_text(documents: list[list[str]]) -> None:
    """Positions count within a document, and no label is the first of a document or of a sample."""
    with TemporaryDirectory() as drawn:
        check_masked(make_folder(Path(drawn)), documents)


def check_masked(folder: Path, documents: list[list[str]]) -> None:
    texts = [" ".join(document) for document in documents]
    write_lines(folder / "data.jsonl", [{"text": text} for text in texts] * 3)
    flat = [(token, place) for text in texts * 3 for place, token in enumerate([*ids(text), END])]
    rows = [flat[start : start + 6] for start in range(0, len(flat) - 5, 6)]
    expected: dict[str, list[Any]] = {"input_ids": [], "position_ids": [], "labels": []}
    for row in rows:
        first = [place == 0 or column == 0 for column, (_, place) in enumerate(row)]
        positions: list[int] = []
        for is_first in first:
            positions.append(0 if is_first else positions[-1] + 1)
        expected["input_ids"].append([token for token, _ in row])
        expected["position_ids"].append(positions)
        expected["labels"].append([-100 if f else t for f, (t, _) in zip(first, row, strict=True)])
    assert all_of(read(folder, "data.jsonl", documents="masked")) == expected
    # The same tokens in a file, whose documents are found by their end tokens.
    np.array([token for token, _ in flat], "<u2").tofile(folder / "data.bin")
    assert all_of(read(folder, "data.bin", documents="masked", token_type="uint16")) == expected


@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_tokens_in_files(folder: Path, kind: str) -> None:
    random = np.random.default_rng(0)
    parts = [random.integers(1, 32, size) for size in (50, 3, 64)]
    (folder / "tokens").mkdir()
    for number, part in enumerate(parts):
        part.astype(f"<{np.dtype(kind).str[1:]}").tofile(folder / "tokens" / f"{number}.bin")
    made = (
        read(folder, "tokens", token_type=kind, tokenizer=None)
        if kind == "uint32"
        else read(folder, "tokens")
    )
    expected = [part[start : start + 6].tolist() for part in parts for start in range(0, len(part) - 5, 6)]
    assert all_of(made)["input_ids"] == all_of(made)["labels"] == expected
    assert isinstance(made.train.dataset.rows._windows[0]._words, np.memmap)  # type: ignore[attr-defined]


def test_a_file_that_is_larger_than_memory(tmp_path: Path) -> None:
    """A file with holes of 128 GiB, of which only some samples are ever touched."""
    file, width = tmp_path / "huge.bin", 1 << 16
    with file.open("wb") as huge:
        huge.truncate(1 << 37)
        huge.seek((1 << 37) - 2)
        huge.write(b"\7\0")
    rows = TokenFiles(tmp_path, [file], "uint16", 8, width, None)
    assert len(rows) == 1 << 20
    last = rows.rows([len(rows) - 1])
    assert last.shape == (1, width)
    assert last[0, -1] == 7
    assert not last[0, :-1].any()


def test_a_resumed_run_reads_the_same(folder: Path) -> None:
    """From the number of the next minibatch alone, by another process that finds or does not find the cache."""
    write_lines(folder / "data.jsonl", [{"text": text} for text in TEXTS * 9])

    def batches(start: int) -> list[Any]:
        train = read(folder, "data.jsonl", documents="masked").train
        return list(Batches(train, Sampler(len(train), 4, 3), start, 20))

    whole = batches(0)
    for file in (folder / "cache").iterdir():
        file.unlink()
    for one, other in zip(whole[7:], batches(7), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_texts_are_encoded_once_and_read_a_few_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(folder / "data.jsonl", [{"text": text} for text in TEXTS])
    sizes: list[int] = []
    tokens = importlib.import_module("vpipe.data.tokens")
    encode = tokens.encode

    def counted(tokenizer: Any, texts: list[str], **options: Any) -> Any:
        sizes.append(sum(map(len, texts)))
        return encode(tokenizer, texts, **options)

    monkeypatch.setattr(tokens, "encode", counted)
    monkeypatch.setattr(tokens, "CHARACTERS", 8)
    assert all_of(read(folder, "data.jsonl"))["input_ids"] == joined(TEXTS)
    assert len(sizes) >= 2
    assert max(sizes) <= 8 + max(map(len, TEXTS))
    sizes.clear()
    assert all_of(read(folder, "data.jsonl"))["input_ids"] == joined(TEXTS)
    assert not sizes


LINES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b'{"text": "a"', r"line 3 is not JSON \(.*\): write one object on each line"),
    "no object": (b'["a"]', r'line 3 is of type list: write an object, such as \{"text": "..."\}'),
    "no UTF-8": (b'{"text": "\xff"}', r"line 3 is not UTF-8 \(byte 10 of it is 0xff\): convert the file"),
    "neither": (b'{"body": "a"}', "line 3: the record has neither 'text' nor 'messages', only 'body': name the one"),
    "both": (b'{"text": "a", "messages": []}', "line 3: the record has both 'text' and 'messages'"),
    "a number": (b'{"text": 3}', "line 3: 'text' is of type int: give a text, or a list of messages"),
    "no role": (b'{"messages": [{"content": "a"}]}', "line 3: 'messages', message 0 has no text as 'role'"),
    "no assistant": (
        b'{"messages": [{"role": "user", "content": "a"}]}', "line 3: .* no message of the role 'assistant'",
    ),
    "half a pair": (b'{"text": "\\ud800"}', "line 3: 'text' has half of a surrogate pair"),
    "deep": (b"[" * 100_000, "line 3 is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_a_bad_line_is_named(folder: Path, name: str) -> None:
    raw, message = LINES[name]
    (folder / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n' + raw + b"\n")
    with pytest.raises(ConfigError, match=r"data_dir is '.*data\.jsonl, " + message) as caught:
        read(folder, "data.jsonl")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_mistakes_with_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str, data: str, **keys: Any) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            read(folder, data, **keys)
        assert str(caught.value).isprintable()

    write_lines(folder / "data.jsonl", [{"body": text} for text in TEXTS])
    assert all_of(read(folder, "data.jsonl", data_field="body"))["input_ids"] == joined(TEXTS)
    refused("line 1: there is no field 'text' .data_field., only 'body'", "data.jsonl", data_field="text")
    refused(
        "token_type is 'uint16', which is for tokens only",
        "data.jsonl",
        token_type="uint16",
        data_field="body",
    )
    refused(
        "for models that predict the next token, not for BertForMaskedLM",
        "data.jsonl",
        model_type="bert",
        documents="padded",
    )
    refused("it holds no plain text: translation reads a folder", "data.jsonl", model_type="translation")
    (folder / "mixed").mkdir()
    write_lines(folder / "mixed" / "a.jsonl", [{"text": "a"}])
    (folder / "mixed" / "b.txt").write_text("b")
    refused(r"files of two kinds, a\.jsonl .jsonl. and b\.txt .text.", "mixed")

    np.array([1, 2, 99, 3] * 9, "<u2").tofile(folder / "a.bin")
    refused(r"a\.bin, token 2 is 99 as uint16, but vocab_size is 32: set it to", "a.bin")
    refused(
        r"data_field is 'text', which is for jsonl and parquet and saved only", "a.bin", data_field="text"
    )
    refused("files of tokens have no documents to fill up", "a.bin", documents="padded")
    refused("only a tokenizer knows which tokens are special", "a.bin", documents="masked", tokenizer=None)
    np.array([1, 2, 9, 3] * 9, "<u4").tofile(folder / "b.bin")
    refused(r"every second token of .*b\.bin is 0 as uint16: set token_type: uint32", "b.bin")
    (folder / "c.bin").write_bytes(b"abc")
    refused(r"c\.bin has 3 bytes, which is no whole number of tokens of uint16", "c.bin")
    np.array([1, 2], "<u2").tofile(folder / "d.bin")
    refused("no file has the 6 tokens of a sample", "d.bin")
    np.array([1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0] * 2, "<u2").tofile(folder / "e.bin")
    with pytest.raises(ConfigError, match="sample 1 holds end tokens alone"):
        all_of(read(folder, "e.bin", documents="masked"))

    (folder / "bad.parquet").write_bytes(b"PAR1 nothing")
    (folder / "saved").mkdir()
    (folder / "saved" / "dataset_info.json").write_text("{")
    for package, path, what in (
        ("pyarrow", "bad.parquet", "as parquet"),
        ("datasets", "saved", "as a saved data set"),
    ):
        if importlib.util.find_spec(package):
            refused(f"cannot be (read|loaded) {what}", path)
    original = importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name in ("pyarrow.parquet", "datasets"):
            raise ImportError
        return original(name, *rest)

    monkeypatch.setattr("vpipe.data.records.importlib.import_module", missing)
    refused("is a parquet file, and pyarrow is not installed: pip install pyarrow", "bad.parquet")
    refused("saved by the package datasets, and datasets is not installed: pip install datasets", "saved")


def test_bert_reads_records_too(folder: Path) -> None:
    write_lines(folder / "data.jsonl", [{"text": "the fox and the dog run"}] * 40)
    made = read(folder, "data.jsonl", model_type="bert", tokenizer=None, vocab_size=60, sequence_length=12)
    assert made.tokenizer is not None
    batch = made.train.batch([0, 1], 0)
    assert batch["input_ids"].shape == (2, 12)
    assert (batch["labels"] != -100).any(dim=1).all()
