"""A loop like that of Hugging Face's `Trainer`: arguments, data sets, metrics, checkpoints; over two ranks.

    torchrun --nproc-per-node 2 examples/trainer.py

Start it again, and it goes on from its newest checkpoint in `runs/trainer`, with the next minibatch. The report of the
run is `runs/trainer/report.html`.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as hf

import vpipe


@dataclass
class Arguments:
    """Names as in `TrainingArguments`."""

    output_dir: str = "runs/trainer"
    num_train_epochs: int = 3
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 4  # minibatches of an update
    learning_rate: float = 3e-3
    logging_steps: int = 10
    save_steps: int = 20
    seed: int = 0


class Trainer:
    def __init__(self, model, args, train_dataset, eval_dataset, compute_metrics=None, world=None):
        self.args, self.compute_metrics, self.model = args, compute_metrics, model
        size, seed = args.per_device_train_batch_size, args.seed
        self.loader = vpipe.Loader(train_dataset, size, seed=seed)  # the same order on every rank, resumable
        self.eval_batches = list(vpipe.Loader(eval_dataset, size, seed=seed))
        self.pipe = vpipe.Pipeline(
            model,
            self.eval_batches[0],
            minibatches=args.gradient_accumulation_steps,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=args.learning_rate),
            run_dir=args.output_dir,
            seed=seed,
            world=world,
        )

    def train(self) -> None:
        self.pipe.resume(self.loader)  # sets loader.epoch too
        for epoch in range(self.loader.epoch, self.args.num_train_epochs):
            for update, loss in self.pipe.train(self.loader):
                if self.pipe.rank == 0 and update % self.args.logging_steps == 0:
                    print({"loss": round(loss, 4), "epoch": epoch, "step": update})
                if (update + 1) % self.args.save_steps == 0:
                    self.pipe.save()
            figures = self.evaluate()  # on every rank
            if self.pipe.rank == 0:
                print({name: round(value, 4) for name, value in figures.items()} | {"epoch": epoch})

    def evaluate(self) -> dict[str, float]:
        if self.compute_metrics is None:
            return {"loss": self.pipe.evaluate(self.eval_batches)}
        return self.pipe.evaluate(self.eval_batches, self.compute_metrics)

    def save_model(self, folder: Path) -> None:
        weights = self.pipe.full_state_dict()  # None on the other ranks
        if weights is not None:
            self.model.load_state_dict(weights)
            self.model.save_pretrained(folder)


def build_model() -> hf.PreTrainedModel:
    """A small BERT that classifies sequences."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64}
    settings = hf.BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=16, num_labels=2)
    return hf.BertForSequenceClassification(settings)


def build_data(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of numbers; the label says whether the first is larger than the second."""
    rows = torch.randint(64, (count, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": (row[0] > row[1]).long()} for row in rows]


def accuracy(output, batch) -> dict[str, torch.Tensor]:
    return {"accuracy": (output["logits"].argmax(-1) == batch["labels"]).float().mean()}


def main(args: Arguments, samples: int = 1024, model=None, world=None) -> dict[str, float]:
    trainer = Trainer(
        model or build_model(), args, build_data(samples, 1), build_data(64, 2), accuracy, world
    )
    with trainer.pipe:  # writes the report at its end
        trainer.train()
        trainer.save_model(Path(args.output_dir) / "model")
        return trainer.evaluate()


if __name__ == "__main__":
    main(Arguments())
