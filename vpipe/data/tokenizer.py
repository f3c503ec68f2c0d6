"""Tokenizers, trained on the text or given, and the cache of what is made of a text, by its hash."""

from __future__ import annotations

import hashlib
import os
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vpipe.data.records import Document, text_of
from vpipe.errors import ConfigError
from vpipe.system.ownership import is_ours

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = Literal["wordpiece", "bpe"]
SPECIALS: dict[Kind, list[str]] = {
    "wordpiece": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "bpe": ["<pad>", "<s>", "</s>"],
}
"""They have the first ids, in this order."""
ROLES = {
    "pad": ("[PAD]", "<pad>", "<|endoftext|>"),
    "begin": ("[CLS]", "<s>"),
    "end": ("[SEP]", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
    "mask": ("[MASK]", "<mask>"),
}
"""Names of special tokens, here and in tokenizers that users bring."""
SEEN_AT_LEAST = 2
BYTES = 256


def build_tokenizer(
    documents: Iterable[Document], kind: Kind, vocab_size: int, cache: Path, given: Path | None = None
) -> Tokenizer:
    """The given tokenizer, or the one of this text, which is trained once and then found in `cache`.

    Special tokens that happen to stand in the text are text.
    """
    tokenizer = read_tokenizer(given, vocab_size) if given else _cached(documents, kind, vocab_size, cache)
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, together: int) -> Iterator[list[int]]:
    """The ids of each text; `together` texts are encoded at once: the library keeps more of each token than its id."""
    for first in range(0, len(texts), together):
        try:
            encoded = tokenizer.encode_batch_fast(
                list(texts[first : first + together]), add_special_tokens=False
            )
        except Exception as error:  # the library has no class of its own
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"the tokenizer cannot encode the text: {reason}: give one that has an id for whatever it does not "
                "know, or none, and it is trained on the text"
            ) from None
        yield from (text.ids for text in encoded)


def special_id(tokenizer: Tokenizer, role: str) -> int:
    """The id of the padding, begin, end or mask token."""
    for name in ROLES[role]:
        found = tokenizer.token_to_id(name)
        if found is not None:
            return found
    raise ConfigError(
        f"the tokenizer has no {role} token ({' or '.join(ROLES[role])}): give one that was made for this "
        "kind of model, or none, and it is trained on the text"
    )


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """The ids that stand for no text."""
    return {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def read_tokenizer(given: Path, vocab_size: int) -> Tokenizer:
    """That of a `tokenizer.json`, or of a directory that holds one."""
    from tokenizers import Tokenizer

    place = f"tokenizer is {str(given)!r}"
    file = given / "tokenizer.json" if os.path.isdir(given) else given
    if not os.path.isfile(file):
        raise ConfigError(f"{place}: there is no file {file}: give a tokenizer.json or a folder with one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{place}: {file} is no tokenizer.json of `tokenizers`: {reason}") from None
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"{place}: its ids go up to {largest}, but vocab_size is {vocab_size}: set vocab_size to "
            f"{largest + 1} or more"
        )
    # A file may have every text cut or padded; here samples decide the length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _cached(documents: Iterable[Document], kind: Kind, vocab_size: int, cache: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = cache / f"{content_hash(documents, f'{kind} {vocab_size}')}.json"
    if os.path.isfile(file) and is_ours(file):
        with suppress(Exception):  # cut short or damaged: it is made anew below
            return Tokenizer.from_file(str(file))
    tokenizer = (
        _train_bpe(documents, vocab_size) if kind == "bpe" else _train_wordpiece(documents, vocab_size)
    )
    keep(file, "the tokenizer", lambda path: path.write_text(tokenizer.to_str(), encoding="utf-8"))
    return tokenizer


def _train_bpe(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """GPT-2's: on bytes, so that every text of every language comes back as it was."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    smallest = BYTES + len(SPECIALS["bpe"])
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size is {vocab_size}: a byte-level tokenizer has {BYTES} bytes and "
            f"{len(SPECIALS['bpe'])} special tokens: give {smallest} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=SEEN_AT_LEAST,
        special_tokens=SPECIALS["bpe"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(text_of, documents), trainer)
    return tokenizer


def _train_wordpiece(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """BERT's: lower case, without accents, every Chinese character a word.

    By default the trainer meets the characters inside words (##x) in an order that differs from process
    to process, breaks ties by it, and counts no characters against `vocab_size`. So they are counted here,
    and it is given all of them, in order, as if they were special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    specials = SPECIALS["wordpiece"]

    def blank(vocabulary: dict[str, int]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer

    learner = blank({})
    alphabet, inside = _characters(_words(documents, learner), vocab_size - len(specials))
    if not alphabet:
        raise ConfigError(
            f"vocab_size is {vocab_size}: beside {len(specials)} special tokens no character of the text fits "
            "in: give more"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=SEEN_AT_LEAST,
        special_tokens=[*specials, *(f"##{character}" for character in inside)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner.train_from_iterator(map(text_of, documents), trainer)
    tokenizer = blank(learner.get_vocab())
    tokenizer.add_special_tokens(specials)
    tokenizer.decoder = decoders.WordPiece()
    begin, end = special_id(tokenizer, "begin"), special_id(tokenizer, "end")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", end), ("[CLS]", begin))
    return tokenizer


def _words(documents: Iterable[Document], tokenizer: Tokenizer) -> Counter[str]:
    """How often each word occurs, as the tokenizer cuts the text into words."""
    normalizer, cutter = tokenizer.normalizer, tokenizer.pre_tokenizer
    assert normalizer is not None
    assert cutter is not None
    pieces: Counter[str] = Counter()
    for document in documents:
        pieces.update(normalizer.normalize_str(text_of(document)).split(" "))
    words: Counter[str] = Counter()
    for piece, count in pieces.items():  # each once: a text has few different ones
        for word, _ in cutter.pre_tokenize_str(piece):
            words[word] += count
    return words


def _characters(words: Counter[str], room: int) -> tuple[list[str], list[str]]:
    """The most frequent characters that fit, and those of them that stand inside words: these count twice."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    inside = {character for word in words for character in word[1:]}
    kept: list[str] = []
    for character in sorted(counts, key=lambda character: (-counts[character], character)):
        room -= 2 if character in inside else 1
        if room < 0:
            break
        kept.append(character)
    return sorted(kept), sorted(inside.intersection(kept))


def content_hash(documents: Iterable[Document], made_with: str) -> str:
    """The name of what was made of these documents with these settings."""
    digest = hashlib.sha256(made_with.encode())
    for document in documents:
        raw = (document if isinstance(document, str) else document.key).encode()
        digest.update(f" {len(raw)} ".encode())
        digest.update(raw)
    return digest.hexdigest()


def keep(file: Path, what: str, write: Callable[[Path], object]) -> None:
    """Have `write` make the file, whole or not at all; if that fails, whoever needs it next makes it again.

    All ranks of a run may be here at once: each writes a file of its own, and all of them are the same.
    """
    partial = file.with_name(f"{file.stem}.{uuid.uuid4().hex}{file.suffix}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        os.replace(partial, file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        warnings.warn(
            f"{what} cannot be kept in {file.parent} ({error.strerror}): every rank and every run makes it again",
            stacklevel=2,
        )
