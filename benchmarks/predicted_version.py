"""The time that a predicted version of the weights takes, as a share of a minibatch: a stage of a GPT on one device.

    python benchmarks/predicted_version.py --layers 24 --width 1024 --samples 8 --length 1024

A minibatch is its forward, its backward and its update, with `--in-flight` minibatches between a forward and its
backward: each of them holds a version, as in the first stage of an asynchronous pipeline. Stages with and without
prediction take turns of some minibatches, in which the host never waits for the device, as in a run; the figures are
medians over the turns, and the cost is the median of the differences between neighbouring turns.

Prediction adds to an update: what is read besides the weights, which any version is cast from (the moments of AdamW, 8
bytes a parameter; for Muon the weights before the last update, 4 bytes), and what is written besides it (these weights,
8 bytes for their copy). `--bandwidth` says how fast the device's memory is; the floor is these bytes at that speed.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
import transformers as hf

from vpipe.weights import Delay, OptimizerWithWeightStashing, optimizer_factory
from vpipe.weights.muon import Muon


class TimedStage:
    """A whole GPT as the first of some stages, with or without prediction."""

    def __init__(
        self, optimizer: str, predict: bool, arguments: argparse.Namespace, device: torch.device
    ) -> None:
        settings = hf.GPT2Config(
            vocab_size=arguments.vocabulary,
            n_embd=arguments.width,
            n_layer=arguments.layers,
            n_head=max(1, arguments.width // 64),
            n_positions=arguments.length,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
        torch.manual_seed(0)
        with device:
            self.model: Any = hf.GPT2LMHeadModel(settings)
        masters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.model.to(torch.bfloat16)
        self.weights = OptimizerWithWeightStashing(
            dict(self.model.named_parameters()),
            optimizer_factory(optimizer, 1e-4, 0.01),
            master_values=masters,
            predict=predict,
            versions=arguments.in_flight + 1,
        )
        self.in_flight, self.device, self.made = arguments.in_flight, device, 0
        self.ids = torch.randint(arguments.vocabulary, (arguments.samples, arguments.length), device=device)

    def run(self, minibatches: int) -> float:
        """Seconds of a minibatch."""
        _wait(self.device)
        start = time.perf_counter()
        for number in range(self.made, self.made + minibatches):
            self.weights.load_new_params(number, Delay(self.in_flight))
            self.model(input_ids=self.ids, labels=self.ids).loss.backward()
            if number >= self.in_flight:
                self.weights.release(number - self.in_flight)
            self.weights.step()
        self.made += minibatches
        _wait(self.device)
        return (time.perf_counter() - start) / minibatches

    @property
    def more_bytes(self) -> int:
        """That prediction reads and writes for a minibatch; a fused step adds no pass."""
        return sum(
            p.numel() * (12 if isinstance(own, Muon) else 8)
            for own in self.weights.optimizers
            for group in own.param_groups
            for p in group["params"]
        )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("layers", 24), ("width", 1024), ("vocabulary", 32768), ("samples", 8), ("length", 1024), ("in-flight", 3),
        ("minibatches", 8), ("turns", 7),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--optimizers", default="adamw,muon")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="of the device's memory, TB/s")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for optimizer in arguments.optimizers.split(","):
        stages = [TimedStage(optimizer, predict, arguments, device) for predict in (False, True)]
        for stage in stages:
            stage.run(arguments.in_flight + 2)
        turns = [[stage.run(arguments.minibatches) for stage in stages] for _ in range(arguments.turns)]
        plain, predicted = (median(times) for times in zip(*turns, strict=True))
        more = sorted(second - first for first, second in turns)
        moved = stages[1].more_bytes
        floor = moved / (arguments.bandwidth * 1e12)
        print(
            f"{optimizer:8} {1000 * plain:8.2f} ms a minibatch, {1000 * predicted:8.2f} ms with predicted versions: "
            f"{1000 * median(more):+.2f} ms, {100 * median(more) / plain:+.1f} % ({100 * more[0] / plain:+.1f} to "
            f"{100 * more[-1] / plain:+.1f} % in {arguments.turns} turns)\n"
            f"{'':8} {moved / 1e9:.2f} GB more, at {arguments.bandwidth} TB/s {1000 * floor:.2f} ms, "
            f"{100 * floor / plain:.1f} %",
            flush=True,
        )
        del stages, stage


if __name__ == "__main__":
    main()
