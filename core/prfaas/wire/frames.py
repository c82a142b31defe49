"""The data port's frames: a header of 64 bytes with address, position and kind, and a payload of bytes.

A frame proves two things by itself. `check` covers the header, so that a damaged length or position is detected before
it is used. `digest` covers header and payload as they travelled. Both are xxh3, which detects damage; TLS protects
against forgery. A frame names its transfer and epoch, so a frame of another life is never placed. It also names its own
position. So frames may arrive in any order over any number of connections. docs/extend/protocol.md has the bytes.
"""

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

import xxhash

from prfaas.errors import DamagedError, MismatchError, ProtocolError

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC: Final = b"PFX2"
MAX_DATA_BYTES: Final = 64 << 20
"""Upper bound of a BLOCK or STATE payload; larger token ranges travel in several frames."""
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_HELLO_BYTES: Final = 64 << 10
"""Upper bound of the bytes that an unauthenticated peer can make us read."""

# magic, kind, codec, group, layer, flags, sequence, transfer id, epoch, first token, tokens, payload bytes
_FIELDS: Final = struct.Struct("!4sBBHHHI16sQIII")
_CHECK: Final = struct.Struct("!I")
_DIGEST: Final = struct.Struct("!Q")
HEADER_BYTES: Final = _FIELDS.size + _CHECK.size + _DIGEST.size


class Kind(IntEnum):
    """The content of a frame. 5 was a hidden state before version 3."""

    HELLO = 1
    WELCOME = 2
    BLOCK = 3
    STATE = 4
    DONE = 6
    KEEP_ALIVE = 7
    ABORT = 8
    ACK = 9
    FREED = 10


class Codec(IntEnum):
    """How a payload's bytes on the wire differ from its tensors' bytes; the value is the one on the wire.

    A frame names its codec, so a source may change it from frame to frame. docs/understand/compression.md specifies
    the codecs.
    """

    NONE = 0
    LOSSLESS = 1
    """Byte planes, those that shrink through zstd: the tensors come out bit by bit."""
    INT8 = 2
    """Attention rows as 8-bit integers with a scale for each channel: the tensors come out within a bound."""

    @property
    def is_exact(self) -> bool:
        """Whether tensors come out bit by bit; other rows never enter a prefix cache."""
        return self is not Codec.INT8


DATA_KINDS: Final = frozenset({Kind.BLOCK, Kind.STATE})
"""Kinds that carry cache: numbered by `sequence`, counted by DONE."""

_MAX_PAYLOAD: Final = {
    Kind.HELLO: MAX_HELLO_BYTES,
    Kind.WELCOME: MAX_MESSAGE_BYTES,
    Kind.BLOCK: MAX_DATA_BYTES,
    Kind.STATE: MAX_DATA_BYTES,
    Kind.DONE: MAX_HELLO_BYTES,
    Kind.KEEP_ALIVE: 0,
    Kind.ABORT: MAX_HELLO_BYTES,
    Kind.ACK: 0,
    Kind.FREED: 0,
}
_KINDS: Final = {kind.value: kind for kind in Kind}


class Address(NamedTuple):
    """The destination of a frame: a transfer (32 hexadecimal digits) in one epoch."""

    transfer_id: str
    epoch: int


class FrameHeader(NamedTuple):
    """One frame's header. `group` and `layer` give the position of BLOCK and STATE, the token range that of BLOCK.

    `sequence` numbers the data frames of a transfer from 0; `payload_bytes` counts the bytes on the wire, which `codec`
    may have reduced. `flags` are reserved: 0.
    """

    kind: Kind
    address: Address
    payload_bytes: int
    group: int = 0
    layer: int = 0
    start_token: int = 0
    tokens: int = 0
    sequence: int = 0
    codec: int = 0
    flags: int = 0
    digest: int = 0

    def describe(self) -> str:
        """Return the frame's position in words, for messages."""
        position = f" of group {self.group} layer {self.layer}" if self.kind in (Kind.BLOCK, Kind.STATE) else ""
        span = f" tokens {self.start_token}..{self.start_token + self.tokens}" if self.kind == Kind.BLOCK else ""
        return f"{self.kind.name} frame{position}{span}"


class Sealed(NamedTuple):
    """A header's bytes, and the digest at their end."""

    header: bytes
    digest: int


def seal(header: FrameHeader, payload: Iterable[Buffer] = ()) -> Sealed:
    """Return the header's bytes with check and digest; `header.digest` is ignored."""
    fields = _pack_fields(header)
    digest = _digest(fields, payload)
    return Sealed(fields + _CHECK.pack(_check(fields)) + _DIGEST.pack(digest), digest)


def parse_header(data: Buffer) -> FrameHeader:
    """Read a header and check its bounds; the digest can only be checked with the payload.

    Raises DamagedError for damage; ProtocolError for another protocol or kind, or a payload beyond the kind's limit.
    """
    if len(data) != HEADER_BYTES:
        raise DamagedError(f"frame header of {len(data)} bytes, want {HEADER_BYTES}: the stream was cut")
    (check,) = _CHECK.unpack_from(data, _FIELDS.size)
    if check != _check(memoryview(data)[: _FIELDS.size]):
        raise DamagedError(f"frame header {bytes(data[:8]).hex()}... does not match its check: damaged or not ours")
    magic, kind, codec, group, layer, flags, sequence, raw_id, epoch, start, tokens, size = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise MismatchError(f"frame starts with {bytes(magic)!r}, want {MAGIC!r}: not a data port of this version")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"frame of unknown kind {kind}: not a data port of this version")
    if size > _MAX_PAYLOAD[known]:
        raise ProtocolError(f"{known.name} frame of {size} bytes, at most {_MAX_PAYLOAD[known]} are allowed")
    if flags:
        raise ProtocolError(f"{known.name} frame with unknown flags {flags:#x}: not a data port of this version")
    (digest,) = _DIGEST.unpack_from(data, _FIELDS.size + _CHECK.size)
    address = Address(raw_id.hex(), epoch)
    return FrameHeader(known, address, size, group, layer, start, tokens, sequence, codec, flags, digest)


def verify(header: FrameHeader, payload: Iterable[Buffer] = ()) -> None:
    """Check that a frame arrived undamaged; raises DamagedError where its digest is not that of header and payload."""
    found = _digest(_pack_fields(header), payload)
    if found != header.digest:
        raise DamagedError(
            f"{header.describe()} has digest {found:016x}, its header says {header.digest:016x}: damaged"
        )


def whole_digest(digests: Iterable[int]) -> str:
    """Digest of a whole transfer: xxh3_128 over its data frames' digests (u64, big endian) in order of sequence."""
    state = xxhash.xxh3_128()
    for digest in digests:
        state.update(_DIGEST.pack(digest))
    return state.hexdigest()


def _pack_fields(header: FrameHeader) -> bytes:
    return _FIELDS.pack(
        MAGIC,
        header.kind,
        header.codec,
        header.group,
        header.layer,
        header.flags,
        header.sequence,
        bytes.fromhex(header.address.transfer_id),
        header.address.epoch,
        header.start_token,
        header.tokens,
        header.payload_bytes,
    )


def _check(fields: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF


def _digest(fields: bytes, payload: Iterable[Buffer]) -> int:
    state = xxhash.xxh3_64(fields)
    for part in payload:
        state.update(part)
    return state.intdigest()
