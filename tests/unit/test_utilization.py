"""The share of the cards' peak (`mfu`): its flops are those that torch counts, its peak that of the card's name."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vpipe.observe.utilization as utilization
from tests import models
from vpipe.graph import capture
from vpipe.observe.screen import TOO_SHORT, speed_text
from vpipe.observe.utilization import Utilization
from vpipe.pipeline.threads import run_ranks
from vpipe.system.card_peak import device_peak, named_peak


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixtral"])
def test_the_flops_of_a_graph_are_those_that_torch_counts(name: str) -> None:
    model, batch, _ = getattr(models, name)(layers=1)
    # Attention and experts of float32 on a CPU run as operations that torch's counter does not know.
    model.set_attn_implementation("eager")
    if name == "mixtral":
        model.set_experts_implementation("batched_mm")
    with FlopCounterMode(display=False) as counter:
        model(**batch)
    assert sum(block.flops for block in capture(model, batch).blocks) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16", 790.0),
        ("NVIDIA H200", "fp32", 67.0),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("NVIDIA H200 MIG 1g.18gb", "bf16", None),
        ("NVIDIA GeForce GTX 1080", "fp16", None),
    ],
)
def test_the_peak_of_a_card(name: str, precision: str, tera: float | None) -> None:
    assert named_peak(name, precision) == (None if tera is None else tera * 1e12)


@pytest.mark.parametrize(
    ("cards", "peak"),
    [(["a", "a", "a"], 1e6), (["a", "a", "b"], 2e6), (["", "", ""], 1e6)],
    ids=["one card", "two cards", "the CPU of one host"],
)
def test_ranks_of_one_card_share_its_peak(
    monkeypatch: pytest.MonkeyPatch, cards: list[str], peak: float
) -> None:
    monkeypatch.setattr(utilization, "card_identity", lambda device: cards[int(device)])
    blocks = [SimpleNamespace(flops=1000), SimpleNamespace(flops=500)]

    def measure(world: Any) -> tuple[dict[str, float], dict[str, float]]:
        layout = SimpleNamespace(graph=SimpleNamespace(blocks=blocks), precision="bf16")
        schedule = SimpleNamespace(update_interval=4)
        pipe: Any = SimpleNamespace(layout=layout, schedule=schedule, world=world, device=world.rank)
        monkeypatch.setattr(utilization, "device_peak", lambda *_: None)
        return Utilization(pipe, peak_tflops=1e-6).mfu(2.0), Utilization(pipe).mfu(2.0)

    for share, unknown in run_ranks(3, measure):
        assert share == {"mfu": pytest.approx(3 * 4 * 1500 / 2.0 / peak)}
        assert unknown == {}


def test_a_cpu_has_no_known_peak_and_shows_none() -> None:
    assert device_peak(torch.device("cpu"), "bf16") is None
    assert speed_text({"samples_per_s": 2.0}) == "2.0 samples/s"
    assert speed_text({"samples_per_s": 0.0, "tokens_per_s": 0.0}) == TOO_SHORT
    known = speed_text({"samples_per_s": 2.0, "tokens_per_s": 1024.0, "mfu": 0.4567})
    assert re.fullmatch(r"2\.0 samples/s, 1024 tokens/s, mfu 45\.7%", known)
