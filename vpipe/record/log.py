"""The log of one rank."""

from __future__ import annotations

from pathlib import Path


class RankLog:
    """`output.log.<rank>`: one line for each thing that happened. What the process prints may stand there too."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8", buffering=1)

    def line(self, text: str) -> None:
        self.file.write(text + "\n")

    def close(self) -> None:
        self.file.close()
