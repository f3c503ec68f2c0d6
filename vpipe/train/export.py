"""The export of a trained model: a directory that `from_pretrained` reads, and a sample sentence of a GPT."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vpipe.checkpoint import export_pretrained
from vpipe.data.tokenizer import encode
from vpipe.errors import ConfigError, NotWrittenError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from vpipe.train.trainer import Trainer

SENTENCE_TOKENS = 40
TOKEN_ROLES = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]",),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]",),
    "bos_token": ("<s>",),
    "eos_token": ("</s>",),
}
"""The roles that transformers knows, and the tokens that have them."""


def export_run(trainer: Trainer, checkpoint: Path) -> Path:
    """Write model and tokenizer of a finished run into its folder."""
    directory = trainer.folder / "model"
    export_pretrained(checkpoint, trainer.model, directory, just_written=True)
    if trainer.data.tokenizer is not None:
        write_tokenizer(trainer.data.tokenizer, directory, trainer.data.chat_template)
    return directory


def write_tokenizer(tokenizer: Tokenizer, directory: Path, chat_template: str | None = None) -> None:
    """Write it into the model's directory, for `from_pretrained`."""
    from transformers import PreTrainedTokenizerFast

    known = {
        role: name
        for role, names in TOKEN_ROLES.items()
        for name in names
        if tokenizer.token_to_id(name) is not None
    }
    try:
        library: Any = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, chat_template=chat_template, **known
        )
        library.save_pretrained(str(directory))
    except Exception as error:  # its library has no class of errors for files
        raise NotWrittenError(f"cannot write the tokenizer into {directory}: {error}") from None


def write_sentence(trainer: Trainer, directory: Path) -> str | None:
    """The exported model's continuation of the run's prompt, if it is a GPT."""
    tokenizer, prompt = trainer.data.tokenizer, trainer.config.prompt
    if tokenizer is None or trainer.config.model_type != "cpm" or trainer.config.model is not None:
        return None
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), local_files_only=True)
    begin = tokenizer.token_to_id("<s>")
    try:
        ids = next(encode(tokenizer, [prompt], together=1)) or [0 if begin is None else begin]
    except ConfigError:  # the user's own tokenizer lacks these words: no reason to fail a finished run
        return None
    torch.manual_seed(trainer.config.seed)
    written = model.generate(
        torch.tensor([ids]), max_new_tokens=SENTENCE_TOKENS, do_sample=True, top_k=20, use_cache=True
    )
    return tokenizer.decode(written[0, len(ids) if prompt else 1 :].tolist())
