"""Random numbers that belong to a place, (seed, choice, position), and to no batch, instance or history.

Philox is a counter-based generator: the seed and the choice are its key, the position its counter. A counter yields
four numbers, of which a position takes the first.
"""

from typing import Final

import numpy as np

_AHEAD: Final = 64


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to a place."""
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, choice], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


class Stream:
    """The numbers of one choice at `position` and the positions after it, made in bulk."""

    def __init__(self, seed: int, choice: int, position: int):
        key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, choice], dtype=np.uint64)
        self._bits = np.random.Philox(key=key, counter=position)
        self._ahead: list[float] = []

    def next(self) -> float:
        """Return the number of the next position."""
        if not self._ahead:
            # As numpy's Generator makes a double of 64 bits.
            numbers = (self._bits.random_raw(4 * _AHEAD)[::4] >> np.uint64(11)) * 2.0**-53
            self._ahead = numbers.tolist()[::-1]
        return self._ahead.pop()
