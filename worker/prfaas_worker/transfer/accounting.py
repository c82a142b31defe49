"""How fast the link delivers while data waits: the only honest measure of its capacity that a sender has.

An idle link says nothing about its capacity, so bytes and seconds count only while at least one connection had unsent
bytes at both ends of a short interval. The ratio of the two counters' rates is then the rate that the path gave us.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from prfaas_worker.transfer.sockets import progress

SAMPLE_SECONDS = 0.02


class Sample(NamedTuple):
    """All data connections at one moment: bytes waiting to be sent, and bytes delivered so far."""

    seconds: float
    unsent_bytes: int
    delivered_bytes: int


class Backlogged(NamedTuple):
    """Bytes delivered, and time passed, while data waited."""

    delivered_bytes: int
    seconds: float


def backlogged_between(before: Sample, after: Sample) -> Backlogged:
    """Return what an interval adds to the counters: nothing unless data waited at both ends of it."""
    if not (before.unsent_bytes and after.unsent_bytes):
        return Backlogged(0, 0.0)
    return Backlogged(after.delivered_bytes - before.delivered_bytes, after.seconds - before.seconds)


class Monitor:
    """Samples the outgoing connections while there are any, in a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._connections: dict[socket.socket, Callable[[], int]] = {}
        self._closed_bytes = 0
        self._last = Sample(time.monotonic(), 0, 0)
        self._total = Backlogged(0, 0.0)
        threading.Thread(target=self._run, name="link-monitor", daemon=True).start()

    @contextmanager
    def watch(self, sock: socket.socket, queued_bytes: Callable[[], int]) -> Iterator[None]:
        """Count a connection while the block runs; `queued_bytes` tells what still waits outside of the kernel."""
        with self._changed:
            self._sample()
            self._connections[sock] = queued_bytes
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._sample()
                del self._connections[sock]
                self._closed_bytes += progress(sock).delivered_bytes
                if not self._connections:
                    self._last = self._last._replace(unsent_bytes=0)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that waited at the last sample."""
        return self._last.unsent_bytes

    @property
    def backlogged(self) -> Backlogged:
        """Totals since the start."""
        return self._total

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._connections)
                self._sample()
            time.sleep(SAMPLE_SECONDS)

    def _sample(self) -> None:
        unsent, delivered = 0, self._closed_bytes
        for sock, queued_bytes in self._connections.items():
            kernel = progress(sock)
            unsent += kernel.unsent_bytes + queued_bytes()
            delivered += kernel.delivered_bytes
        now = Sample(time.monotonic(), unsent, delivered)
        added = backlogged_between(self._last, now)
        self._total = Backlogged(
            self._total.delivered_bytes + added.delivered_bytes, self._total.seconds + added.seconds
        )
        self._last = now
