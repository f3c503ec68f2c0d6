"""Conversations as tokens: by the tokenizer's chat template, or plainly; only what the assistant says is trained on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.data.records import Conversation
from vpipe.data.tokenizer import special_id
from vpipe.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Encoded = tuple[list[int], list[bool]]
"""Ids, and for each whether it is trained on."""


class Chat:
    """Encodes conversations.

    Without a template a message is `role: content` and the end token; the content of an assistant's message and its
    end token are trained on. With a template they are what `{% generation %}` marks there, or else what the template
    adds for the assistant's message to the text before it.
    """

    def __init__(self, tokenizer: Tokenizer, given: Path | None) -> None:
        """`given` is where the user's tokenizer was read, if it is the user's."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._library = None if given is None else _library_tokenizer(given)
        self._tokenizer.encode_special_tokens = self._library is None  # a template writes them as text

    @property
    def template(self) -> str | None:
        return None if self._library is None else self._library.chat_template

    def encode(self, conversation: Conversation) -> Encoded:
        if self.template is None:
            return self._plain(conversation)
        try:
            if "generation %}" in self.template or "generation -%}" in self.template:
                return self._marked(conversation)
            return self._by_prefix(conversation)
        except ConfigError:
            raise
        except Exception as error:  # the template's own, such as "roles must alternate"
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{conversation.place}: the tokenizer's chat template refuses the messages: {reason}: mend the record"
            ) from None

    def _plain(self, conversation: Conversation) -> Encoded:
        ids: list[int] = []
        trained: list[bool] = []
        end = special_id(self._tokenizer, "end")
        for message in conversation.messages:
            role = self._ids(f"{message['role']}: ")
            content = [*self._ids(message["content"]), end]
            ids += role + content
            trained += [False] * len(role) + [message["role"] == "assistant"] * len(content)
        return ids, trained

    def _marked(self, conversation: Conversation) -> Encoded:
        assert self._library is not None
        encoded = self._library.apply_chat_template(
            conversation.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]

    def _by_prefix(self, conversation: Conversation) -> Encoded:
        messages = conversation.messages
        whole = self._text(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:number], add_generation_prompt=True)
            until = self._text(messages[: number + 1])
            if not (until.startswith(before) and whole.startswith(until)):
                raise ConfigError(
                    f"{conversation.place}: the tokenizer's chat template writes message {number} differently when "
                    "others follow it, so its tokens cannot be found: mark them with {% generation %} in the template"
                )
            spans.append((len(before), len(until)))
        encoded = self._tokenizer.encode(whole, add_special_tokens=False)
        trained = [
            any(end > first and begin < last for first, last in spans) for begin, end in encoded.offsets
        ]
        return encoded.ids, trained

    def _text(self, messages: Sequence[dict[str, str]], **options: Any) -> str:
        assert self._library is not None
        if not messages:
            return ""
        return str(self._library.apply_chat_template(messages, tokenize=False, **options))

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _library_tokenizer(given: Path) -> Any:
    """The tokenizer as transformers reads it, if its folder holds a chat template."""
    from transformers import PreTrainedTokenizerFast

    folder = given if os.path.isdir(given) else given.parent
    if not os.path.isfile(folder / "tokenizer_config.json"):
        return None
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # of a damaged file: almost anything
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"tokenizer is {str(given)!r}: its chat template cannot be read: {reason}: mend tokenizer_config.json, or "
            "give the tokenizer.json in a folder of its own"
        ) from None
    return tokenizer if isinstance(tokenizer.chat_template, str) else None
