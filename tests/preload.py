"""The contents of the server before it forks: all imports, and the models that most tests train, captured.

Importing takes seconds of every new process, and capturing takes longer than the trainings of most tests. Any
other model is captured where it is used.
"""

import gc
import importlib

import vpipe.pipeline.captured
from tests.captures import capture_once, capture_run, capture_unknown
from tests.end_to_end.tiny import MODEL
from tests.multiprocess import tasks
from vpipe.config import RunConfig

for name in (
    *(
        "vpipe.train.rank",
        "vpipe.train.export",
        "vpipe.train.trainer",
        "tensorboard.summary.writer.record_writer",
    ),
    *("tests.faults.runs", "tests.end_to_end.forked"),
):
    importlib.import_module(name)
capture_once(*tasks.bert())
capture_run(RunConfig(**MODEL))
vpipe.pipeline.captured.capture = capture_unknown
tasks.adamw(
    list(tasks.bert()[0].parameters())
).step()  # without gradients: imports what optimizers import late
gc.freeze()  # a collection in a fork need not touch, and so copy, what is here
