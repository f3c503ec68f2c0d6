"""Two hosts with one rank each. Start it on both, with the name of the first:

    torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr HOST0 --master-port 29500 examples/two_hosts.py
    torchrun --nnodes 2 --nproc-per-node 1 --node-rank 1 --master-addr HOST0 --master-port 29500 examples/two_hosts.py

Nothing in the script is about hosts: any example can be started like this, with as many ranks as GPUs on each host. The
channel between two ranks is chosen by itself: shared memory or CUDA IPC within a host, NCCL or gloo between hosts. Each
rank saves its own part of a checkpoint, so the folder of checkpoints must be one that all hosts see. `vpipe train` with
`machines: ['host0:0', 'host1:0']` starts the ranks of other hosts itself (docs/many_machines.md).
"""

import socket
import sys

import torch
from torch import nn

import vpipe


def build_model() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 1))


def minibatches(count: int):
    """The same on every host: they are made from a seed. Files would have to be on both."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        points = torch.randn(32, 64, generator=generator)
        yield points, points.square().sum(1, keepdim=True)


def main(checkpoints: str | None = None, updates: int = 20) -> float:
    with vpipe.Pipeline(
        build_model(),
        next(minibatches(1)),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        minibatches=4,
    ) as pipe:
        hosts = pipe.world.all_gather("hosts", socket.gethostname())
        for update, loss in pipe.train(minibatches(4 * updates)):
            if pipe.rank == 0 and update % 5 == 0:
                print(f"update {update}, loss {loss:.1f}, ranks on {', '.join(hosts)}", flush=True)
        if checkpoints is not None:
            pipe.save(checkpoints)
        return loss


if __name__ == "__main__":
    main(*sys.argv[1:2])
