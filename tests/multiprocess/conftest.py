"""The pool that all multi-process tests share."""

from collections.abc import Iterator

import pytest

from tests.multiprocess.against_threads import AgainstThreads
from tests.multiprocess.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """For a test that kills workers, or needs some that have never trained."""
    made = Pool()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def shared_comparison(pool: Pool) -> AgainstThreads:
    return AgainstThreads(pool)


@pytest.fixture
def against_threads(shared_comparison: AgainstThreads, capture_once: None) -> AgainstThreads:
    return shared_comparison
