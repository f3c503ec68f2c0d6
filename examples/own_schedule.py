"""A schedule of one's own, as a CSV file: drawn, checked, proven equal to the plain model; no ranks are needed.

    python examples/own_schedule.py
    vpipe train configs/bert_tiny.yml --set schedule=$PWD/examples/own_schedule.csv --set stages=2

A row is a rank, a cell an action: `0F2` is the forward of minibatch 2 on stage 0, `B` a backward, `STEP3` the update
after minibatch 3. `vpipe schedule 1f1b --stages 2 --minibatches 4 --csv mine.csv` writes a table to begin with. This
one is 1F1B whose first rank runs one forward more ahead: it hides a slow link, and holds one more minibatch.
"""

from pathlib import Path

import torch
from torch import nn

import vpipe
from vpipe.schedule import check, draw, read_table

TABLE = Path(__file__).with_name("own_schedule.csv")


def main() -> vpipe.verify.Verification:
    schedule = read_table(TABLE.read_text(), TABLE.name)
    check(schedule)  # raises, with a drawing, if it cannot run
    print(draw(schedule))
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator))
    result = vpipe.verify(
        nn.Sequential(*layers), batch, loss_fn=nn.functional.mse_loss, schedule=schedule, ranks=2
    )
    print(f"equal to the plain model: {result.ok} (weights differ by {result.weights.largest:.0e} at most)")
    return result


if __name__ == "__main__":
    main()
