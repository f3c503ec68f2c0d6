"""What tests of the command line share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.ssh_hosts import Bench, ssh_hosts


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Two hosts that ssh reaches."""
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(tmp_path / "ssh") as hosts:
        yield Bench(hosts, tmp_path / "work")
