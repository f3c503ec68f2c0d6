"""The time that a predicted version of the weights takes, as a share of a minibatch: a stage of a GPT on one device.

    python benchmarks/predicted_version.py --layers 24 --width 1024 --samples 8 --length 1024

A minibatch is its forward, its backward and its update, with `--in-flight` minibatches between a forward and its
backward: each of them holds a version, as in the first stage of an asynchronous pipeline. Times are medians.

Prediction adds to an update: what is read besides the weights, which any version is cast from (the moments of AdamW, 8
bytes a parameter; for Muon the weights before the last update, 4 bytes), and what is written besides it (these weights,
8 bytes for their copy). `--bandwidth` says how fast the device's memory is; the floor is these bytes at that speed.
"""

import argparse
import time
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers as hf

from vpipe.weights import Delay, OptimizerWithWeightStashing, optimizer_factory
from vpipe.weights.versions import Version


class Measured(NamedTuple):
    minibatch: float
    """Seconds."""
    version: float
    """Seconds to write one, alone: predicted, or cast from the masters."""
    versions: float
    """Written for each minibatch."""
    more_bytes: int
    """That prediction reads and writes for a minibatch."""


def measure(optimizer: str, predict: bool, arguments: argparse.Namespace, device: torch.device) -> Measured:
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
        model: Any = hf.GPT2LMHeadModel(settings)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.to(torch.bfloat16)
    weights = OptimizerWithWeightStashing(
        dict(model.named_parameters()),
        optimizer_factory(optimizer, 1e-4, 0.01),
        master_values=masters,
        predict=predict,
        versions=arguments.in_flight + 1,
    )
    ids = torch.randint(arguments.vocabulary, (arguments.samples, arguments.length), device=device)
    times, written, known = [], 0, weights._take_storage

    def counted(*given: int) -> Version:
        nonlocal written
        written += 1
        return known(*given)

    weights._take_storage = counted  # type: ignore[method-assign]
    for minibatch in range(arguments.minibatches):
        _wait(device)
        start = time.perf_counter()
        weights.load_new_params(minibatch, Delay(arguments.in_flight))
        model(input_ids=ids, labels=ids).loss.backward()
        if minibatch >= arguments.in_flight:
            weights.release(minibatch - arguments.in_flight)
        weights.step()
        _wait(device)
        times.append(time.perf_counter() - start)
    per_minibatch = written / arguments.minibatches
    alone = []
    for minibatch in range(arguments.minibatches, 2 * arguments.minibatches):
        _wait(device)
        start = time.perf_counter()
        if predict:
            weights.load_new_params(minibatch, Delay(arguments.in_flight))
        else:
            weights._publish()
        _wait(device)
        alone.append(time.perf_counter() - start)
        if predict:
            weights.release(minibatch)
            weights._recycle_unused()
    # A fused step adds no pass: the moments are read for the version alone.
    more = 0
    for own in weights.optimizers if predict else ():
        count = sum(p.numel() for group in own.param_groups for p in group["params"])
        more += count * (12 if isinstance(own, torch.optim.Muon) else 8)
    return Measured(median(times[arguments.in_flight + 2 :]), median(alone), per_minibatch, more)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("layers", 24), ("width", 1024), ("vocabulary", 32768), ("samples", 8), ("length", 1024), ("in-flight", 3),
        ("minibatches", 24),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--optimizers", default="adamw,muon")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="of the device's memory, TB/s")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for optimizer in arguments.optimizers.split(","):
        plain, predicted = (measure(optimizer, predict, arguments, device) for predict in (False, True))
        floor = predicted.more_bytes / (arguments.bandwidth * 1e12)
        more = predicted.minibatch - plain.minibatch
        print(
            f"{optimizer:8} {1000 * plain.minibatch:8.2f} ms a minibatch, {1000 * predicted.minibatch:8.2f} ms with "
            f"predicted versions: {1000 * more:+.2f} ms, {100 * more / plain.minibatch:+.1f} %\n"
            f"{'':8} {predicted.more_bytes / 1e9:.2f} GB more, at {arguments.bandwidth} TB/s {1000 * floor:.2f} ms, "
            f"{100 * floor / plain.minibatch:.1f} %; a version alone {1000 * plain.version:.2f} ms, predicted "
            f"{1000 * predicted.version:.2f} ms; versions written a minibatch: {predicted.versions:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
