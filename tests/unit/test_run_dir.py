"""A script's pipeline: the files of its run, checkpoints that resume to the bit, the position in the data."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import vpipe
from tests.own_model import SOURCE
from vpipe.checkpoint import read_manifest
from vpipe.cli import make_app
from vpipe.errors import VPipeError
from vpipe.pipeline.threads import run_ranks

pytestmark = pytest.mark.usefixtures("capture_once")
OWN: dict[str, Any] = {}
exec(SOURCE, OWN)
torch.manual_seed(0)
MODEL = OWN["Net"]()


def loader(count: int = 40) -> vpipe.Loader:
    return vpipe.Loader(OWN["Data"](count), 4)


BATCHES = list(
    loader()
)  # read once: samples draw random numbers, which ranks as threads would draw side by side


def in_ranks(
    work: Callable[[Any], Any], run_dir: Path | None = None, ranks: int = 2, **options: Any
) -> list[Any]:
    """What `work` returns for the pipeline of each rank."""
    arguments = {"schedule": "1f1b", "optimizer": lambda params: torch.optim.AdamW(params, 0.01)} | options

    def run(world: Any) -> Any:
        with vpipe.Pipeline(
            MODEL, BATCHES[0], loss_fn=OWN["loss"], world=world, run_dir=run_dir, **arguments
        ) as pipe:
            return work(pipe)

    return run_ranks(ranks, run)


def test_the_files_of_a_run(tmp_path: Path) -> None:
    def work(pipe: vpipe.Pipeline) -> list[float]:
        losses = [loss for _, loss in pipe.train(loader())]
        pipe.evaluate(loader(8))
        return losses

    losses, _ = in_ranks(work, tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        "events.0.json",
        "events.1.json",
        "trace.json",
        "report.html",
        "metrics.jsonl",
        "stages.json",
    } <= names
    assert {"plan.json", "output.log.0", "status.1.json", "tensorboard"} <= names
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [loss for _, loss in summary["losses"]] == losses
    assert summary["evaluations"][0][0] == len(losses) == summary["updates"]
    assert (summary["ended"], summary["lost_writes"]) == ("complete", 0)
    for command in (["top", "--once"], ["diagnose"], ["report", "-o", str(tmp_path / "again.html")]):
        told = CliRunner().invoke(
            make_app(), [command[0], str(tmp_path / "run"), *command[1:]], catch_exceptions=False
        )
        assert told.exit_code == 0, told.output


def test_a_run_that_fails_leaves_its_events_and_a_summary(tmp_path: Path) -> None:
    def work(pipe: vpipe.Pipeline) -> None:
        for update, _ in pipe.train(loader()):
            if update == 1:
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        in_ranks(work, tmp_path / "run")
    assert (tmp_path / "run/events.0.json").exists()
    assert "mine" in json.loads((tmp_path / "run/status.0.json").read_text())["error"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["ended"], summary["error"]) == ("failed", "KeyError: 'mine'")
    assert (tmp_path / "run/report.html").exists()


def trained(pipe: vpipe.Pipeline, stop: int | None = None) -> None:
    """Two epochs, with a save at the third update; `stop` leaves it in the middle."""
    source = loader()
    pipe.resume()
    for epoch in range(source.epoch if pipe.updates == 0 else 0, 2):
        for update, _ in pipe.train(source):
            if update == 2:
                pipe.save(extra={"epoch": epoch})
            if update + 1 == stop:
                return
        if source.epoch == 2:
            break
    pipe.save()


@pytest.mark.parametrize("schedule", ["1f1b", "vpipe"])
def test_resuming_equals_never_having_stopped(tmp_path: Path, schedule: str) -> None:
    in_ranks(trained, tmp_path / "whole", schedule=schedule)
    in_ranks(lambda pipe: trained(pipe, stop=4), tmp_path / "stopped", schedule=schedule)
    in_ranks(trained, tmp_path / "stopped", schedule=schedule)
    last = [sorted((tmp_path / run / "checkpoints").iterdir())[-1] for run in ("whole", "stopped")]
    whole, resumed = map(read_manifest, last)
    assert whole.files == resumed.files  # hashes of all weights and momenta
    assert (whole.updates, whole.extra) == (resumed.updates, resumed.extra)
    assert whole.extra["data"]["minibatch"] == 20


def test_load_takes_any_folder_and_returns_what_was_saved(tmp_path: Path) -> None:
    def save(pipe: vpipe.Pipeline) -> Path:
        assert pipe.resume() is None
        for _ in pipe.train(loader()):
            pass
        return pipe.save(extra={"note": [1, "a"]})

    path, other = in_ranks(save, tmp_path / "run")
    assert path == other == tmp_path / "run/checkpoints/step-00000003"

    def load(pipe: vpipe.Pipeline) -> list[tuple[Any, int]]:
        return [(pipe.load(folder), pipe.updates) for folder in (path, path.parent, path.parents[1])]

    assert in_ranks(load) == [[({"note": [1, "a"]}, 3)] * 3] * 2
    assert in_ranks(load, ranks=1)[0] == [({"note": [1, "a"]}, 3)] * 3  # another partition


class Counted:
    """A user's own resumable loader."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        while self.given < len(BATCHES):
            self.given += 1
            yield BATCHES[self.given - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def test_a_users_own_state(tmp_path: Path) -> None:
    def first(pipe: vpipe.Pipeline) -> None:
        for update, _ in pipe.train(Counted()):
            if update == 0:
                pipe.save()
                return

    in_ranks(first, tmp_path / "run", minibatches=4)

    def second(pipe: vpipe.Pipeline) -> tuple[int, list[int]]:
        pipe.resume()
        source = Counted()
        return pipe.updates, [update for update, _ in pipe.train(source)]

    assert in_ranks(second, tmp_path / "run", minibatches=4) == [(1, [1, 2])] * 2

    def plain(pipe: vpipe.Pipeline) -> None:
        pipe.resume()
        list(pipe.train(BATCHES))

    with pytest.raises(VPipeError, match="a list was given, which has no load_state_dict: give a"):
        in_ranks(plain, tmp_path / "run", minibatches=4)

    def weights_only(pipe: vpipe.Pipeline) -> int:
        pipe.load(tmp_path / "run", data=False)
        return len(list(pipe.train(BATCHES)))

    assert in_ranks(weights_only, minibatches=4) == [3, 3]


def test_a_loader_reads_each_sample_once_an_epoch_and_goes_on_anywhere() -> None:
    whole = loader()
    epochs = [[batch["ids"] for batch in whole] for _ in range(2)]
    assert whole.epoch == 2
    rows = [sorted(map(tuple, torch.cat(epoch).tolist())) for epoch in epochs]
    assert rows[0] == rows[1]
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))
    again = loader()
    again.load_state_dict({**again.state_dict(), "minibatch": 13})
    assert len(again) == 7
    assert all(torch.equal(a["ids"], b) for a, b in zip(again, epochs[1][3:], strict=True))


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(
        VPipeError, match=r"resume\(\) needs a folder: give Pipeline a run_dir, or call pipe.load"
    ):
        in_ranks(lambda pipe: pipe.resume(), ranks=1)
    with pytest.raises(
        VPipeError, match=r"save\(\) needs a folder: give Pipeline a run_dir, or call pipe.save"
    ):
        in_ranks(lambda pipe: pipe.save(), ranks=1)
    with pytest.raises(VPipeError, match="saved with batch_size 8, this loader has 4"):
        loader().load_state_dict({**loader().state_dict(), "batch_size": 8})
    with pytest.raises(VPipeError, match="the data set of a Loader is of type generator"):
        vpipe.Loader((n for n in range(3)), 4)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(VPipeError, match=r"run_dir is .* cannot be made"):
        in_ranks(lambda pipe: None, tmp_path / "file/run", ranks=1)
