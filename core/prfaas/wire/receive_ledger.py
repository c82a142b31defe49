"""The destination's half of a transfer as a state machine without sockets: permitted frames, positions, completion.

The destination computes from its own model what has to arrive. So it builds the expected manifest before the first
byte. For each data frame the caller asks `claim(connection, header)` for the payload's position and reads exactly that
many bytes into it. The caller then passes header and payload to `accept`, which checks the digest. A position can be
claimed once: two connections never write to one position. `lost` frees the positions that a broken connection had
claimed but not filled. Damage costs its connection only. Any other error raises ProtocolError and breaks the ledger for
good: nothing of it may be used. Completion is final too: later frames from the source cost their connection, not the
arrived data. With a guard any thread may call; digests are computed outside of the guard.

Invariant: `whole` is true only if every attention row, every linear state and DONE arrived once each, undamaged. All
must be for this transfer, epoch and manifest. The source's digest over all frames must be ours too.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, NamedTuple, TypeGuard

import msgspec

from prfaas.errors import MismatchError, PeerError, ProtocolError
from prfaas.wire.frames import MAX_DATA_BYTES, Buffer, Codec, FrameHeader, Kind, verify, whole_digest
from prfaas.wire.transfer import Abort, Done, Manifest, Ranges, as_ranges, decode_message

NO_GUARD = nullcontext()
"""For one thread only."""
_OF_THE_SOURCE: Final = frozenset({"format", "fingerprint", "groups", "rank", "ranks"})
"""Fields of a manifest that are the same in all transfers of a source."""
_MAX_VALUE: Final = 200
"""Characters of a value in an error: a peer may have chosen them."""


class LayerRows(NamedTuple):
    """Attention rows of one layer, tokens `start_token` up to `start_token + tokens`."""

    group: int
    layer: int
    start_token: int
    tokens: int


class LayerState(NamedTuple):
    """All tensors of one linear layer."""

    group: int
    layer: int


CachePart = LayerRows | LayerState
GroupLayer = tuple[int, int]  # group, layer


class _Claim(NamedTuple):
    connection: int
    position: CachePart


class ReceiveLedger:
    """Keeps account of one transfer, as the module's docstring explains. `codecs` are the permitted ones; 0 is none."""

    def __init__(
        self, expected: Manifest, codecs: Collection[int] = (0,), guard: AbstractContextManager[object] = NO_GUARD
    ):
        self.expected = expected
        self.done: Done | None = None
        self.received_bytes = 0
        self.is_exact = True
        """True while no frame came through a lossy codec."""
        self._codecs = frozenset(codecs)
        self._lock = guard
        self._broken = ""  # why
        self._whole = False
        self._claims: dict[int, _Claim] = {}
        self._digests: dict[int, int] = {}
        # Claimed token ranges of each attention layer, as sorted starts with their ends.
        self._starts: dict[GroupLayer, list[int]] = {}
        self._ends: dict[GroupLayer, list[int]] = {}
        self._rows_left: dict[GroupLayer, int] = {}
        self._states_left: set[LayerState] = set()
        self._states_claimed: set[LayerState] = set()
        for index, group in enumerate(expected.groups):
            for layer in group.layers:
                if group.kind == "linear":
                    self._states_left.add(LayerState(index, layer))
                elif expected.tokens:
                    start, end = group.rows_span(expected.start_token, expected.end_token)
                    self._rows_left[index, layer] = end - start

    def claim(self, connection: int, header: FrameHeader) -> CachePart:
        """Reserve the position of a data frame's payload and return it.

        Raises ProtocolError for a frame of another transfer, epoch or manifest, of a wrong size, or claimed before.
        """
        with self._breaking_on_error():
            self._require_ours(header)
            if header.sequence in self._claims or header.sequence in self._digests:
                raise ProtocolError(f"{header.describe()} repeats sequence number {header.sequence}")
            position = self._claim(header)
            self._claims[header.sequence] = _Claim(connection, position)
            return position

    def accept(self, header: FrameHeader, payload: Sequence[Buffer], land: Callable[[], None] = lambda: None) -> None:
        """Note that a claimed data frame arrived: `payload` holds its bytes, as they travelled, in order.

        After the digest check, `land` moves them to their position if they are not there already. Raises DamagedError
        for a wrong digest, where the claim stays until `lost` frees it; ProtocolError for a last one that contradicts
        the source's account.
        """
        # Both without the lock: they take long, and the claim keeps other connections away.
        verify(header, payload)
        land()
        with self._breaking_on_error():
            position = self._claims.pop(header.sequence).position
            match position:
                case LayerRows(group, layer, _, tokens):
                    self._rows_left[group, layer] -= tokens
                    if self._rows_left[group, layer] == 0:
                        del self._rows_left[group, layer]
                case LayerState():
                    self._states_left.remove(position)
            self._digests[header.sequence] = header.digest
            self.is_exact &= Codec(header.codec).is_exact
            self.received_bytes += header.payload_bytes
            self._compare()

    def note(self, header: FrameHeader, payload: Buffer) -> None:
        """Process a frame that carries no cache: DONE, KEEP_ALIVE or ABORT.

        Raises DamagedError for a wrong digest; ProtocolError for a frame that is not allowed here, cannot be read, or
        has another account than ours; PeerError with the reason where the source gave up.
        """
        verify(header, [payload])
        with self._breaking_on_error():
            self._require_ours(header)
            self._note(header, payload)
            self._compare()

    @contextmanager
    def _breaking_on_error(self) -> Generator[None]:
        """Hold the lock; an error meanwhile breaks the ledger for good."""
        with self._lock:
            try:
                yield
            except PeerError as error:
                if not self._whole:
                    self._broken = self._broken or str(error)
                raise

    def lost(self, connection: int) -> None:
        """Free the unfilled claims of a broken connection, whose thread must have ended with it."""
        with self._lock:
            for sequence, claim in list(self._claims.items()):
                if claim.connection == connection:
                    del self._claims[sequence]
                    self._unclaim(claim.position)

    def require_manifest(self, found: Manifest) -> None:
        """Raise ProtocolError unless the source's manifest is the one that this instance needs; MismatchError if that
        follows from what the source is."""
        # What the source is comes first: a goal differs where pages do, and says nothing of them.
        for field in sorted(Manifest.__struct_fields__, key=lambda name: name not in _OF_THE_SOURCE):
            theirs, ours = getattr(found, field), getattr(self.expected, field)
            if theirs != ours:
                self._broken = (
                    f"manifest field {_difference(field, theirs, ours)}: both pools must serve the same checkpoint "
                    "with the same version and options"
                )
                raise (MismatchError if field in _OF_THE_SOURCE else ProtocolError)(self._broken)

    @property
    def received(self) -> Ranges:
        """Sequence numbers of the data frames that arrived."""
        with self._lock:
            return as_ranges(set(self._digests))

    @property
    def whole(self) -> bool:
        """True once everything arrived without an error."""
        with self._lock:
            return self._whole

    def require_whole(self) -> Done:
        """Return the source's account of a whole transfer; raises ProtocolError for any other."""
        with self._lock:
            if self.done is None or not self._whole:
                without = self._missing() or "an undamaged stream"
                raise ProtocolError(f"transfer {self.expected.transfer_id} ended without {without}: it is not used")
            return self.done

    def _compare(self) -> None:
        """Once everything is there, compare it with the source's account; if they agree, the transfer is whole."""
        done = self.done
        if done is None or self._broken or self._missing():
            return
        if (done.frames, done.payload_bytes) != (len(self._digests), self.received_bytes):
            raise ProtocolError(
                f"{len(self._digests)} frames of {self.received_bytes} bytes arrived, the source counted "
                f"{done.frames} of {done.payload_bytes}"
            )
        if whole_digest(self._digests.get(number, 0) for number in range(done.frames)) != done.digest:
            raise ProtocolError("the digest over all frames is not the source's: nothing of them is used")
        self._whole = True

    def _missing(self) -> str:
        """Return a text about missing parts, empty if nothing is missing."""
        parts = [
            f"rows of {len(self._rows_left)} attention layers" if self._rows_left else "",
            f"{len(self._states_left)} linear states" if self._states_left else "",
            "" if self.done else "DONE",
        ]
        return ", ".join(part for part in parts if part)

    def _require_ours(self, header: FrameHeader) -> None:
        if self._broken:
            raise ProtocolError(f"{header.describe()} after an error: {self._broken}")
        if header.address != self.expected.address:
            raise ProtocolError(
                f"{header.describe()} is for {header.address}, want {self.expected.address}: stale or foreign"
            )

    def _claim(self, header: FrameHeader) -> CachePart:
        match header.kind:
            case Kind.BLOCK:
                return self._claim_rows(header)
            case Kind.STATE:
                return self._claim_state(header)
            case _:
                raise ProtocolError(f"{header.describe()} carries no cache")

    def _claim_rows(self, header: FrameHeader) -> LayerRows:
        position = self._position(header, "attention")
        group, end = self.expected.groups[header.group], header.start_token + header.tokens
        first, last = group.rows_span(self.expected.start_token, self.expected.end_token)
        if not (first <= header.start_token < end <= last):
            raise ProtocolError(
                f"{header.describe()} is outside of tokens {self.expected.start_token}..{self.expected.end_token}"
            )
        if header.start_token % group.row_tokens or header.tokens % group.row_tokens:
            raise ProtocolError(f"{header.describe()} cuts rows of {group.row_tokens} tokens")
        self._require_size(header, group.rows_bytes(header.tokens))
        starts, ends = self._starts.setdefault(position, []), self._ends.setdefault(position, [])
        at = bisect_right(starts, header.start_token)
        if (at > 0 and ends[at - 1] > header.start_token) or (at < len(starts) and starts[at] < end):
            raise ProtocolError(f"{header.describe()} overlaps rows that were sent before")
        starts.insert(at, header.start_token)
        ends.insert(at, end)
        return LayerRows(*position, header.start_token, header.tokens)

    def _claim_state(self, header: FrameHeader) -> LayerState:
        position = LayerState(*self._position(header, "linear"))
        self._require_size(header, self.expected.groups[header.group].nbytes)
        if position in self._states_claimed:
            raise ProtocolError(f"{header.describe()} was sent before")
        self._states_claimed.add(position)
        return position

    def _unclaim(self, position: CachePart) -> None:
        match position:
            case LayerRows(group, layer, start_token, _):
                at = self._starts[group, layer].index(start_token)
                del self._starts[group, layer][at], self._ends[group, layer][at]
            case LayerState():
                self._states_claimed.remove(position)

    def _position(self, header: FrameHeader, kind: str) -> GroupLayer:
        groups = self.expected.groups
        if header.group >= len(groups) or groups[header.group].kind != kind:
            raise ProtocolError(f"{header.describe()}: the manifest has no such {kind} group")
        if header.layer not in groups[header.group].layers:
            raise ProtocolError(f"{header.describe()}: the group has layers {groups[header.group].layers}")
        return header.group, header.layer

    def _require_size(self, header: FrameHeader, raw_bytes: int) -> None:
        if header.codec not in self._codecs:
            raise ProtocolError(f"{header.describe()} has codec {header.codec}, agreed are {sorted(self._codecs)}")
        if raw_bytes > MAX_DATA_BYTES:  # a codec expands a few bytes to many, and decoding needs memory for all
            raise ProtocolError(f"{header.describe()} stands for {raw_bytes} bytes, {MAX_DATA_BYTES} are allowed")
        if header.codec and 0 < header.payload_bytes < raw_bytes:
            return  # a payload that a codec does not reduce travels unchanged
        if header.codec or header.payload_bytes != raw_bytes:
            raise ProtocolError(f"{header.describe()} has {header.payload_bytes} bytes, the manifest says {raw_bytes}")

    def _note(self, header: FrameHeader, payload: Buffer) -> None:
        match header.kind:
            case Kind.DONE:
                done = decode_message(header, payload, Done)
                if self.done is not None and self.done != done:  # a repetition may come after a break
                    raise ProtocolError(f"{header.describe()} was sent before with other content")
                self.done = done
            case Kind.ABORT if self._missing():
                raise PeerError(f"the other side gave up: {decode_message(header, payload, Abort).message}")
            case Kind.KEEP_ALIVE | Kind.ABORT:  # late: everything has arrived
                pass
            case _:
                raise ProtocolError(f"{header.describe()} has no place here")


def _difference(path: str, theirs: object, ours: object) -> str:
    """Return the first place where two values differ, and what is there."""
    parts: list[tuple[str, object, object]] = []
    if isinstance(theirs, msgspec.Struct) and isinstance(ours, msgspec.Struct):
        parts = [(f".{name}", getattr(theirs, name), getattr(ours, name)) for name in theirs.__struct_fields__]
    elif _is_tuple(theirs) and _is_tuple(ours):
        parts = [(f"[{at}]", *pair) for at, pair in enumerate(zip(theirs, ours, strict=False))]
    # A shape follows from the plain values beside it: they say more.
    for name, one, other in sorted(parts, key=lambda part: isinstance(part[1], (tuple, msgspec.Struct))):
        if one != other:
            return _difference(path + name, one, other)
    return f"{path} is {_short(theirs)}, this instance needs {_short(ours)}"


def _is_tuple(value: object) -> TypeGuard[tuple[object, ...]]:
    return isinstance(value, tuple)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."
