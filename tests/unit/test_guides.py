"""docs/guides.md: it has every name of the guides, and what it says exists does exist."""

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import example
from vpipe import Pipeline
from vpipe.cli import make_app
from vpipe.config.file import KEYS
from vpipe.pipeline.threads import run_ranks
from vpipe.runtime import StageRuntime

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides.md").read_text()
NAMES = set(
    """
    driver.py run_vpipe.sh main_with_runtime.py runtime.py runtime_utilities.py communication.py optimizer.py
    checkpoint.py vpipe.py vpipe.json mp_conf.json output.log.<rank> generate_layer_blocks() generate_stage()
    Stage Stage.forward Stage.cp_forward BertPretrainingDataset stage_to_dataloader() modules_with_dependencies
    module_to_stage_map stage_to_rank_map stage_to_depth_map rank local_rank stage rank_in_stage num_ranks
    num_stages num_ranks_in_stage forward_minibatch_id backward_minibatch_id num_warmup_minibatches forward_only
    send_ranks receive_ranks tensor_tags ranks_in_previous_stage ranks_in_next_stage tensors gradients
    tensor_shapes training_tensor_shapes eval_tensor_shapes training_tensor_dtypes is_criterion
    master_parameters model_parameters enable_recompute forward_stats backward_stats verbose_freq fp16
    loss_scale distributed_backend receive_tensors_forward run_forward send_tensors_forward
    receive_tensors_backward run_backward send_tensors_backward run_training_iteration world_size
    num_ranks_in_server backend ranks_in_server connection_list process_groups target_tensor_names
    forward_receive_queues backward_receive_queues forward_send_queues backward_send_queues num_forward_threads
    num_backward_threads messaging_index_receive messaging_index_send register_tensor send recv wait
    start_helper_threads base_optimizer modules num_versions latest_version current_version queue
    update_interval batch_counter load_old_params load_new_params step directory module partition config_file
    machines sync_mode model_type data_dir log_directory container batch_size learning_rate learning_rate_policy
    weight_decay epochs print_frequency verbose_frequency recompute recompute_ratio macrobatch synthetic_data
    """.split()  # noqa: SIM905 (a list of lines is longer)
)
"""Of classes, attributes, methods, files, maps and keys in the guides."""


def rows() -> Iterator[tuple[str, str]]:
    """The guides' name and what the page says it is here."""
    yield from re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", PAGE, re.M)


def here() -> list[str]:
    """The names in the second columns that are said to exist."""
    return sorted({name for _, cell in rows() for name in re.findall("`([^`]+)`", cell)})


def test_every_name_of_the_guides_is_there() -> None:
    assert {name for name, _ in rows()} >= NAMES


@cache
def pipelines() -> list[Pipeline]:
    """Of two stages, the first with two replicas."""
    model, batch, loss_fn = example("sequential", layers=4)
    made = {}

    def work(world: Any) -> None:
        pipe = Pipeline(
            model,
            batch,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            loss_fn=loss_fn,
            schedule="vpipe",
            replicas=[2, 1],
            world=world,
        )
        list(pipe.train([batch] * 4))
        made[world.rank] = pipe

    run_ranks(3, work, timeout=200.0)
    return [made[rank] for rank in range(3)]


def exists(name: str) -> bool:
    if name.startswith("key "):
        return name.removeprefix("key ") in KEYS
    if name.startswith("vpipe "):
        words = name.split()
        commands = [
            group
            for info in make_app().registered_groups
            for group in info.typer_instance.registered_commands
        ]  # type: ignore[union-attr]
        return words[1] in {c.name or c.callback.__name__ for c in commands}  # type: ignore[union-attr]
    if "/" in name or name.endswith((".py", ".sh")):
        return (ROOT / name).exists()
    first, *attributes = name.split(".")
    pipe = pipelines()[0]
    value: Any = {
        "StageRuntime": pipe.runtime,
        "CommunicationHandler": pipe.handler,
        "OptimizerWithWeightStashing": pipe.runtime.stages[0].optimizer,
        "Pipeline": pipe,
        "vpipe": import_module("vpipe"),
    }[first]
    for number, attribute in enumerate(attributes):
        if not hasattr(value, attribute) and first == "vpipe":
            import_module(".".join([first, *attributes[: number + 1]]))
        value = getattr(value, attribute)
    return True


@pytest.mark.parametrize("name", here())
def test_what_the_page_says_exists(name: str, capture_once: None) -> None:
    assert exists(name)


def test_attributes_of_the_guides(capture_once: None) -> None:
    def of(name: str) -> list[Any]:
        return [getattr(pipe.runtime, name) for pipe in pipelines()]

    assert of("rank") == [0, 1, 2]
    assert of("stage") == [0, 0, 1]
    assert of("rank_in_stage") == [0, 1, 0]
    assert of("num_ranks_in_stage") == [2, 2, 1]
    assert of("num_ranks") == [3] * 3
    assert of("num_stages") == [2] * 3
    assert of("ranks_in_previous_stage") == [[], [], [0, 1]]
    assert of("ranks_in_next_stage") == [[2], [2], []]
    assert of("is_criterion") == [False, False, True]
    assert of("loss_scale") == [1.0] * 3
    assert [list(ranks.values()) for ranks in of("send_ranks")] == [[[2]], [[2]], []]
    assert [list(ranks.values()) for ranks in of("receive_ranks")] == [[], [], [[0, 1]]]
    assert of("send_ranks")[0].keys() == of("receive_ranks")[2].keys()
    assert [len(parameters) for parameters in of("master_parameters")] == list(
        map(len, of("model_parameters"))
    )
    assert [pipe.handler.ranks_in_server for pipe in pipelines()] == [[0, 1, 2]] * 3


@pytest.mark.parametrize(("schedule", "warm_up"), [("1f1b", [3, 2, 1, 0]), ("gpipe", [7] * 4)])
def test_the_warm_up(schedule: str, warm_up: list[int]) -> None:
    from types import SimpleNamespace

    from vpipe.schedule import build

    routes = SimpleNamespace(schedule=build(schedule, 4, 8))
    found = [
        StageRuntime.num_warmup_minibatches.fget(SimpleNamespace(routes=routes, rank=rank))  # type: ignore[attr-defined]
        for rank in range(4)
    ]
    assert found == warm_up
