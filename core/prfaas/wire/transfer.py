"""The data port's frames: how a hybrid cache crosses from a prefill instance P to a decode instance D.

    D -> P   HELLO      who asks: transfer, epoch and the token that POST /v1/prefills gave
    P -> D   MANIFEST   what will come: model fingerprint, token range, layer groups with names, axes, types and shapes
             BLOCK      rows of one attention layer for one token range, sent while P still computes
             STATE      all tensors of one linear layer after the last token
             HIDDEN     the last normed hidden state, float32, from which D samples the first token
             DONE       how much was sent, and P's own timings
             KEEP_ALIVE nothing to send at the moment: P queues or computes
             ERROR      P gives up, and why
    D -> P   ACK        everything arrived: P may free its copy

A frame is a fixed header and a payload. The header's digest is xxh3_64 over the header before it and the payload, so a
frame says itself whether it arrived as it was sent; it names transfer and epoch, so it says also for whom. Frames carry
their own place and may arrive in any order and over any number of connections. `receipt.py` holds the receiving half.

The payload of BLOCK and STATE is the group's tensors one after the other in manifest order, each contiguous, in the
byte order of both machines (little endian: the manifest's dtype names it).
"""

import math
import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import xxhash

from prfaas.errors import ProtocolError

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC: Final = b"PFX1"
MAX_DATA_BYTES: Final = 64 << 20
"""Upper bound of a BLOCK, STATE or HIDDEN payload; larger token ranges travel in several frames."""
MAX_MESSAGE_BYTES: Final = 1 << 20
KEEP_ALIVE_SECONDS: Final = 0.2
"""Longest silence of a prefill instance on an open data connection."""
NO_PROGRESS_SECONDS: Final = 1.0
"""A receiver that saw no byte for this long gives the transfer up."""

ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}

# magic, kind, group, layer, epoch, transfer id, first token, tokens, payload bytes | digest
_FIELDS: Final = struct.Struct("!4sBBHQ16sIII")
_DIGEST: Final = struct.Struct("!Q")
HEADER_BYTES: Final = _FIELDS.size + _DIGEST.size


class Kind(IntEnum):
    """What a frame carries."""

    HELLO = 1
    MANIFEST = 2
    BLOCK = 3
    STATE = 4
    HIDDEN = 5
    DONE = 6
    KEEP_ALIVE = 7
    ERROR = 8
    ACK = 9


_MAX_PAYLOAD: Final = {
    Kind.HELLO: MAX_MESSAGE_BYTES,
    Kind.MANIFEST: MAX_MESSAGE_BYTES,
    Kind.BLOCK: MAX_DATA_BYTES,
    Kind.STATE: MAX_DATA_BYTES,
    Kind.HIDDEN: MAX_DATA_BYTES,
    Kind.DONE: MAX_MESSAGE_BYTES,
    Kind.KEEP_ALIVE: 0,
    Kind.ERROR: MAX_MESSAGE_BYTES,
    Kind.ACK: 0,
}


class Address(NamedTuple):
    """Whom a frame is for: a transfer (32 hexadecimal digits) in one epoch."""

    transfer_id: str
    epoch: int


class FrameHeader(NamedTuple):
    """One frame's fixed header. `group` and `layer` place BLOCK and STATE; the token range places BLOCK."""

    kind: Kind
    address: Address
    payload_bytes: int
    group: int = 0
    layer: int = 0
    start_token: int = 0
    tokens: int = 0
    digest: int = 0

    def describe(self) -> str:
        """Return the frame's place in words, for messages."""
        place = f" of group {self.group} layer {self.layer}" if self.kind in (Kind.BLOCK, Kind.STATE) else ""
        span = f" tokens {self.start_token}..{self.start_token + self.tokens}" if self.kind == Kind.BLOCK else ""
        return f"{self.kind.name} frame{place}{span}"


def seal(header: FrameHeader, payload: Iterable[Buffer] = ()) -> bytes:
    """Return the header's bytes with the digest of header and payload; `header.digest` is ignored."""
    fields = _pack_fields(header)
    return fields + _DIGEST.pack(_digest(fields, payload))


def parse_header(data: Buffer) -> FrameHeader:
    """Read a header and check its bounds; the digest can only be checked with the payload.

    Raises:
        ProtocolError: not a frame of this protocol, an unknown kind, or a payload beyond the kind's limit.

    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"frame header of {len(data)} bytes, want {HEADER_BYTES}: the stream was cut")
    magic, kind, group, layer, epoch, raw_id, start, tokens, size = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"frame starts with {bytes(magic)!r}, want {MAGIC!r}: not a data port of this version")
    if kind not in _MAX_PAYLOAD:
        raise ProtocolError(f"frame of unknown kind {kind}: not a data port of this version")
    if size > _MAX_PAYLOAD[Kind(kind)]:
        raise ProtocolError(f"{Kind(kind).name} frame of {size} bytes, at most {_MAX_PAYLOAD[Kind(kind)]} are allowed")
    (digest,) = _DIGEST.unpack_from(data, _FIELDS.size)
    return FrameHeader(Kind(kind), Address(raw_id.hex(), epoch), size, group, layer, start, tokens, digest)


def verify(header: FrameHeader, payload: Iterable[Buffer] = ()) -> None:
    """Check that a frame arrived as it was sent.

    Raises:
        ProtocolError: the digest is not that of this header and payload.

    """
    found = _digest(_pack_fields(header), payload)
    if found != header.digest:
        raise ProtocolError(
            f"{header.describe()} has digest {found:016x}, its header says {header.digest:016x}: damaged"
        )


def _pack_fields(header: FrameHeader) -> bytes:
    return _FIELDS.pack(
        MAGIC,
        header.kind,
        header.group,
        header.layer,
        header.address.epoch,
        bytes.fromhex(header.address.transfer_id),
        header.start_token,
        header.tokens,
        header.payload_bytes,
    )


def _digest(fields: bytes, payload: Iterable[Buffer]) -> int:
    state = xxhash.xxh3_64(fields)
    for part in payload:
        state.update(part)
    return state.intdigest()


class TensorLayout(msgspec.Struct, frozen=True):
    """One tensor of a layer. In an attention group axes[0] is `token` and `shape` leaves that axis out."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, or of one token's row in an attention group."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers of one kind with equal tensors. `layers` are the model's layer indices, from 0."""

    kind: Literal["attention", "linear"]
    layers: tuple[int, ...]
    tensors: tuple[TensorLayout, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one layer's state, or of one token in one layer of an attention group."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a transfer consists of: rows of tokens `start_token` up to (excluding) `end_token`, and all states there."""

    format: Literal[1] = 1
    fingerprint: str
    transfer_id: str
    epoch: int
    start_token: int
    end_token: int
    groups: tuple[LayerGroup, ...]
    hidden_size: int

    @property
    def address(self) -> Address:
        """The transfer and epoch every frame must name."""
        return Address(self.transfer_id, self.epoch)

    @property
    def tokens(self) -> int:
        """Tokens whose attention rows travel."""
        return self.end_token - self.start_token


class Hello(msgspec.Struct, frozen=True):
    """The first frame of a connection, from D. The token is a secret: it never enters a log."""

    token: str


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """P's account: payload bytes of all data frames, compute time, and compute start to first cache byte sent."""

    payload_bytes: int
    prefill_seconds: float
    first_byte_seconds: float


class Failure(msgspec.Struct, frozen=True):
    """Why P gives a transfer up."""

    message: str


Message = TypeVar("Message", Hello, Manifest, Done, Failure)


def decode_message(header: FrameHeader, payload: Buffer, kind: type[Message]) -> Message:
    """Read a JSON payload as `kind`.

    Raises:
        ProtocolError: the payload is not such a message.

    """
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{header.describe()} cannot be read: {error}") from error


def message_frame(kind: Kind, address: Address, message: msgspec.Struct | None = None) -> bytes:
    """Return a whole frame (header and payload) that carries a message, or none."""
    payload = msgspec.json.encode(message) if message is not None else b""
    return seal(FrameHeader(kind, address, len(payload)), [payload]) + payload
