"""The source's half of a transfer as a state machine without sockets: the next frame to send, and frames to repeat.

The engine adds items in order. Any connection takes the next, so that a slow one delays only its own items. An item
stays on its connection's list until the transfer ends, because no message confirms its arrival. When a connection
breaks, its items are uncertain until the destination's next HELLO lists the arrived ones (`connect`). The rest is sent
again under its old sequence numbers. DONE is sent when everything else was. With a guard, a lock, any thread may call.
"""

from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from prfaas.errors import InternalError, ProtocolError, UnreachableError
from prfaas.wire.frames import whole_digest
from prfaas.wire.receive_ledger import NO_GUARD
from prfaas.wire.transfer import Done, Ranges, in_ranges

Item = TypeVar("Item")

MAX_CONNECTIONS = 64
"""Most connections that one transfer may use in its life, replacements included."""


class NextStep(Enum):
    """The next step of a connection without an item."""

    WAIT = "wait"
    DONE = "done"


class NumberedItem(NamedTuple, Generic[Item]):
    """An item with its sequence number."""

    sequence: int
    item: Item


class SendQueue(Generic[Item]):
    """The frames of one transfer; `guard` is a lock, if several threads call."""

    def __init__(self, guard: AbstractContextManager[object] = NO_GUARD):
        self._lock = guard
        self._items: list[tuple[Item, int]] = []
        self._pending: deque[int] = deque()
        self.queued_bytes = 0
        """Bytes of the items that no connection has taken yet."""
        self._carried: dict[int, list[int]] = {}
        self._lost: set[int] = set()
        self._sealed: dict[int, tuple[int, int]] = {}
        self._finished = False
        self._done_by: int | None = None

    def add(self, item: Item, nbytes: int) -> None:
        """Append an item of `nbytes` bytes; never blocks."""
        with self._lock:
            if self._finished:
                raise InternalError("an item was added to a queue that is finished")
            self._pending.append(len(self._items))
            self.queued_bytes += nbytes
            self._items.append((item, nbytes))

    def finish(self) -> None:
        """Mark the end: no more items will be added."""
        with self._lock:
            self._finished = True

    def connect(self, connection: int, broken: Collection[int], received: Ranges) -> None:
        """Note a new connection, and the frames that arrived over those that the destination counts as broken.

        Only the destination knows these: sent frames may still be in its buffers when the connection breaks here.
        Raises ProtocolError for a number that was used or is too large, or arrived frames that were never sent.
        """
        with self._lock:
            if connection in self._carried or not 0 <= connection < MAX_CONNECTIONS:
                raise ProtocolError(f"connection {connection} was used before, or is beyond {MAX_CONNECTIONS}")
            if any(end - 1 not in self._sealed for _, end in received):
                raise ProtocolError(f"frames {received} were acknowledged, but never sent")
            again: list[int] = []
            for other in broken:
                self._lose(other)
                again += [number for number in self._carried.get(other, ()) if not in_ranges(number, received)]
                self._carried[other] = []
            self._carried[connection] = []
            # In front, the oldest first: `extendleft` turns the order round.
            self._pending.extendleft(sorted(again, reverse=True))
            self.queued_bytes += sum(self._items[number][1] for number in again)

    def lost(self, connection: int) -> None:
        """Note a broken connection: it takes no more items."""
        with self._lock:
            self._lose(connection)

    def take(self, connection: int) -> NumberedItem[Item] | NextStep:
        """Return this connection's next step; raises UnreachableError where the destination counts it as broken."""
        with self._lock:
            if connection in self._lost:
                raise UnreachableError("the destination does not read from this connection any more")
            if self._pending:
                number = self._pending.popleft()
                item, nbytes = self._items[number]
                self.queued_bytes -= nbytes
                self._carried[connection].append(number)
                return NumberedItem(number, item)
            uncertain = any(self._carried.get(other) for other in self._lost)
            if self._finished and len(self._sealed) == len(self._items) and not uncertain and self._done_by is None:
                self._done_by = connection
                return NextStep.DONE
            return NextStep.WAIT

    def sealed(self, sequence: int, digest: int, payload_bytes: int) -> None:
        """Note a frame's digest and size, before it is sent.

        Raises InternalError where they differ from an earlier sending: the memory that the frame views has changed.
        """
        with self._lock:
            if self._sealed.setdefault(sequence, (digest, payload_bytes)) != (digest, payload_bytes):
                raise InternalError(f"frame {sequence} changed between two sendings")

    def done(self, prefill_seconds: float, first_byte_seconds: float) -> Done:
        with self._lock:
            frames = [self._sealed[number] for number in range(len(self._items))]
        return Done(
            frames=len(frames),
            payload_bytes=sum(size for _, size in frames),
            digest=whole_digest(digest for digest, _ in frames),
            prefill_seconds=prefill_seconds,
            first_byte_seconds=first_byte_seconds,
        )

    @property
    def all_left(self) -> bool:
        """True once everything was added, and sent at least once."""
        with self._lock:
            return self._finished and len(self._sealed) == len(self._items)

    @property
    def left_bytes(self) -> int:
        """Payload bytes of the items that were sent at least once, as they travelled."""
        with self._lock:
            return sum(size for _, size in self._sealed.values())

    def _lose(self, connection: int) -> None:
        self._lost.add(connection)
        if self._done_by == connection:
            self._done_by = None
