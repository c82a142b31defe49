"""The bound on memory that transfers use beside the cache: staging, buffers that TLS gathers in, room for codecs.

A connection's thread asks before it loads a frame and gives back when the frame is sent or placed, so that a thousand
transfers over a slow link hold no more than the limit. Whoever holds some must not ask for more: two that did would
wait for each other. So ask once a frame, for all that it needs.
"""

import math

from prfaas.errors import CapacityError
from prfaas_worker.transfer.line import Line
from prfaas_worker.transfer.stop import Stop


class Budget:
    """At most `limit_bytes` held at a time, given in the order of asking; a larger request is served alone."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._line = Line()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes held now."""
        return self._used_bytes

    @property
    def waiting(self) -> int:
        """Threads that wait."""
        return len(self._line)

    def acquire(self, count_bytes: int, stop: Stop, timeout_seconds: float = math.inf) -> None:
        """Wait until so many bytes may be held; they are until `release`.

        Raises:
            StoppedError: `stop` was set. Nothing is held.
            CapacityError: others held on to theirs for `timeout_seconds`. Nothing is held.

        """
        if not count_bytes:
            return
        try:
            with self._line.turn(lambda: self._delay_seconds(count_bytes), stop, timeout_seconds):
                self._used_bytes += count_bytes
        except TimeoutError as error:
            raise CapacityError(
                f"no {count_bytes} of the {self.limit_bytes} bytes that transfers may use came free within "
                f"{timeout_seconds} s ({error}): raise --transfer-memory-mib, or see which peers are slow"
            ) from error

    def release(self, count_bytes: int) -> None:
        """Give bytes back that `acquire` let have."""
        with self._line.lock:
            self._used_bytes -= count_bytes
            self._line.wake()

    def _delay_seconds(self, count_bytes: int) -> float:
        fits = self._used_bytes + count_bytes <= self.limit_bytes or not self._used_bytes
        return 0.0 if fits else math.inf
