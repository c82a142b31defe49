"""A clock that a test moves."""


class Clock:
    """Returns the seconds that the test has set."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds
