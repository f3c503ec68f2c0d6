"""A rank with another version or another configuration is refused at the start, with the difference."""

from typing import Any

import pytest

from vpipe.config import RunConfig
from vpipe.errors import ConfigError
from vpipe.pipeline.threads import run_ranks
from vpipe.train import same_config


def refused(configs: list[RunConfig], versions: list[str] | None = None) -> list[str]:
    """What each rank says."""
    said = []

    class Versioned:
        """A world in which each rank says another version than it has."""

        def __init__(self, world: Any) -> None:
            self.rank, self.world = world.rank, world

        def all_gather(self, name: str, mine: Any) -> list[Any]:
            reported = mine if versions is None else mine | {"version of torch": versions[self.rank]}
            return self.world.all_gather(name, reported)

    def on_rank(world: Any) -> None:
        try:
            same_config.check_same_config(Versioned(world), configs[world.rank])
        except ConfigError as error:
            said.append(str(error))

    run_ranks(len(configs), on_rank)
    return said


def test_another_key() -> None:
    said = refused([RunConfig(), RunConfig(), RunConfig(batch_size=16, optimizer="sgd")])
    assert len(said) == 3
    assert len(set(said)) == 1
    assert said[0].startswith("rank 2 differs from rank 0: batch_size 16 and 8; optimizer 'sgd' and None")


def test_another_torch() -> None:
    said = refused([RunConfig()] * 2, versions=["2.13.0", "2.12.1"])
    assert said == [said[0]] * 2
    assert "rank 1 differs from rank 0: version of torch '2.12.1' and '2.13.0'" in said[0]


@pytest.mark.parametrize("key", ["data_dir", "log_directory"])
def test_paths_may_differ_from_host_to_host(key: str) -> None:
    assert refused([RunConfig(**{key: "a"}), RunConfig(**{key: "b"})]) == []
