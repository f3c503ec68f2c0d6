"""Profiles of the models of docs/scaling.md, measured on this device: each kind of block, for some minibatches.

    python benchmarks/scaling_profile.py [--output docs/measured] [--seconds 3] [--models 1.3B,13B] [--limit 600]
                                         [--device PROFILE] [--about TEXT]

Of each model two layers are built, with the embedding and the head, in the real width and sequence: other layers have
equal blocks. Without a GPU the widths are tiny, to try the script. After `--limit` seconds no measurement is begun.
With `--device` the device and its link are taken from a profile, and not measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as hf
from scaling_models import LAYERS, MEASURED, MODELS, Model, profile_path
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import vpipe.stage.module
from vpipe.cost import DeviceCost, LinkCost, read_profile, write_profile
from vpipe.errors import VPipeError
from vpipe.graph.materialise import materialise
from vpipe.profile.device import measure_device
from vpipe.profile.links import measure_link
from vpipe.profile.model import MeasuredModel
from vpipe.system.device import choose_device

MATRIX, PRODUCTS = 8192, 40
"""The matrix product by which the speed of the card is measured, and how many there are."""
WIDE = 8192
"""Blocks of this width or more compute for so long that the time of a call is nothing: no stage of several blocks is
measured beside them, which would not fit into memory either."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Attention over whole samples, causal where the module is: torch's fused kernels, which take no mask."""
    attended = scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=options.get("dropout", 0.0),
        is_causal=bool(module.is_causal),
        scale=options.get("scaling"),
    )
    return attended.transpose(1, 2).contiguous(), None


hf.AttentionInterface.register("whole_samples", attend)
hf.AttentionMaskInterface.register("whole_samples", lambda *_, **__: None)


def build(model: Model) -> nn.Module:
    """Two layers of it, on the meta device."""
    if model.kind == "bert":
        settings: Any = hf.BertConfig(
            vocab_size=model.vocabulary,
            hidden_size=model.width,
            num_hidden_layers=LAYERS,
            num_attention_heads=model.heads,
            intermediate_size=4 * model.width,
            max_position_embeddings=model.sequence,
        )
        architecture: Any = hf.BertForMaskedLM
    else:
        settings = hf.GPT2Config(
            vocab_size=model.vocabulary,
            n_embd=model.width,
            n_layer=LAYERS,
            n_head=model.heads,
            n_positions=model.sequence,
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
            tie_word_embeddings=False,
        )
        architecture = hf.GPT2LMHeadModel
    settings._attn_implementation = "whole_samples"
    with torch.device("meta"):
        return architecture(settings)


def initialise_on(place: torch.device) -> None:
    """Weights are made on the device, where five billion of them take no time."""

    def quick(*arguments: Any) -> dict[str, Tensor]:
        with torch.device(place):
            return materialise(*arguments)

    vpipe.stage.module.materialise = quick  # type: ignore[attr-defined]


def example(model: Model, samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.vocabulary, (samples, model.sequence), generator=generator)
    labels = ids
    if model.kind == "bert":
        masked = torch.rand(ids.shape, generator=generator) < 0.15
        labels = ids.masked_fill(~masked, -100)
    return {"input_ids": ids, "labels": labels}


def measure(
    model: Model, samples: int, place: torch.device, seconds: float, device: DeviceCost, link: LinkCost
) -> dict[str, Any]:
    """The profile, and how long it took."""
    began = time.perf_counter()
    measured = MeasuredModel(
        build(model),
        example(model, samples),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        precision="bf16",
        place=place,
        run_length=0 if model.width >= WIDE else None,
    )
    ready = time.perf_counter()
    found = measured.measure(seconds, device, link)
    return {"profile": found, "built": ready - began, "measured": time.perf_counter() - ready}


def matrix_flops(place: torch.device) -> float:
    """Operations a second of a large bf16 product, the median: the card's speed for the share that models reach."""
    size = MATRIX if place.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=place, dtype=torch.bfloat16) for _ in range(2))
    taken = []
    for _ in range(PRODUCTS):
        began = _now(place)
        for _ in range(10):
            left @ right
        taken.append((_now(place) - began) / 10)
    return 2 * size**3 / median(taken)


def _now(place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter()


def tiny(model: Model) -> Model:
    return model._replace(
        width=model.width // 64, heads=model.heads // 8, vocabulary=512, sequence=model.sequence // 32
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=MEASURED)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--models", default=",".join(model.name for model in MODELS))
    parser.add_argument("--device", type=Path)
    parser.add_argument("--about", default="", help="kept with the figures: such as the commit")
    arguments = parser.parse_args()
    deadline = time.perf_counter() + arguments.limit
    place = choose_device(None, 0)
    initialise_on(place)
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.device:
        known = read_profile(arguments.device)
        device, link = replace(known.device, overhead=0.0), known.link  # blocks are measured with their own
    else:
        device, link = measure_device(place), measure_link(place)
    speed = matrix_flops(place)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    card = {"device": name, "torch": torch.__version__, "matrix_flops": speed, "about": arguments.about}
    (arguments.output / "scaling_card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: {speed / 1e12:.0f} TFLOP/s, {device}", flush=True)
    parts = arguments.models.split(",")
    for model in (model for part in parts for model in MODELS if part in model.name):
        real = model if place.type == "cuda" else tiny(model)
        for samples in model.samples:
            if time.perf_counter() > deadline:
                print(f"{model.name}, {samples} samples: no time is left")
                continue
            try:
                found = measure(real, samples, place, arguments.seconds, device, link)
            except (RuntimeError, VPipeError) as error:  # out of memory, mostly: the others go on
                print(f"{model.name}, {samples} samples: {error}", flush=True)
                continue
            finally:
                gc.collect()
                torch.cuda.empty_cache()
            write_profile(found["profile"], profile_path(model, samples, arguments.output))
            layer = found["profile"].blocks[1:3]
            busy = sum(block.forward + block.backward for block in layer)
            flops = real.sequence * samples * real._replace(layers=1, vocabulary=0).token_flops
            print(
                f"{model.name}, {samples} samples: built in {found['built']:.1f} s, measured in "
                f"{found['measured']:.1f} s, a layer takes {busy * 1e3:.2f} ms: {flops / busy / 1e12:.0f} TFLOP/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
