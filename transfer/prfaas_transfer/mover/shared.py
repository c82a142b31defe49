"""The memory that an engine and its mover share where the cache cannot be mapped, as the mover uses it: slots, and
copies that the engine makes.

A slot holds one frame's payload on its way between a socket and the engine's own memory. The transfers' memory budget
counts whole slots, so a frame that was admitted always finds one, but behind an engine that has stopped: a copy that
nobody waits for any more keeps its slot until the engine made it.
"""

import itertools
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from prfaas.errors import InternalError, PeerError
from prfaas.util import Deadline
from prfaas.wire.frames import FrameHeader, Kind
from prfaas.wire.receive_ledger import LayerRows, LayerState
from prfaas.wire.transfer import KEEP_ALIVE_SECONDS, LayerGroup, Manifest
from prfaas_transfer.cache import SharedPlace
from prfaas_transfer.mover.messages import AskAnnounce, CopyDone, CopyPart, CopyRequest, MoverReport

COPY_SECONDS = 10.0
"""An engine that copies nothing for this long has stopped."""
CATCH_UP_SECONDS = 2.0
"""An engine that does not answer for this long is asked no more: who comes may be a stranger."""


class Slots:
    """Equal pieces of the shared memory. Any thread may call."""

    def __init__(self, memory: mmap.mmap, slot_bytes: int, count: int):
        self._view = memoryview(memory)
        self.slot_bytes = slot_bytes
        self._free = list(range(count))
        self._late: set[int] = set()  # Offsets that the engine may still read or write.
        self._left: set[int] = set()  # Those of them that nobody else has any more.
        self._lock = threading.Lock()

    @contextmanager
    def take(self, count_bytes: int) -> Iterator[tuple[int, memoryview]]:
        """Give a slot for a block: its offset, and its first bytes."""
        if count_bytes > self.slot_bytes:
            raise InternalError(f"a part of {count_bytes} bytes in slots of {self.slot_bytes}")
        with self._lock:
            if not self._free:
                raise InternalError(f"no slot is free: the engine has yet to make {len(self._left)} late copies")
            slot = self._free.pop()
        offset = slot * self.slot_bytes
        try:
            yield offset, self._view[offset : offset + count_bytes]
        finally:
            with self._lock:
                if offset in self._late:
                    self._left.add(offset)
                else:
                    self._free.append(slot)

    def keep(self, offset: int) -> None:
        """Give this slot to nobody else before `release`."""
        with self._lock:
            self._late.add(offset)

    def release(self, offset: int) -> None:
        with self._lock:
            self._late.discard(offset)
            if offset in self._left:
                self._left.discard(offset)
                self._free.append(offset // self.slot_bytes)


class Copies:
    """Copies that the engine was asked for. The threads of connections wait for them."""

    def __init__(self, slots: Slots, send: Callable[[MoverReport], None]):
        self._slots = slots
        self._send = send
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._done: dict[int, CopyDone | None] = {}
        self._late: dict[int, int] = {}  # Offsets by number.

    def make(self, copy: CopyRequest, show_life: Callable[[], None] = lambda: None) -> None:
        """Ask for a copy, and wait for it; its own number is given here. `show_life` is called while the engine takes
        its time. What it raises is raised once the copy is made: until then nobody else can have the slot.

        Raises PeerError if the engine has not made it."""
        done = self._copy(copy, show_life)
        if done is None:
            raise PeerError(f"the engine copied nothing for {COPY_SECONDS:g} s")
        if done.reason:
            raise PeerError(f"the engine refused a copy: {done.reason}")

    @contextmanager
    def catch_up(self) -> Iterator[Callable[[], bool]]:
        """Ask the engine to say all that it has to say of transfers until now. Give a function for a block: whether
        that is handled, or did not come in time."""
        number, deadline = self._number(), Deadline(CATCH_UP_SECONDS)
        self._send(AskAnnounce(number))
        try:
            yield lambda: deadline.is_over or self._await(number, 0.0)
        finally:
            with self._changed:
                del self._done[number]

    def _number(self) -> int:
        """Give a number for a question, before it leaves: its answer may come at once, and an unknown one is
        dropped."""
        with self._changed:
            number = next(self._numbers)
            self._done[number] = None
            return number

    def _copy(self, copy: CopyRequest, show_life: Callable[[], None]) -> CopyDone | None:
        """Ask for a copy, and wait for it; None if it was not made in time. Its slot is kept until it is. Raises at the
        end what `show_life` raised first."""
        number, deadline = self._number(), Deadline(COPY_SECONDS)
        failure: PeerError | None = None
        self._send(msgspec.structs.replace(copy, number=number))
        try:
            while not self._await(number, min(KEEP_ALIVE_SECONDS, deadline.left_seconds)) and not deadline.is_over:
                if failure is None:
                    try:
                        show_life()
                    except PeerError as error:
                        failure = error
        finally:
            with self._changed:
                done = self._done.pop(number)
                if done is None:
                    self._late[number] = copy.offset
                    self._slots.keep(copy.offset)
        if failure is not None:
            raise failure
        return done

    def _await(self, number: int, seconds: float) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._done[number], seconds))

    def finish(self, copied: CopyDone) -> None:
        with self._changed:
            if copied.number in self._done:
                self._done[copied.number] = copied
                self._changed.notify_all()
            # Nobody waits for this copy any more, but until now the engine could still touch the slot.
            elif copied.number in self._late:
                self._slots.release(self._late.pop(copied.number))


class SharedMemory:
    """Slots, and copies between them and the engine's memory."""

    def __init__(self, slots: Slots, send: Callable[[MoverReport], None]):
        self.slots = slots
        self.copies = Copies(slots, send)
        self.held_bytes = slots.slot_bytes

    def cache(self, key: str, _place: SharedPlace | None) -> "SharedCache":
        """Return the cache of a fetch."""
        return SharedCache(self, key)

    @contextmanager
    def load(
        self,
        key: str,
        group: LayerGroup,
        header: FrameHeader,
        _place: SharedPlace | None = None,
        show_life: Callable[[], None] = lambda: None,
    ) -> Iterator[Sequence[memoryview]]:
        """Give a frame's payload for a block, in pieces of one tensor each."""
        part = CopyPart(header.group, header.layer, header.start_token, header.tokens)
        part = part if header.kind == Kind.BLOCK else CopyPart(header.group, header.layer)
        with self.slots.take(header.payload_bytes) as (offset, view):
            self.copies.make(CopyRequest(0, "load", key, part, offset, header.payload_bytes), show_life)
            yield _pieces(view, group)


class SharedCache:
    """The cache of one fetch at the destination, whose memory only the engine reaches."""

    def __init__(self, shared: SharedMemory, key: str):
        self._shared, self._key = shared, key
        self._offsets: dict[tuple[int, int, int], int] = {}

    def held_bytes(self, _count_bytes: int, /) -> int:
        return self._shared.slots.slot_bytes

    @contextmanager
    def room_for(self, manifest: Manifest, part: LayerRows | LayerState) -> Iterator[Sequence[memoryview]]:
        group = manifest.groups[part.group]
        count_bytes = group.rows_bytes(part.tokens) if isinstance(part, LayerRows) else group.nbytes
        with self._shared.slots.take(count_bytes) as (offset, view):
            where = _part(part)
            self._offsets[where[:3]] = offset
            try:
                yield _pieces(view, group)
            finally:
                del self._offsets[where[:3]]

    def land(self, _manifest: Manifest, part: LayerRows | LayerState, received: Sequence[memoryview], /) -> None:
        where, count_bytes = _part(part), sum(piece.nbytes for piece in received)
        self._shared.copies.make(CopyRequest(0, "land", self._key, where, self._offsets[where[:3]], count_bytes))


def _part(part: LayerRows | LayerState) -> CopyPart:
    if isinstance(part, LayerRows):
        return CopyPart(part.group, part.layer, part.start_token, part.tokens)
    return CopyPart(part.group, part.layer)


def _pieces(view: memoryview, group: LayerGroup) -> list[memoryview]:
    """Cut a part's bytes into those of its tensors."""
    items = len(view) // group.nbytes
    ends = list(itertools.accumulate(items * tensor.nbytes for tensor in group.tensors))
    return [view[start:end] for start, end in itertools.pairwise([0, *ends])]
