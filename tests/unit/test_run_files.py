"""The small files of a run's folder, as a run leaves them that was restarted."""

import json
from pathlib import Path

from vpipe.observe.report import run_data
from vpipe.record.run_folder import read_metrics


def test_what_a_restarted_run_told_last_counts(tmp_path: Path) -> None:
    told = [
        ("train", 10, 4.0), ("evaluation", 10, 4.5), ("train", 20, 3.0), ("train", 30, 9.0), ("evaluation", 30, 9.5),
        # Killed; it goes on from a checkpoint after 15 updates, and 30 is not made again yet.
        ("train", 20, 3.5), ("evaluation", 25, 3.25),
    ]  # fmt: skip
    lines = [{"kind": kind, "update": update, "loss": loss} for kind, update, loss in told]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    kept = [(line["kind"], line["update"], line["loss"]) for line in read_metrics(tmp_path)]
    assert kept == [("train", 10, 4.0), ("evaluation", 10, 4.5), ("train", 20, 3.5), ("evaluation", 25, 3.25)]
    shown = run_data(tmp_path, "run")
    assert shown["losses"] == [[10, 4.0], [20, 3.5]]
    assert shown["evaluations"] == [[10, 4.5], [25, 3.25]]
    (tmp_path / "summary.json").write_text(json.dumps({"losses": [[15, 3.75], [16, 3.5]]}))
    assert run_data(tmp_path, "run")["losses"] == [[10, 4.0], [16, 3.75], [17, 3.5]]
