"""A clock for tests of what is timed: it does not go by itself."""


class FakeClock:
    """It tells the same time until it is moved, or moves by a step each time that it is read."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now
