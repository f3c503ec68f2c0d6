"""Small models of many architectures, none of which vpipe was built for, each with a batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn

from vpipe.train.models import synthetic_batch
from vpipe.verify import Verification, verify

Batch = dict[str, Any]
BEGIN, END = "<!-- zoo: begin -->", "<!-- zoo: end -->"
SAMPLES, LENGTH = 4, 12


class Specimen(NamedTuple):
    """An architecture: the class of its model, its settings, and its batch if it is not the usual one."""

    model: str
    config: str
    settings: dict[str, Any]
    batch: Callable[[Any], Batch] | None = None

    def build(self) -> tuple[nn.Module, Batch]:
        settings = getattr(hf, self.config)(**self.settings)
        settings.use_cache = False
        torch.manual_seed(0)
        model = getattr(hf, self.model)(settings)
        batch = synthetic_batch(model, SAMPLES, LENGTH) if self.batch is None else self.batch(model)
        return model, batch


NARROW = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
DEEP = {**NARROW, "num_hidden_layers": 4}
LLAMA = {
    **DEEP,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {"image_size": 32, "num_channels": 3, "num_labels": 5}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(0))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def speech(_: Any) -> Batch:
    return {"input_values": noise(SAMPLES, 800), "labels": ids(SAMPLES, 3) % 30 + 1}


def spectrogram(model: Any) -> Batch:
    length = 2 * model.config.max_source_positions
    features = noise(SAMPLES, model.config.num_mel_bins, length)
    return {"input_features": features, "labels": ids(SAMPLES, 6)}


def image_and_text(_: Any) -> Batch:
    pixels = noise(SAMPLES, 3, 32, 32)
    text = ids(SAMPLES, LENGTH)
    return {
        "input_ids": text,
        "attention_mask": torch.ones_like(text),
        "pixel_values": pixels,
        "return_loss": True,
    }


def segmentation(_: Any) -> Batch:
    return {"pixel_values": noise(SAMPLES, 3, 64, 64), "labels": ids(SAMPLES, 64, 64) % 5}


ZOO: dict[str, Specimen] = {
    "albert": Specimen("AlbertForMaskedLM", "AlbertConfig", {**DEEP, "embedding_size": 8}),
    "albert (wide)": Specimen(
        "AlbertForMaskedLM",
        "AlbertConfig",
        {
            "vocab_size": 64,
            "embedding_size": 128,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
        },
    ),
    "bart": Specimen("BartForConditionalGeneration", "BartConfig", BART),
    "bert": Specimen("BertForMaskedLM", "BertConfig", DEEP),
    "bloom": Specimen(
        "BloomForCausalLM", "BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 4, "n_head": 4}
    ),
    "clip": Specimen(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**DEEP, "max_position_embeddings": LENGTH, "eos_token_id": 2},
            "vision_config": {**DEEP, "image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
        image_and_text,
    ),
    "cohere": Specimen("CohereForCausalLM", "CohereConfig", LLAMA),
    "convnext": Specimen(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {**IMAGE, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 3, 1]},
    ),
    "deberta-v2": Specimen("DebertaV2ForMaskedLM", "DebertaV2Config", DEEP),
    "deepseek-v3": Specimen(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **DEEP,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "pad_token_id": 0,
        },
    ),
    "deit": Specimen("DeiTForImageClassification", "DeiTConfig", {**IMAGE, **DEEP, "patch_size": 8}),
    "dinov2": Specimen(
        "Dinov2ForImageClassification",
        "Dinov2Config",
        {
            **IMAGE,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 8,
        },
    ),
    "distilbert": Specimen(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4},
    ),
    "electra": Specimen("ElectraForMaskedLM", "ElectraConfig", {**DEEP, "embedding_size": 8}),
    "falcon": Specimen(
        "FalconForCausalLM", "FalconConfig", {**DEEP, "new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "gemma2": Specimen("Gemma2ForCausalLM", "Gemma2Config", LLAMA),
    "gemma3": Specimen("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA),
    "gpt-neox": Specimen("GPTNeoXForCausalLM", "GPTNeoXConfig", DEEP),
    "gpt-oss": Specimen(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": Specimen(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama": Specimen("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "mamba": Specimen(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4},
    ),
    "mamba2": Specimen(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
    "marian": Specimen("MarianMTModel", "MarianConfig", BART),
    "mbart": Specimen("MBartForConditionalGeneration", "MBartConfig", BART),
    "mistral": Specimen("MistralForCausalLM", "MistralConfig", LLAMA),
    "mixtral": Specimen("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 4}),
    "modernbert": Specimen(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **DEEP,
            "pad_token_id": 0,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mpt": Specimen(
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": 64, "d_model": 32, "n_layers": 4, "n_heads": 4, "expansion_ratio": 2},
    ),
    "olmo2": Specimen("Olmo2ForCausalLM", "Olmo2Config", LLAMA),
    "opt": Specimen(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "pegasus": Specimen("PegasusForConditionalGeneration", "PegasusConfig", BART),
    "phi3": Specimen("Phi3ForCausalLM", "Phi3Config", LLAMA),
    "qwen2": Specimen("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "qwen3": Specimen("Qwen3ForCausalLM", "Qwen3Config", LLAMA),
    "qwen3-moe": Specimen(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "resnet": Specimen(
        "ResNetForImageClassification",
        "ResNetConfig",
        {
            **IMAGE,
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 2, 2, 1],
            "layer_type": "basic",
        },
    ),
    "roberta": Specimen("RobertaForMaskedLM", "RobertaConfig", {**DEEP, "max_position_embeddings": 64}),
    "rwkv": Specimen(
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "context_length": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "segformer": Specimen(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "num_labels": 5,
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
        },
        segmentation,
    ),
    "smollm3": Specimen("SmolLM3ForCausalLM", "SmolLM3Config", LLAMA),
    "starcoder2": Specimen("Starcoder2ForCausalLM", "Starcoder2Config", LLAMA),
    "swin": Specimen(
        "SwinForImageClassification",
        "SwinConfig",
        {
            **IMAGE,
            "image_size": 64,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "t5": Specimen(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "vit": Specimen("ViTForImageClassification", "ViTConfig", {**IMAGE, **DEEP, "patch_size": 8}),
    "wav2vec2": Specimen(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **DEEP,
            "conv_dim": [16, 16, 16],
            "conv_stride": [5, 2, 2],
            "conv_kernel": [10, 3, 2],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "layerdrop": 0.0,
            "mask_time_prob": 0.0,
        },
        speech,
    ),
    "whisper": Specimen(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        spectrogram,
    ),
    "xlm-roberta": Specimen(
        "XLMRobertaForMaskedLM", "XLMRobertaConfig", {**DEEP, "max_position_embeddings": 64}
    ),
    "xlnet": Specimen(
        "XLNetLMHeadModel",
        "XLNetConfig",
        {"vocab_size": 64, "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 48},
    ),
}


RANKS = 3
FEW_BLOCKS = {"cohere", "falcon", "gpt-neox", "mamba", "mamba2"}
SCHEDULES = ("1f1b", "pipedream", "zb-h1", "2bw", "gpipe", "zb-v", "interleaved")
ONE_STAGE_A_RANK = SCHEDULES[:5]


def schedule_of(name: str) -> str:
    """Another one for each neighbour; some models have too few blocks for two stages a rank."""
    number = list(ZOO).index(name)
    return (ONE_STAGE_A_RANK if name in FEW_BLOCKS else SCHEDULES)[number % (5 if name in FEW_BLOCKS else 7)]


def check(name: str) -> tuple[Verification, int]:
    """One model, cut in three (or six) and trained by three ranks, compared with the plain model; and its blocks."""
    model, batch = ZOO[name].build()

    def make(number: int) -> Batch:
        return {
            key: value.roll(number, 0) if isinstance(value, Tensor) else value for key, value in batch.items()
        }

    def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 1e-3)

    found = verify(
        model,
        make,
        ranks=RANKS,
        optimizer=adamw,
        updates=2,
        schedule=schedule_of(name),
    )
    return found, sum(found.partition)


def main() -> None:
    """The table of docs/models.md; --docs FILE writes it there."""
    rows = []
    for name, specimen in ZOO.items():
        begun = time.perf_counter()
        found, blocks = check(name)
        largest = max(difference.largest for difference in found.differences.values())
        rows.append(f"| {name} | `{specimen.model}` | {blocks} | {found.schedule} | {largest:.0e} |")
        print(f"{rows[-1]} {'' if found.ok else 'NOT EQUAL '}{time.perf_counter() - begun:.0f} s", flush=True)
    head = "| model | class of transformers | blocks | schedule | largest relative difference |\n|---|---|---|---|---|"
    table = "\n".join([head, *rows])
    if sys.argv[1:2] == ["--docs"]:
        page = Path(sys.argv[2])
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
