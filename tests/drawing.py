"""Drawn examples: the same ones in every `make test`, and new ones, many more of them, in `make fuzz`.

A counterexample that `make fuzz` finds is pinned with `@example` where it was found: from then on every run tries it.
"""

import os

from hypothesis import HealthCheck, settings

BAD_FILES = int(os.environ.get("VPIPE_FUZZ", "0"))
"""Damaged files of each format in `make fuzz`; 0 in `make test`."""
TIMES = 20 if BAD_FILES else 1
"""How many times the examples of `make test` are drawn."""


def draws(examples: int) -> settings:
    """For a property test: how many examples it draws in `make test`."""
    return settings(max_examples=examples * TIMES)


def load_profile() -> None:
    # How long an example takes says nothing on a busy machine. Files in a test's folder may be written again.
    settings.register_profile(
        "vpipe",
        max_examples=100 * TIMES,
        derandomize=not BAD_FILES,
        database=None,
        print_blob=bool(BAD_FILES),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("vpipe")
