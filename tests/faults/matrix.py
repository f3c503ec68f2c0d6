"""Every rank x every point x kill, and the other kinds: `make faults`. Writes the tables of docs/reliability.md.

python -m tests.faults.matrix [--docs docs/reliability.md] [--only kill:fwd]
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tests.faults import unwatched
from tests.faults.runs import Measured, final_weights, measure, train, write_config
from tests.faults.unwatched import TO_END, Gone, measure_unwatched
from vpipe.system.faults import POINTS

RANKS = 3
STEP = 9
LIMIT = 10.0
"""The ranks' `heartbeat_limit`, in seconds."""
BEGIN, END = "<!-- measured by make faults -->\n", "<!-- end -->\n"

ABSENT = {
    (0, "fwd_recv"),
    (0, "bwd_send"),
    (RANKS - 1, "fwd_send"),
    (RANKS - 1, "bwd_recv"),
    (1, "reduce"),  # of the tied weights, which the first and the last stage hold
    *((rank, "ckpt_commit") for rank in range(1, RANKS)),
}
"""Points that a rank does not pass."""
WITHOUT_STEP = ("rendezvous", "init", "ckpt_write", "ckpt_commit", "eval", "shutdown")


def cases() -> Iterator[dict[str, Any]]:
    for point in POINTS:
        for rank in range(RANKS):
            if (rank, point) not in ABSENT:
                yield {"rank": rank, "point": point, "kind": "kill"}
    for kind in ("segv", "raise", "exit", "stop", "gil"):
        for rank in range(RANKS):
            yield {"rank": rank, "point": "fwd", "kind": kind}


def restarted(fault: dict[str, Any]) -> bool:
    """One rank of each: to start again takes longer than all the rest."""
    return bool(fault["rank"] == (0 if (1, fault["point"]) in ABSENT else 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--only", help="kind:point", default=":")
    arguments = parser.parse_args()
    kind, _, point = arguments.only.partition(":")
    chosen = [c for c in cases() if kind in ("", c["kind"]) and point in ("", c["point"])]
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder, RANKS, evaluation_interval=6, heartbeat_limit=LIMIT)
        ended, run = train(folder)
        assert ended.code == 0, ended.said
        weights = final_weights(run)
        for number, case in enumerate(chosen, 1):
            if case["point"] == "data":
                case["minibatch"] = STEP
            elif case["point"] not in WITHOUT_STEP:
                case["step"] = STEP
            one = measure(folder, RANKS, case, weights if restarted(case) else None)
            found.append(one)
            print(f"{number}/{len(chosen)}", json.dumps(one.as_dict()), flush=True)
    gone: list[Gone] = []
    if arguments.only == ":":
        with tempfile.TemporaryDirectory() as name:
            gone = measure_unwatched(Path(name))
    table = as_table(found) + ("\n" + unwatched.as_table(gone) if gone else "")
    print(table)
    if arguments.docs:
        text = arguments.docs.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        arguments.docs.write_text(before + BEGIN + table + END + after)
    assert all(one.struck and one.named and one.clean for one in found), "some did not end as they should"
    assert all(one.exit is not None and one.exit <= longest(one) for one in found), "some took too long"
    assert all(one.seconds <= one.most for one in gone), "some took too long"


def longest(one: Measured) -> float:
    """Seconds until all ranks are gone: who ends is found at once, who stands still by the limit."""
    return TO_END + (LIMIT if one.kind in ("stop", "gil") else 0.0)


def as_table(found: list[Measured]) -> str:
    lines = [
        "| kind | point | cases | found after (s) | all gone after (s) | trains again after (s) "
        "| steps lost | culprit right | nothing left, same weights |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, point in dict.fromkeys((one.kind, one.point) for one in found):
        some = [one for one in found if (one.kind, one.point) == (kind, point)]
        lost = [one.lost for one in some if one.lost is not None]
        lines.append(
            f"| {kind} | {point} | {len(some)} | {_span([one.detect for one in some])} "
            f"| {_span([one.exit for one in some])} | {_span([one.recover for one in some])} "
            f"| {max(lost, default='')} | {sum(one.named for one in some)} of {len(some)} "
            f"| {sum(one.clean for one in some)} of {len(some)} |"
        )
    return "\n".join(lines) + "\n"


def _span(values: list[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return ""
    return f"{known[0]:.1f}" if len(known) == 1 else f"{median(known):.1f} (at most {known[-1]:.1f})"


if __name__ == "__main__":
    main()
