"""Counters that several threads of the engine process add to."""

import threading
from collections import Counter
from collections.abc import Callable

from prfaas.wire.engine import Direction, Outcome, TransferEnded


class TransferCounters:
    """Transfers by direction and outcome, and cache bytes that went over data connections, since the start.

    `on_end` hears of every transfer that ended, from its thread.
    """

    def __init__(self) -> None:
        self.on_end: Callable[[TransferEnded], None] = lambda _transfer: None
        self._lock = threading.Lock()
        self._ended: Counter[tuple[Direction, Outcome]] = Counter()
        self._sent_bytes = 0
        self._received_bytes = 0

    def ended(self, transfer: TransferEnded) -> None:
        """Count a transfer that ended."""
        with self._lock:
            self._ended[transfer.direction, transfer.outcome] += 1
        self.on_end(transfer)

    def sent(self, count_bytes: int) -> None:
        """Count bytes given to the kernel."""
        with self._lock:
            self._sent_bytes += count_bytes

    def received(self, count_bytes: int) -> None:
        """Count bytes taken from the kernel."""
        with self._lock:
            self._received_bytes += count_bytes

    def snapshot(self) -> tuple[list[tuple[str, str, int]], int, int]:
        """Return (direction, outcome, count) rows, bytes sent and bytes received."""
        with self._lock:
            rows = [(direction, outcome, count) for (direction, outcome), count in sorted(self._ended.items())]
            return rows, self._sent_bytes, self._received_bytes
