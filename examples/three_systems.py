"""Three systems compared before anything is trained: what a minibatch costs on four ranks, in time and memory.

    python examples/three_systems.py

The model is measured here once; then each system is simulated. GPipe fills and drains the pipeline and recomputes
everything. PipeDream never waits and keeps everything. vpipe does not wait either; its plan chooses the cuts, and for
each block whether it is kept, recomputed or swapped, within a memory between those of the other two. To train all
three: `vpipe compare configs/bert_4gpipe.yml configs/bert_4pipedream.yml configs/bert_4vpipe.yml`.
"""

import torch
import transformers as hf

import vpipe
from vpipe.cost import Plan
from vpipe.system.units import show_bytes

RANKS = 4


def build_model(layers: int) -> tuple[hf.PreTrainedModel, dict[str, torch.Tensor]]:
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": layers, "intermediate_size": 128}
    model = hf.BertForMaskedLM(hf.BertConfig(**sizes, num_attention_heads=4))
    ids = torch.randint(256, (32, 64), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": ids, "labels": ids}


def main(layers: int = 8, seconds: float = 5.0) -> dict[str, vpipe.simulate.Simulation]:
    model, batch = build_model(layers)
    profile = vpipe.profile(
        model, batch, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), seconds=seconds
    )
    blocks = len(profile.blocks)
    even = [blocks // RANKS + (rank < blocks % RANKS) for rank in range(RANKS)]
    found = {
        "GPipe": vpipe.simulate(profile, Plan(even, ["recompute"] * blocks, "gpipe", minibatches=4 * RANKS)),
        "PipeDream": vpipe.simulate(profile, Plan(even, ["keep"] * blocks, "pipedream")),
    }
    memory = sum(largest(result) for result in found.values()) // 2
    plan = vpipe.plan(profile, ranks=RANKS, memory=memory, schedule="vpipe").to_plan()
    found["vpipe"] = vpipe.simulate(profile, plan)
    for name, result in found.items():
        speed, peak = result.samples_per_second, show_bytes(largest(result))
        print(f"{name:10} {speed:8.1f} samples/s, {peak} on the rank that needs most")
    print(f"the plan: partition {list(plan.partition)}, policies {' '.join(plan.policies)}")
    return found


def largest(result: vpipe.simulate.Simulation) -> int:
    return max(rank.memory.total for rank in result.ranks)


if __name__ == "__main__":
    main()
