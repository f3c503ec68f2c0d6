"""Weights & Biases and MLflow: stand-in modules of theirs that write down what they get."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vpipe.errors import ConfigError
from vpipe.observe.figures import MetricsWriter
from vpipe.observe.trackers import check_trackers, start_trackers
from vpipe.system.best_effort import BestEffort

WANDB = """
import json
told = []
class Run:
    def log(self, figures, step):
        if step == 2:
            raise ConnectionError("no route to host")
        told.append([step, figures])
    def finish(self):
        told.append("finished")
def init(project, name, dir, config):
    told.append([project, name, config])
    return Run()
"""
MLFLOW = """
told = []
set_experiment = told.append
def start_run(run_name):
    told.append(run_name)
def log_params(keys):
    told.append(keys)
def log_metrics(figures, step):
    told.append([step, figures])
def end_run():
    told.append("ended")
"""
Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    def write(name: str, text: str) -> None:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / "modules").mkdir(exist_ok=True)
        (tmp_path / "modules" / f"{name}.py").write_text(text)

    yield write
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


def train(folder: Path, **chosen: str) -> list[str]:
    """What is said while some metrics are written."""
    warned: list[str] = []
    effort = BestEffort(warned.append)
    trackers = start_trackers(chosen, folder, {"schedule": "1f1b", "prompt": "x" * 600}, effort)
    metrics = MetricsWriter(folder, effort, trackers)
    for update in (1, 2, 3):
        metrics.write("train", update, loss=4.0 / update, note="no number")
    metrics.write("ranks", 3, ranks=[{"rank": 1, "stages": [1, 2], "bubble_share": 0.5}])
    metrics.close()
    return warned


def told(name: str) -> list[object]:
    found: list[object] = json.loads(json.dumps(sys.modules[name].told))
    return found


def test_wandb_is_told_the_metrics_and_what_fails_costs_no_training(tmp_path: Path, install: Install) -> None:
    install("wandb", WANDB)
    (tmp_path / "run").mkdir()
    warned = train(tmp_path / "run", wandb="our project")
    first, *rest = told("wandb")
    assert first == ["our project", "run", {"schedule": "1f1b", "prompt": "x" * 600}]
    assert rest == [
        [1, {"train/loss": 4.0}],
        [3, {"train/loss": 4.0 / 3}],
        [3, {"rank 1, stage 1, 2/bubble_share": 0.5}],
        "finished",
    ]
    (line,) = warned
    assert "wandb: ConnectionError: no route to host: the run goes on without it" in line
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_mlflow_is_told_names_and_values_that_it_accepts(tmp_path: Path, install: Install) -> None:
    install("mlflow", MLFLOW)
    (tmp_path / "run").mkdir()
    assert train(tmp_path / "run", mlflow="bert") == []
    experiment, name, keys, *rest = told("mlflow")
    assert (experiment, name) == ("bert", "run")
    assert keys == {"schedule": "1f1b", "prompt": "x" * 500}
    assert rest[-2:] == [[3, {"rank 1 stage 1 2/bubble_share": 0.5}], "ended"]


def test_one_that_cannot_begin_is_named_once(tmp_path: Path, install: Install) -> None:
    install("wandb", "def init(**options):\n    raise SystemExit('not logged in')\n")
    (tmp_path / "run").mkdir()
    (line,) = train(tmp_path / "run", wandb="p")
    assert "wandb: SystemExit: not logged in" in line


def test_one_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.observe.trackers.find_spec", lambda name: None)
    check_trackers(Path("run.yml"), {"wandb": None, "mlflow": None})
    with pytest.raises(ConfigError, match=r"^run.yml: mlflow is 'bert', and .* pip install mlflow, or leave"):
        check_trackers(Path("run.yml"), {"wandb": None, "mlflow": "bert"})
