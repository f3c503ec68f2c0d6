"""The lines that a command says besides what it announces (`vpipe.system.console.announce`)."""


def besides_announcements(said: str) -> list[str]:
    return [line for line in said.splitlines() if line and not line.endswith(" ...")]
