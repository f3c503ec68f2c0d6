"""A model, data and a loss of a user's own, as a module that a configuration names."""

SOURCE = '''
import torch
from torch import nn
import torch.nn.functional as F

CLASS_WEIGHTS = torch.linspace(0.5, 1.5, 20)


class Net(nn.Module):
    """Two inputs, a dict as output, tied weights, buffers of both kinds, frozen and unused parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.kind = nn.Embedding(3, 8)
        self.kind.weight.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Parameter(torch.randn(7))
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("shift", torch.arange(8.0) / 8, persistent=False)
        self.register_buffer("version", torch.tensor(3))

    def forward(self, ids, kinds):
        x = self.embed(ids) * self.scale + self.shift + self.kind(kinds)
        for layer in self.layers:
            x = x + layer(x)
        return {"logits": self.head(x), "hidden": x}


class Data(torch.utils.data.Dataset):
    def __init__(self, count, seed=0):
        self.ids = torch.randint(20, (count, 6), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"ids": ids, "kinds": ids % 3, "targets": (ids + 1) % 20, "weights": torch.rand(()) + 0.5}


def build_model():
    return Net()


def build_data(config):
    return Data(30 * config.batch_size), Data(8, seed=1)


def loss(output, targets, weights):
    logits = output["logits"]
    each = F.cross_entropy(logits.transpose(1, 2), targets, weight=CLASS_WEIGHTS.to(logits), reduction="none")
    return (each.mean(1) * weights).mean()


def metrics(output, batch):
    right = output["logits"].argmax(-1) % 2 == batch["targets"] % 2
    return {"parity": right.double().mean(), "first": (right[:, 0].sum(), len(right))}


NUMBER = 3
'''
RUN = """
model: net:build_model
data: net:build_data
loss: net:loss
stages: 2
batch_size: 4
max_updates: 4
print_frequency: 2
learning_rate: 0.01
timeout: 600
heartbeat_limit: 60
"""
