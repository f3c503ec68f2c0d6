"""The time that a predicted version of the weights takes, as a share of a minibatch: a stage of a GPT on one device.

    python benchmarks/predicted_version.py --layers 24 --width 1024 --samples 8 --length 1024

A minibatch is its forward, its backward and its update, with `--in-flight` minibatches between a forward and its
backward: each of them holds a version, as in the first stage of an asynchronous pipeline. Times are medians.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
import transformers as hf

from vpipe.weights import Delay, OptimizerWithWeightStashing, optimizer_factory


def seconds(optimizer: str, predict: bool, arguments: argparse.Namespace, device: torch.device) -> float:
    """Of a minibatch."""
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
    times = []
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
    return median(times[arguments.in_flight + 2 :])


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
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for optimizer in arguments.optimizers.split(","):
        plain, predicted = (seconds(optimizer, predict, arguments, device) for predict in (False, True))
        print(
            f"{optimizer:8} {1000 * plain:8.2f} ms a minibatch, {1000 * predicted:8.2f} ms with predicted versions: "
            f"{100 * (predicted / plain - 1):+.1f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
