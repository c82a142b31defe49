"""The receiving end of a transfer: any number of connections read frames straight into the cache.

The ledger knows the place of each frame and when everything is there. The memory is a sequence's that does not use it
before. It must stay that sequence's until no connection reads into it any more.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from prfaas.errors import CapacityError, DamagedError, PeerError, ProtocolError, UnreachableError
from prfaas.util import Deadline
from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, MAX_HELLO_BYTES, Address, Codec, FrameHeader, Kind, verify
from prfaas.wire.receive_ledger import CachePart, ReceiveLedger
from prfaas.wire.transfer import HEARTBEAT_SECONDS, NO_PROGRESS_SECONDS, Abort, LayerGroup, message_frame
from prfaas_transfer.cache import DestinationCache
from prfaas_transfer.compression import decode_into
from prfaas_transfer.limits import MemoryBudget, Stop, StoppedError
from prfaas_transfer.net import DataStream
from prfaas_transfer.send import receive_header

STARVED_SECONDS = 5.0
"""A connection without a byte for this long is given up even while others of the same source carry some."""


class ReceiveState:
    """The received part of a transfer, shared by its connections: `ledger` lists what must arrive, `place` where.
    `received` gets each frame's bytes; `source_silent_seconds` is the shortest silence; frames hold `memory`."""

    def __init__(
        self,
        ledger: ReceiveLedger,
        place: DestinationCache,
        received: Callable[[int], None],
        source_silent_seconds: Callable[[], float],
        memory: MemoryBudget,
    ):
        self.ledger = ledger
        self.place = place
        self.received = received
        self.source_silent_seconds = source_silent_seconds
        self.memory = memory
        self.stop = Stop()
        self.gave_up: PeerError | None = None
        """The reason why a connection ended the transfer, set before the source learns of it."""
        self.codecs: set[int] = set()  # Codecs of the received frames.
        self._broken: list[int] = []
        self._first: float | None = None

    def start(self) -> None:
        if self._first is None:
            self._first = time.monotonic()

    def leave(self, connection: int) -> None:
        self.ledger.lost(connection)
        self._broken.append(connection)

    @property
    def broken(self) -> tuple[int, ...]:
        """Connections that are no longer read."""
        return tuple(self._broken)

    @property
    def seconds(self) -> float:
        """Time since the first data frame began to arrive, 0 before it."""
        return time.monotonic() - self._first if self._first is not None else 0.0


class ReceiveLoop:
    """Reads one connection of a transfer. Several may call `on_whole`, from their threads, when all is there."""

    def __init__(self, stream: DataStream, connection: int, state: ReceiveState, on_whole: Callable[[], None]):
        self._stream = stream
        self._connection = connection
        self._state = state
        self._on_whole = on_whole
        self._heartbeat = Deadline(HEARTBEAT_SECONDS)
        self._acknowledged = False

    def run(self) -> None:
        """Receive until the source freed its copy; `leave` follows in every case. Raises UnreachableError or
        DamagedError if another connection may succeed, PeerError if the source gave up or broke the protocol."""
        ledger = self._state.ledger
        try:
            while not self._receive():
                if not self._acknowledged and ledger.whole:
                    ledger.require_whole()
                    self._on_whole()
                    self._say(Kind.ACK)
                    self._acknowledged = True
                self._show_life()
        except (UnreachableError, DamagedError):
            raise
        except PeerError as error:
            self._state.gave_up = self._state.gave_up or error
            with suppress(PeerError):
                self._say(Kind.ABORT, Abort(str(error)[:4096]))
            raise

    def _receive(self) -> bool:
        """Read one frame; True when it ends this connection's part."""
        header = receive_header(self._stream, self._wait)
        if header.kind in DATA_KINDS:
            self._take(header)
            return False
        if header.payload_bytes > MAX_HELLO_BYTES:
            raise ProtocolError(f"{header.describe()} of {header.payload_bytes} bytes where a message was due")
        payload = bytearray(header.payload_bytes)
        self._stream.receive_into(payload, on_wait=self._wait)
        # On a kept connection the FREED of the transfer before may still come.
        if header.kind == Kind.FREED and self._state.ledger.whole and header.address == self._address:
            verify(header, [payload])
            return True
        self._state.ledger.note(header, payload)
        return False

    def _take(self, header: FrameHeader) -> None:
        state = self._state
        state.start()
        part = state.ledger.claim(self._connection, header)
        expected, place = state.ledger.expected, state.place
        with self._memory(self._copied_bytes(header, part)), place.room_for(expected, part) as room:
            payload = [memoryview(bytearray(header.payload_bytes))] if header.codec else list(room)
            self._stream.receive_into(*payload, on_wait=self._wait)
            state.ledger.accept(header, payload, lambda: self._land(header, part, payload, room))
        state.codecs.add(header.codec)
        state.received(HEADER_BYTES + header.payload_bytes)

    def _copied_bytes(self, header: FrameHeader, part: CachePart) -> int:
        """Memory that a frame takes outside the cache: a codec's payload, its planes, and the tensors made of them."""
        tensors_bytes = header.payload_bytes
        if header.codec:
            tensors_bytes = items_of(header, group := self._state.ledger.expected.groups[part.group]) * group.nbytes
        return self._state.place.held_bytes(tensors_bytes) + (
            header.payload_bytes + 2 * tensors_bytes if header.codec else 0
        )

    def _land(
        self, header: FrameHeader, part: CachePart, payload: Sequence[memoryview], room: Sequence[memoryview]
    ) -> None:
        expected = self._state.ledger.expected
        if header.codec:
            group = expected.groups[part.group]
            decode_into(Codec(header.codec), group.tensors, items_of(header, group), payload[0], room)
        self._state.place.land(expected, part, room)

    @contextmanager
    def _memory(self, count_bytes: int) -> Iterator[None]:
        """Hold memory for a frame while the block runs; the source waits meanwhile."""
        while True:
            try:
                self._state.memory.acquire(count_bytes, self._state.stop, HEARTBEAT_SECONDS)
                break
            except CapacityError:
                self._show_life()
            except StoppedError as error:
                raise UnreachableError("cancelled") from error
        try:
            yield
        finally:
            self._state.memory.release(count_bytes)

    def _wait(self, silent_seconds: float) -> None:
        """Send a heartbeat; raise if the source shows no life."""
        if self._state.stop.is_set:
            raise UnreachableError("cancelled")
        # A source that is busy on another connection lives, so only a long silence of this one counts.
        source_silent_seconds = min(silent_seconds, self._state.source_silent_seconds())
        if source_silent_seconds > NO_PROGRESS_SECONDS or silent_seconds > STARVED_SECONDS:
            raise UnreachableError(f"the peer sent no byte for {silent_seconds:.1f} s: given up")
        self._show_life()

    def _show_life(self) -> None:
        if self._heartbeat.is_over:
            self._say(Kind.KEEP_ALIVE)

    def _say(self, kind: Kind, message: Abort | None = None) -> None:
        self._stream.send([message_frame(kind, self._address, message)])
        self._heartbeat.renew(HEARTBEAT_SECONDS)

    @property
    def _address(self) -> Address:
        return self._state.ledger.expected.address


def items_of(header: FrameHeader, group: LayerGroup) -> int:
    """Return the rows or states of a frame."""
    return header.tokens // group.row_tokens or 1
