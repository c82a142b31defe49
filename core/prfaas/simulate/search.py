"""The highest rate of arrivals that still keeps a promise, found by trying: Lambda at an SLO."""

from collections.abc import Callable
from typing import Final

DOUBLINGS: Final = 8
HALVINGS: Final = 6


def highest_rate(keeps: Callable[[float], bool], start_per_second: float) -> float:
    """Return the highest rate found to keep the promise, within about 1 %; 0 if none down to a 256th of `start`.

    Args:
        keeps: tries a rate. Taken to be true up to some rate and false above.
        start_per_second: where the search starts.

    """
    low, high = start_per_second, start_per_second
    if keeps(start_per_second):
        for _ in range(DOUBLINGS):
            high = 2 * low
            if not keeps(high):
                break
            low = high
    else:
        for _ in range(DOUBLINGS):
            low = high / 2
            if keeps(low):
                break
            high = low
        else:
            return 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
