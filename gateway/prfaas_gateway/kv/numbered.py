"""Where a reader is in the numbered batches of another engine's cache events, and whether they are still the same.

The engine publishes batches under numbers from 0 and keeps the latest in a log, from which a reader asks for those that
it lacks. Neither says whose numbers they are: after a restart they begin anew. So a reader always asks for the last
batch that it has taken too. If the log begins with that very batch, all is well; if not, engine or log went on without
us, and what was known is void. A log that no longer reaches back to its beginning gives less than the truth: of blocks
that stood before, and of all that come behind those, nothing is known.
"""

from collections.abc import Iterator

from prfaas.errors import ProtocolError
from prfaas_gateway.kv.cache_events import ForeignEvents


class Numbered:
    """The reader of one instance. No I/O: batches go in with their numbers.

    Args:
        events: takes them in; told to forget whenever what was known is void.

    """

    def __init__(self, events: ForeignEvents):
        self.batches = self.gaps = self.lives = 0
        self._events = events
        self._next: int | None = 0  # None: whatever comes
        self._last = 0  # the hash of the last batch that was taken
        self._live = -1  # the last number that was published on this connection
        self._is_whole = True
        self._proving = self._has_any = False

    @property
    def next_number(self) -> int | None:
        """The number of the batch that is due; None: any."""
        return self._next

    @property
    def is_whole(self) -> bool:
        """Whether all that the instance has cached is known."""
        return self._is_whole and not self._events.left_out

    def connected(self) -> None:
        """Begin with a new connection."""
        self._live = -1

    def question(self) -> int:
        """Return from which number on to ask the log; its answer goes to `logged`, then to `log_ended`."""
        self._proving = self._has_any
        return max(0, (self._next or 0) - self._has_any)

    def logged(self, seq: int, payload: bytes) -> Iterator[None] | None:
        """Take in a batch of the log, a portion with each step; None where it has to be asked once more: some batches
        before this one were lost on the way, or the log is another's.

        Raises:
            ProtocolError: the log cannot be read.

        """
        if self._proving:
            self._proving = False
            if seq == (self._next or 0) - 1 and hash(payload) == self._last:
                return iter(())
            self._begin(0)
            return None
        if not self._has_any:
            self._begin(seq)
        if seq != self._next:
            return None
        return self._take(seq, payload)

    def log_ended(self) -> bool:
        """Take in that there is no more; False where it has to be asked once more, because it is another's."""
        if not self._proving:
            return True
        self._proving = False
        self._begin(0)
        return False

    def no_log(self) -> None:
        """Take in that no log can be had, after a connection was lost or a number left out: what is known is void."""
        self._proving = False
        if self._has_any:
            self._begin(None)
        elif self._next == 0:
            self._next = None

    def is_gap(self, seq: int) -> bool:
        """Tell whether batches before a published one are missing."""
        return self._next is not None and seq > self._next

    def published(self, seq: int, payload: bytes) -> Iterator[None]:
        """Take in a batch as it is published, a portion with each step.

        Raises:
            ProtocolError: numbers went back: another engine speaks at this address.

        """
        if seq <= self._live:
            raise ProtocolError(f"batch {seq} came behind batch {self._live}")
        self._live = seq
        if self._next is not None and seq < self._next:
            return iter(())  # the log had it
        if seq != self._next:
            self._begin(seq)
        return self._take(seq, payload)

    def _begin(self, seq: int | None) -> None:
        """Begin anew: what was known, if anything, is void."""
        if self._has_any:
            self.lives += 1
            self._events.forget()
        self._next, self._is_whole, self._has_any = seq, seq == 0, False

    def _take(self, seq: int, payload: bytes) -> Iterator[None]:
        yield from self._events.take(payload)
        self._next, self._last, self._has_any = seq + 1, hash(payload), True
        self.batches += 1
