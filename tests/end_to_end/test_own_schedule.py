"""A user's own asynchronous schedule through the real command line: drawn, verified, planned, trained."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.command import vpipe
from tests.end_to_end.test_plan import measure_briefly
from tests.end_to_end.test_train import losses, only_run, tiny  # noqa: F401 (a fixture)
from tests.own_schedule import OWN


def test_a_table_is_verified_planned_and_trained(tiny: Callable[..., Path]) -> None:  # noqa: F811
    folder = tiny(schedule="own.csv", partition="auto", gpu_memory="1GiB", max_updates=6)
    (folder / "own.csv").write_text(OWN)
    drawn = vpipe("schedule", "--from", "own.csv", "--json", cwd=folder)
    assert json.loads(drawn.out)["versions"] == [2, 1], drawn.said
    verified = vpipe("verify", "run.yml", "--set", "partition=[2,3]", "--json", cwd=folder)
    assert verified.code == 0, verified.said
    assert json.loads(verified.out)["schedule"] == "own.csv"
    ended = vpipe("train", "run.yml", cwd=folder, prepare=measure_briefly)
    assert ended.code == 0, ended.said
    run = only_run(folder)
    plan = json.loads((run / "plan.json").read_text())
    assert plan["schedule"] == str(folder / "own.csv")
    assert plan["replicas"] == [1, 1]
    assert "update_interval" not in plan  # the table says it
    assert sorted(losses(run)) == list(range(6))
    simulated = vpipe(
        "simulate", "--profile", run / "profile.json", "--plan", run / "plan.json", "--json", cwd=folder
    )
    assert simulated.code == 0, simulated.said
    found = json.loads(simulated.out)
    assert found["versions"] == [2, 1]
    assert found["in_flight"] == [4, 2]
