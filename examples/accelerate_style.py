"""The loop of a script for Hugging Face's `accelerate`, with a pipeline in the place of the `Accelerator`.

    torchrun --nproc-per-node 2 examples/accelerate_style.py

| accelerate                                            | here                                           |
|-------------------------------------------------------|------------------------------------------------|
| `accelerator.prepare(model, optimizer, loader)`       | `vpipe.Pipeline(model, batch, optimizer=...)`  |
| `Accelerator(gradient_accumulation_steps=4)`          | `minibatches=4`                                |
| `model(...)`, `accelerator.backward`, `optimizer.step`| `for update, loss in pipe.train(loader)`       |
| `accelerator.clip_grad_norm_`                         | `clip_norm=1.0`                                |
| `accelerator.gather_for_metrics`                      | `pipe.evaluate(batches, metrics=...)`          |
| `accelerator.is_main_process`                         | `pipe.rank == 0`                               |
| `accelerator.save_state`, `load_state`                | `pipe.save`, `pipe.load`                       |
| `accelerator.unwrap_model(model).state_dict()`        | `pipe.full_state_dict()`                       |

accelerate gives every rank the whole model and other samples. Here every rank has a part of the model, and all ranks
read the same samples: give a shuffling loader a generator with a seed.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vpipe


def build_model() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), *layers, nn.Linear(32, 2))


def build_data(count: int, seed: int) -> TensorDataset:
    """Points of the plane; the class says whether a point is inside a circle."""
    points = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(points, (points.norm(dim=1) < 0.8).long())


def accuracy(output, batch) -> dict[str, torch.Tensor]:
    return {"accuracy": (output.argmax(-1) == batch[1]).float().mean()}


def main(
    epochs: int = 5, samples: int = 2048, model: nn.Module | None = None, world=None
) -> dict[str, float]:
    order = torch.Generator().manual_seed(0)
    train = DataLoader(build_data(samples, 1), batch_size=32, shuffle=True, generator=order)
    test = DataLoader(build_data(256, 2), batch_size=32)
    with vpipe.Pipeline(
        model or build_model(),
        next(iter(test)),
        loss_fn=nn.functional.cross_entropy,  # of the output and the rest of a batch
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        minibatches=4,
        clip_norm=1.0,
        world=world,
    ) as pipe:
        for epoch in range(epochs):
            losses = [loss for _, loss in pipe.train(train)]
            figures = pipe.evaluate(test, metrics=accuracy)
            if pipe.rank == 0:
                print(
                    f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, accuracy {figures['accuracy']:.3f}"
                )
        return figures


if __name__ == "__main__":
    main()
