"""The names of what `vpipe train --debug` can tell of (`vpipe.observe.debug` tells it)."""

from __future__ import annotations

from collections.abc import Iterable

from vpipe.errors import ConfigError

TENSORS, VERSIONS, SCHEDULE = SCENES = ("tensors", "versions", "schedule")


def read_scenes(written: Iterable[str]) -> list[str]:
    """What `--debug` names: one scene, or several with commas between them."""
    scenes = [scene for text in written for scene in text.split(",")]
    for scene in scenes:
        if scene not in SCENES:
            raise ConfigError(
                f"--debug {scene!r} is not known: give {', '.join(SCENES[:-1])} or {SCENES[-1]}"
            )
    return list(dict.fromkeys(scenes))
