"""DeepSpeed's pipeline engine (1F1B with a flush), on the CPU.

It builds from source and finds torch only without build isolation:

    DS_BUILD_OPS=0 pip install --no-build-isolation -c constraints.txt deepspeed
"""

from __future__ import annotations

import itertools
import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read at import; there may be a GPU

import deepspeed
import work
from deepspeed.ops import __compatible_ops__
from deepspeed.pipe import PipelineModule

from systems import Runner, Schedule, System

# An all-reduce for CPUs, which a pipeline does not call: it would be compiled here and now, for minutes.
__compatible_ops__["deepspeed_shm_comm"] = False


class DeepSpeed(System):
    schedules = (Schedule("1F1B"),)

    def build(self, rank: int, world: int, minibatches: int, schedule: str) -> Runner:
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        module = PipelineModule(
            work.build_model().pieces(), num_stages=world, loss_fn=work.loss, partition_method="uniform"
        )
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=work.build_optimizer(module.parameters()),
            config={
                "train_micro_batch_size_per_gpu": work.MINIBATCH,
                "gradient_accumulation_steps": minibatches,
                "steps_per_print": 10**9,
            },
        )
        return DeepSpeedRunner(engine, minibatches, last=rank == world - 1)


class DeepSpeedRunner(Runner):
    def __init__(self, engine, minibatches: int, last: bool) -> None:
        self.engine = engine
        self.batches = itertools.cycle(work.batches(minibatches))
        self.last = last

    def step(self) -> float:
        # Every rank gets the mean loss; only the last stage's counts.
        loss = self.engine.train_batch(data_iter=self.batches).item()
        return loss if self.last else 0.0

    def close(self) -> None:
        self.engine.destroy()


SYSTEM = DeepSpeed()
