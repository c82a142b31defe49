"""How whoever ends a transfer reaches the threads that wait for something on its behalf: credit, memory, their turn.

Closing a socket ends a wait for the network; this ends the waits that have no socket. It stays set, so that it does not
matter whether it came before the wait or during it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prfaas.errors import PrfaasError


class StoppedError(PrfaasError):
    """The wait was for a transfer that has been ended here."""


class Stop:
    """Set once, by any thread, for all that wait with it; what they hold is theirs to give back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._wakes: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """End all waits, the present and the later ones; setting it again changes nothing."""
        with self._lock:
            self._is_set = True
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called, from the thread that sets this, if it is set while the block runs."""
        with self._lock:
            self._wakes.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wakes.remove(wake)
