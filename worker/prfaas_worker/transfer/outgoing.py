"""What leaves in one direction of a transfer: the shipment, how it ends, and what wakes the connections that wait.

The engine's thread puts frames in while it computes; the threads of the connections take them out. A connection that
waits polls its socket and its bell together, so that it hears its peer as soon as it hears the engine.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from prfaas.wire.codecs import Codec
from prfaas.wire.frames import Address, FrameHeader
from prfaas.wire.shipment import Shipment
from prfaas.wire.transfer import Done, TensorLayout
from prfaas_worker.transfer.stop import Stop
from prfaas_worker.transfer.story import Carried


class Frame(NamedTuple):
    """A frame to send. `load` gives its payload, in the thread that sends it.

    The payload is the cache's own memory, which its lease keeps until the transfer ends, or a copy of `copied_bytes`:
    `items` rows or states of each of these tensors, or what no codec knows.
    """

    header: FrameHeader
    load: Callable[[], tuple[memoryview, ...]]
    copied_bytes: int = 0
    tensors: tuple[TensorLayout, ...] = ()
    items: int = 1


class Bell:
    """Wakes one thread that polls; ringing never blocks and is harmless after `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return -1 if self._descriptor is None else self._descriptor

    def ring(self) -> None:
        """Wake the thread, now or when it polls next."""
        with self._lock:
            if self._descriptor is not None:
                os.eventfd_write(self._descriptor, 1)

    def hush(self) -> None:
        """Forget what rang so far; the caller looks for work afterwards."""
        with self._lock:
            if self._descriptor is not None:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class Outgoing:
    """Frames of one direction. `put`, `finish` and `fail` come from the engine's thread, the rest from connections.

    Args:
        address: transfer and epoch of every frame.
        heard: called whenever the peer shows that it lives.

    """

    def __init__(self, address: Address, heard: Callable[[], None]):
        self.address = address
        self.heard = heard
        self.shipment: Shipment[Frame] = Shipment(threading.Lock())
        self.failure: str | None = None
        self.acknowledged = False
        self.codecs: dict[int, Codec] = {}
        """By sequence number: a frame that leaves again is the same."""
        self.stop = Stop()
        """Set with the failure: ends what a connection waits for on this side."""
        self.compute_started = time.monotonic()
        self._prefill_seconds = 0.0
        self._is_exact = True
        self._paced_bytes = 0
        self._first_sent: float | None = None
        self._lock = threading.Lock()
        self._bells: set[Bell] = set()

    def put(self, frame: Frame) -> None:
        """Append a frame; never blocks. After a failure it is dropped."""
        if self.failure is None:
            self.shipment.add(frame, frame.header.payload_bytes)
            self._ring()

    def finish(self, prefill_seconds: float, *, is_exact: bool = True) -> None:
        """Everything was put in; `prefill_seconds` is the compute time behind it, on a cache that `is_exact`."""
        self._prefill_seconds, self._is_exact = prefill_seconds, is_exact
        self.shipment.finish()
        self._ring()

    def fail(self, message: str) -> None:
        """End it, unless everything arrived already: connections send ABORT with this reason."""
        if not self.acknowledged:
            self.failure = self.failure or message
            self.stop.set()
        self._ring()

    def acknowledge(self) -> None:
        """Everything arrived: connections send FREED."""
        self.acknowledged = True
        self._ring()

    def enter(self) -> Bell:
        """Return the bell of a connection that serves this from now on."""
        bell = Bell()
        with self._lock:
            self._bells.add(bell)
        return bell

    def leave(self, bell: Bell) -> None:
        """Take a connection's bell back."""
        with self._lock:
            self._bells.discard(bell)
        bell.close()

    def queued_bytes(self) -> int:
        """Bytes that no connection has taken yet, or that wait for the egress cap."""
        return self.shipment.queued_bytes + self._paced_bytes

    def paced(self, count_bytes: int) -> None:
        """Note bytes that a connection has in hand, or as a negative count, that it gave to the kernel."""
        with self._lock:
            self._paced_bytes += count_bytes

    def begins(self) -> None:
        """Note that a data frame begins to leave: the kernel takes its first bytes at once."""
        if self._first_sent is None:
            self._first_sent = time.monotonic()

    @property
    def carried(self) -> Carried:
        """What left so far."""
        flow_seconds = time.monotonic() - self._first_sent if self._first_sent is not None else 0.0
        return Carried(self.shipment.left_bytes, flow_seconds, set(self.codecs.values()))

    @property
    def account(self) -> Done:
        """Everything that left, and when the first of it did."""
        first = self._first_sent if self._first_sent is not None else time.monotonic()
        done = self.shipment.done(self._prefill_seconds, first - self.compute_started)
        return msgspec.structs.replace(done, is_exact=self._is_exact)

    def _ring(self) -> None:
        with self._lock:
            for bell in self._bells:
                bell.ring()
