"""Runs that are wrong on purpose, as real processes: a slowed stage, an unbalanced partition, a dead peer."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.examples import varied
from tests.faults.virtual import VirtualClock, measure_virtually
from tests.multiprocess.pool import Pool
from tests.waiting import wait_until
from vpipe import Pipeline
from vpipe.cost import Plan, write_plan
from vpipe.observe import hang
from vpipe.observe.diagnosis import Finding, diagnose
from vpipe.observe.recorder import Recorder
from vpipe.record.status import read_statuses
from vpipe.runtime.prefetch import Work
from vpipe.train.description import write_stages
from vpipe.weights import optimizer_factory

LAYERS = 8
WIDTH = 32
BLOCK = 0.006
"""Seconds that a block takes by the clock that measures it: computing would take as long as others let it."""


def train(
    folder: Path, partition: list[int], *, slow: int | None = None, dies: int | None = None, updates: int = 10
) -> None:
    """Equal layers on two ranks; `slow` takes four times as long for everything, `dies` is killed in its F17."""
    with pytest.MonkeyPatch.context() as patch:
        _train(folder, partition, measure_virtually(patch), slow, dies, updates)


def _train(
    folder: Path, partition: list[int], clock: VirtualClock, slow: int | None, dies: int | None, updates: int
) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    batch = (torch.randn(96, WIDTH), torch.randn(96, WIDTH))
    optimizer = optimizer_factory("sgd", 0.01, weight_decay=0.0)
    with Pipeline(
        nn.Sequential(*layers[:-1]), batch, optimizer=optimizer, loss_fn=functional.mse_loss, schedule="1f1b",
        minibatches=4, partition=partition,
    ) as pipe:  # fmt: skip
        pipe.runtime.whereabouts.say("its beginning")
        recorder = Recorder(
            pipe, folder, total=updates, samples=384, tokens=1, print_frequency=1, verbose_frequency=0,
            hang_limit=600.0, prometheus_port=0,
        )  # fmt: skip
        wait_until(
            lambda: any(each.place == "its beginning" for each in read_statuses(folder)),
            "a status before the first action",
        )
        seconds = BLOCK * partition[pipe.rank] * (4 if pipe.rank == slow else 1)
        pipe.on_action(lambda work: clock.sleep(seconds), ("F", "B"))
        if pipe.rank == dies:
            pipe.on_action(lambda work: die_in_17(work, folder), ("F",))
        if pipe.rank == 0:
            write_stages(pipe.layout, folder, None)
            policies = ("keep",) * len(pipe.layout.policies)
            write_plan(
                Plan(tuple(partition), policies, "1f1b", minibatches=4, batch_size=96), folder / "plan.json"
            )
        try:
            for update, loss in pipe.train(varied(batch, 4 * updates)):
                recorder.update(update, loss, 0)
        except BaseException as error:
            recorder.error = error
            raise
        finally:
            recorder.write_events()
            recorder.close()


def die_in_17(work: Work, folder: Path) -> None:
    if work.minibatch.number == 17:
        wait_until(
            lambda: any(each.place == "1F17" for each in read_statuses(folder)), "a status of this action"
        )
        os.kill(os.getpid(), signal.SIGKILL)


def by_topic(folder: Path) -> dict[str, Finding]:
    return {finding.topic: finding for finding in diagnose(folder)}


def test_a_slowed_stage_is_not_taken_for_an_unbalanced_partition(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, train, tmp_path, [4, 4], slow=1)
    found = by_topic(tmp_path)["throughput"]
    assert found.grade == "fault"
    assert found.figures["slow_ranks"] == [1]
    assert found.figures["pace"][1] > 2.5
    assert "rank 1 is slow" in found.text


def test_an_unbalanced_partition_gets_a_better_one_by_simulation(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, train, tmp_path, [7, 1])
    findings = by_topic(tmp_path)
    found = findings["throughput"]
    assert found.grade == "fault"
    assert "slow_ranks" not in found.figures
    assert found.figures["slowest"] == 0
    assert 3 <= found.figures["better_partition"][0] <= 5
    assert found.figures["gain"] > 1.2
    assert f"the partition {found.figures['better_partition']} makes" in found.text
    for topic in ("versions", "standstill", "memory"):
        assert findings[topic].grade == "fine"


def test_a_dead_peer_is_named_and_not_the_one_who_waited_for_it(
    own_pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = own_pool.outcomes(2, train, tmp_path, [4, 4], dies=1)
    assert [outcome.error for outcome in outcomes] == ["PeerError", "Killed"]
    monkeypatch.setattr(hang, "SILENT", 0.0)  # now its own word is too old
    found = by_topic(tmp_path)["standstill"]
    assert found.grade == "fault"
    assert found.figures["culprit"] == 1
    assert found.figures["place"] == "1F17"
    assert "rank 1 (stage 1) died without a message, in 1F17, after 4 updates" in found.text
    assert "rank 0 waited for" in found.text
