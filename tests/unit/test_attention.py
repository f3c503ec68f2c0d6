"""Attention in captured models: masks that are proven to be causal, or to mask nothing, and grouped heads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, fx, nn
from torch.nn import functional

from vpipe.graph import ModelGraph, capture
from vpipe.graph.inplace import operator_name
from vpipe.graph.ownership import bound_arguments
from vpipe.stage import RandomContext, StageModule, segment
from vpipe.train.models import synthetic_batch

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "use_cache": False,
}  # fmt: skip
GROUPED = {**SIZES, "head_dim": 8, "num_key_value_heads": 1}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**{**GROUPED, "num_hidden_layers": 6}, sliding_window=4)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=2)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2, use_cache=False)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, use_cache=False)
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4
        )
    ),
}  # fmt: skip
CAUSAL, GROUPS, EVERYTHING, MASKED = "causal", "causal, grouped", "everything", "masked"
EXPECTED = {
    "llama": [CAUSAL], "qwen3": [GROUPS], "gemma": [GROUPS], "mixtral": [GROUPS], "gpt2": [CAUSAL],
    "gemma3": [MASKED] * 5 + [GROUPS],  # a window in five of six layers
    "bert": [EVERYTHING], "vit": [EVERYTHING],
    "t5": [MASKED, MASKED, EVERYTHING],  # the distances of tokens have weights
}  # fmt: skip
SHORT = ("qwen3", "bert")


def calls(graph: ModelGraph) -> list[fx.Node]:
    nodes = graph.trace.nodes()
    return [node for node in nodes if operator_name(node) == "scaled_dot_product_attention"]


def kinds(graph: ModelGraph) -> list[str]:
    found = []
    for given in map(bound_arguments, calls(graph)):
        plain = CAUSAL if given["is_causal"] else EVERYTHING
        assert given["attn_mask"] is None or not given["is_causal"]
        grouped = GROUPS if given["enable_gqa"] else plain
        found.append(grouped if given["attn_mask"] is None else MASKED)
    return found


def batch_for(model: nn.Module, *, mask: bool) -> dict[str, Tensor]:
    batch = synthetic_batch(model, 3, 12)
    if not mask:
        batch.pop("attention_mask", None)
    return batch


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_models_of_transformers(name: str) -> None:
    model: Any = MODELS[name]()
    model.config.decoder_start_token_id = 0
    batch = batch_for(model, mask=False)
    graph = capture(model, batch)
    assert kinds(graph) == EXPECTED[name]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    (stage,) = graph.stages([len(graph.blocks)])
    own = StageModule(stage, model, training=False)
    for length in (12, 7):  # the mask follows the length
        other = {
            n: t[:, :length].contiguous() if t.dtype is torch.int64 and t.ndim > 1 else t
            for n, t in batch.items()
        }
        with torch.no_grad():
            loss = own({}, graph.batch_fields(other), RandomContext())["loss"]
            expected = model.eval()(**other).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


@pytest.mark.long
def test_a_mask_of_the_batch_stays() -> None:
    model = MODELS["qwen3"]()
    assert kinds(capture(model, batch_for(model, mask=True))) == [MASKED]
    batch = batch_for(model, mask=False)
    batch["position_ids"] = torch.arange(12).remainder(6).expand(3, 12).clone()  # packed documents
    assert kinds(capture(model, batch)) == [MASKED]


class Own(nn.Module):
    """Attention of the user's own, with a mask that `make` makes of the scores' sizes."""

    def __init__(self, make: Callable[[Tensor, int], Tensor], groups: int = 1) -> None:
        super().__init__()
        self.make = make
        self.groups = groups
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 1)
        self.both = nn.Linear(8, 8 // groups * 2)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        query = self.query(x).view(samples, length, 4, 2).transpose(1, 2)
        key, value = self.both(x).view(samples, length, -1, 2).transpose(1, 2).chunk(2, 1)
        if self.groups > 1:
            key, value = (
                each[:, :, None].expand(-1, -1, self.groups, -1, -1).reshape(samples, 4, length, 2)
                for each in (key, value)
            )
        mixed = functional.scaled_dot_product_attention(query, key, value, self.make(x, length))
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


def written(x: Tensor, length: int) -> Tensor:
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[0] = True
    return mask


MASKS: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "tril": (lambda x, length: torch.ones(length, length, dtype=torch.bool).tril(), CAUSAL),
    "subsequent": (lambda x, length: nn.Transformer.generate_square_subsequent_mask(length), CAUSAL),
    "zeros": (lambda x, length: torch.zeros(length, length), EVERYTHING),
    "strict": (lambda x, length: torch.ones(length, length, dtype=torch.bool).tril(1), MASKED),
    "window": (lambda x, length: torch.ones(length, length, dtype=torch.bool).tril().triu(-6), MASKED),
    "far": (lambda x, length: torch.ones(length, length, dtype=torch.bool).tril().triu(-4000), MASKED),
    "small": (lambda x, length: torch.full((length, length), -9.0).triu(1), MASKED),
    "of the batch": (lambda x, length: (x[0, :, 0] > 0).expand(length, length).tril(), MASKED),
    "written": (written, MASKED),
}


@pytest.mark.parametrize("name", MASKS)
def test_own_masks(name: str) -> None:
    make, expected = MASKS[name]
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert kinds(capture(Own(make), {"x": x})) == [expected]


def test_kernels_without_groups_get_repeated_heads() -> None:
    """The same numbers, in place of a kernel that computes all scores."""
    make, _ = MASKS["tril"]
    model, x = Own(make, groups=4), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    graph = capture(model, {"x": x})
    assert kinds(graph) == [GROUPS]
    (call,) = calls(graph)
    spec, cuda, cpu = graph.trace.specs[call], torch.device("cuda"), torch.device("cpu")
    assert segment._lacks_grouped_kernel(call, spec, cuda)
    assert not segment._lacks_grouped_kernel(call, spec, cpu)
    assert not segment._lacks_grouped_kernel(call, spec._replace(dtype=torch.bfloat16), cuda)
    query = torch.randn(2, 4, 5, 2)
    key, value = torch.randn(2, 2, 2, 5, 2).unbind()
    arguments = (query, key, value, None, 0.0, True)
    torch.testing.assert_close(
        segment._attention_of_groups(*arguments, scale=0.3, enable_gqa=True),
        functional.scaled_dot_product_attention(*arguments, scale=0.3, enable_gqa=True),
    )
