"""A model of one's own, from nn.Module to trained weights: the example of the README.

    torchrun --nproc-per-node 2 examples/own_model.py

It needs no GPU, trains in seconds, and leaves `weights.pt` in the current directory.
"""

import torch
from torch import nn

import vpipe

torch.manual_seed(0)  # for results that can be repeated
LENGTH = 32
text = torch.tensor(list(open(torch.__file__, "rb").read()))  # a text that is on every machine


class ByteModel(nn.Module):  # predicts the next byte of a text
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=256, batch_first=True)
        self.embedding = nn.Embedding(256, 64)
        self.layers = nn.TransformerEncoder(layer, num_layers=4)
        self.head = nn.Linear(64, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, inputs, targets):  # returns the loss
        hidden = self.layers(self.embedding(inputs), mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def minibatches(count, seed):  # the same ones on every rank
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - LENGTH, (16, 1), generator=generator)
        pieces = text[starts + torch.arange(LENGTH + 1)]
        yield {"inputs": pieces[:, :-1], "targets": pieces[:, 1:]}


pipe = vpipe.Pipeline(
    ByteModel(),
    example_batch=next(minibatches(1, seed=0)),
    stages=2,
    schedule="1f1b",
    minibatches=4,  # in each update
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
)
for update, loss in pipe.train(minibatches(240, seed=1)):  # every rank gets every loss
    if pipe.rank == 0 and update % 20 == 0:
        print(f"update {update}, loss {loss:.3f}")
loss = pipe.evaluate(minibatches(8, seed=2))
print(f"rank {pipe.rank}: evaluation loss {loss:.3f}")
weights = pipe.full_state_dict()  # of the whole model on rank 0, None on the other ranks
if pipe.rank == 0:
    torch.save(weights, "weights.pt")
pipe.close()
