"""Plans with a requested number of stages: it is kept, or a line says what another layout gains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.schedules import NAMES
from vpipe.config.file import read_config
from vpipe.cost import BlockCost, DeviceCost, LinkCost, Profile
from vpipe.errors import VPipeError
from vpipe.plan import plan
from vpipe.schedule import kind_of
from vpipe.train.planning import plan_run

GIB = 1024**3
BLOCK = BlockCost("block", 0.01, 0.01, 0.01, 0.0, 100_000, 1_000_000, 10_000)
EVEN = Profile((BLOCK,) * 8, DeviceCost(GIB, 1e8, 1e8), LinkCost(1e10, 1e-5), 8)
# One block takes as long as all others: whoever has it alone keeps three ranks waiting.
HEAVY = replace(EVEN, blocks=(*EVEN.blocks, BlockCost("head", 0.1, 0.1, 0.1, 0.0, 100_000, 0, 10_000)))


@pytest.mark.parametrize("name", NAMES)
def test_the_best_plan_is_the_best_of_all_numbers_of_stages(name: str) -> None:
    kind, found = kind_of(name), {}
    for stages in range(1, 5):
        if stages == 4 or kind.replicas == "any" or (kind.replicas == "equal" and 4 % stages == 0):
            found[stages] = plan(HEAVY, 4, GIB, name, 8, stages=stages)
        else:
            with pytest.raises(VPipeError, match=f"stages is {stages}, which schedule '{name}' cannot have"):
                plan(HEAVY, 4, GIB, name, 8, stages=stages)
    assert all(len(result.replicas) == stages for stages, result in found.items())
    best = min(result.seconds for result in found.values())
    assert plan(HEAVY, 4, GIB, name, 8).seconds == pytest.approx(best)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (5, "stages is 5, but there are 4 ranks and the model has 8 blocks: give at most 4, or more ranks"),
        (0, "stages is 0"),
        (3, "stages is 3, which schedule 'zb-v' cannot have on 4 ranks"),
    ],
)
def test_stages_that_cannot_be(stages: int, words: str) -> None:
    with pytest.raises(VPipeError, match=words):
        plan(EVEN, 4, GIB, "zb-v", stages=stages)


def test_with_auto_only_schedules_that_can_have_so_many_stages_are_tried() -> None:
    assert len(plan(EVEN, 4, GIB, "auto", 8, stages=2).replicas) == 2


def test_a_run_says_what_another_layout_gains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yml"
    path.write_text("stages: 4\nschedule: 1f1b\nminibatches: 8\npartition: auto\n")
    config = read_config(path)
    own, best = plan(HEAVY, 4, None, "1f1b", 8, stages=4), plan(HEAVY, 4, None, "1f1b", 8)
    assert plan_run(config, HEAVY) == best
    gain = best.samples_per_second / own.samples_per_second
    assert gain > 1.3
    said = capsys.readouterr().err
    assert f"{path}: stages is 4, but the plan has {len(best.replicas)} x " in said
    assert f"`vpipe plan {path} --ranks 4 --stages 4` writes" in said  # also if `--set stages=4` said so
    assert f"{gain:.2f} times as fast" in said
    assert plan_run(config, HEAVY, stages=4) == own
    assert "stages is" not in capsys.readouterr().err


def test_a_run_keeps_its_stages_where_another_layout_gains_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yml"
    path.write_text("stages: 2\nschedule: gpipe\nminibatches: 1000\npartition: auto\n")
    # Two stages have a bubble of a thousandth, two replicas of everything none.
    assert len(plan(EVEN, 2, None, "gpipe", 1000).replicas) == 1
    assert len(plan_run(read_config(path), EVEN).replicas) == 2
    assert "stages is" not in capsys.readouterr().err
