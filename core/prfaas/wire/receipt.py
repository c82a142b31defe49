"""The receiving half of a transfer as a state machine without sockets: what may come, where it goes, when it is whole.

The receiver knows from its own model what has to arrive, so it builds the manifest it expects before the first byte.
For each frame the shell asks `claim(header)` for the payload's destination, reads exactly that many bytes into it, and
hands header and payload to `accept`, which checks the digest. A place can be claimed once: two connections never write
to one place. Whatever is wrong raises ProtocolError, after which the receipt stays broken: nothing of it may be used.

Invariant: `whole` is true only if the peer's manifest equals the expected one and every attention row, every linear
state, the hidden state and DONE arrived once each, undamaged, for this transfer and epoch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from prfaas.errors import PeerError, ProtocolError
from prfaas.wire.transfer import (
    Buffer,
    Done,
    Failure,
    FrameHeader,
    Kind,
    Manifest,
    decode_message,
    verify,
)


class Rows(NamedTuple):
    """Attention rows of one layer, tokens `start_token` up to `start_token + tokens`."""

    group: int
    layer: int
    start_token: int
    tokens: int


class State(NamedTuple):
    """All tensors of one linear layer."""

    group: int
    layer: int


class Hidden(NamedTuple):
    """The hidden state, float32."""


class Note(NamedTuple):
    """A message or keep-alive, to be read into memory of the shell's own."""


Destination = Rows | State | Hidden | Note
Place = tuple[int, int]  # group, layer


class Receipt:
    """Keeps account of one incoming transfer; see the module's opening for how to drive it."""

    def __init__(self, expected: Manifest):
        self.expected = expected
        self.done: Done | None = None
        self.received_bytes = 0
        self._broken = False
        self._manifest_arrived = False
        self._hidden_claimed = False
        self._hidden_arrived = False
        # Claimed token ranges of each attention layer, as sorted starts with their ends.
        self._starts: dict[Place, list[int]] = {}
        self._ends: dict[Place, list[int]] = {}
        self._rows_left: dict[Place, int] = {}
        self._states_left: set[Place] = set()
        self._states_claimed: set[Place] = set()
        for index, group in enumerate(expected.groups):
            for layer in group.layers:
                if group.kind == "linear":
                    self._states_left.add((index, layer))
                elif expected.tokens:
                    self._rows_left[index, layer] = expected.tokens

    def claim(self, header: FrameHeader) -> Destination:
        """Say where the payload of this frame goes, and reserve the place.

        Raises:
            ProtocolError: the frame is not of this transfer and epoch, not of the manifest, of the wrong size, or its
                place was claimed before.

        """
        try:
            return self._claim(header)
        except PeerError:
            self._broken = True
            raise

    def accept(self, header: FrameHeader, payload: Sequence[Buffer]) -> None:
        """Take note that a claimed frame arrived: `payload` holds its bytes in order.

        Raises:
            ProtocolError: the frame is damaged, its message cannot be read, or the peer's manifest is not the expected.
            PeerError: the peer gave up, with its reason.

        """
        try:
            verify(header, payload)
            self._accept(header, payload)
        except PeerError:
            self._broken = True
            raise

    @property
    def whole(self) -> bool:
        """Everything arrived and nothing was wrong."""
        return not self._broken and not self.missing()

    def missing(self) -> str:
        """Return in words what has not arrived, empty when nothing is missing."""
        parts = [
            "" if self._manifest_arrived else "the manifest",
            f"rows of {len(self._rows_left)} attention layers" if self._rows_left else "",
            f"{len(self._states_left)} linear states" if self._states_left else "",
            "" if self._hidden_arrived else "the hidden state",
            "" if self.done else "DONE",
        ]
        return ", ".join(part for part in parts if part)

    def require_whole(self) -> Done:
        """Return P's account of a whole transfer.

        Raises:
            ProtocolError: something is missing or was wrong.

        """
        if self.done is None or not self.whole:
            missing = self.missing() or "an undamaged stream"
            raise ProtocolError(f"transfer {self.expected.transfer_id} ended without {missing}: nothing of it is used")
        if self.done.payload_bytes != self.received_bytes:
            raise ProtocolError(f"{self.received_bytes} bytes arrived, the sender counted {self.done.payload_bytes}")
        return self.done

    def _claim(self, header: FrameHeader) -> Destination:
        if self._broken:
            raise ProtocolError(f"{header.describe()} after an error: the transfer is over")
        if header.address != self.expected.address:
            raise ProtocolError(
                f"{header.describe()} is for {header.address}, want {self.expected.address}: stale or foreign"
            )
        match header.kind:
            case Kind.BLOCK:
                return self._claim_rows(header)
            case Kind.STATE:
                return self._claim_state(header)
            case Kind.HIDDEN:
                return self._claim_hidden(header)
            case Kind.MANIFEST | Kind.DONE | Kind.KEEP_ALIVE | Kind.ERROR:
                return Note()
            case Kind.HELLO | Kind.ACK:
                raise ProtocolError(f"{header.describe()} comes from a receiver, never to one")

    def _claim_rows(self, header: FrameHeader) -> Rows:
        place = self._place(header, "attention")
        end = header.start_token + header.tokens
        if not (self.expected.start_token <= header.start_token < end <= self.expected.end_token):
            raise ProtocolError(
                f"{header.describe()} is outside of tokens {self.expected.start_token}..{self.expected.end_token}"
            )
        self._require_size(header, header.tokens * self.expected.groups[header.group].nbytes)
        starts, ends = self._starts.setdefault(place, []), self._ends.setdefault(place, [])
        at = bisect_right(starts, header.start_token)
        if (at > 0 and ends[at - 1] > header.start_token) or (at < len(starts) and starts[at] < end):
            raise ProtocolError(f"{header.describe()} overlaps rows that were sent before")
        starts.insert(at, header.start_token)
        ends.insert(at, end)
        return Rows(*place, header.start_token, header.tokens)

    def _claim_state(self, header: FrameHeader) -> State:
        place = self._place(header, "linear")
        self._require_size(header, self.expected.groups[header.group].nbytes)
        if place in self._states_claimed:
            raise ProtocolError(f"{header.describe()} was sent before")
        self._states_claimed.add(place)
        return State(*place)

    def _claim_hidden(self, header: FrameHeader) -> Hidden:
        self._require_size(header, self.expected.hidden_size * 4)
        if self._hidden_claimed:
            raise ProtocolError(f"{header.describe()} was sent before")
        self._hidden_claimed = True
        return Hidden()

    def _place(self, header: FrameHeader, kind: str) -> Place:
        groups = self.expected.groups
        if header.group >= len(groups) or groups[header.group].kind != kind:
            raise ProtocolError(f"{header.describe()}: the manifest has no such {kind} group")
        if header.layer not in groups[header.group].layers:
            raise ProtocolError(f"{header.describe()}: the group has layers {groups[header.group].layers}")
        return header.group, header.layer

    def _require_size(self, header: FrameHeader, want_bytes: int) -> None:
        if header.payload_bytes != want_bytes:
            raise ProtocolError(f"{header.describe()} has {header.payload_bytes} bytes, the manifest says {want_bytes}")

    def _accept(self, header: FrameHeader, payload: Sequence[Buffer]) -> None:
        place = header.group, header.layer
        match header.kind:
            case Kind.BLOCK:
                self._rows_left[place] -= header.tokens
                if self._rows_left[place] == 0:
                    del self._rows_left[place]
            case Kind.STATE:
                self._states_left.remove(place)
            case Kind.HIDDEN:
                self._hidden_arrived = True
            case Kind.MANIFEST:
                self._accept_manifest(header, payload)
            case Kind.DONE:
                self._accept_done(header, payload)
            case Kind.ERROR:
                failure = decode_message(header, b"".join(payload), Failure)
                raise PeerError(f"the prefill instance gave up: {failure.message}")
            case _:
                pass
        if header.kind in (Kind.BLOCK, Kind.STATE, Kind.HIDDEN):
            self.received_bytes += header.payload_bytes

    def _accept_manifest(self, header: FrameHeader, payload: Sequence[Buffer]) -> None:
        found = decode_message(header, b"".join(payload), Manifest)
        if self._manifest_arrived:
            raise ProtocolError(f"{header.describe()} was sent before")
        for field in Manifest.__struct_fields__:
            theirs, ours = getattr(found, field), getattr(self.expected, field)
            if theirs != ours:
                raise ProtocolError(
                    f"manifest field {field} is {theirs!r}, this instance needs {ours!r}: "
                    "both pools must serve the same checkpoint with the same version"
                )
        self._manifest_arrived = True

    def _accept_done(self, header: FrameHeader, payload: Sequence[Buffer]) -> None:
        done = decode_message(header, b"".join(payload), Done)
        if self.done is not None:
            raise ProtocolError(f"{header.describe()} was sent before")
        self.done = done
