"""Messages of source and destination at the data port: how a hybrid cache crosses between two instances.

The *source* has a cache and a data port; the *destination* learned the transfer over HTTP (prefill.py), and connects.

    destination    HELLO      versions, codecs, token, number of this connection, what arrived already (after a break)
    source         WELCOME    the version, and the manifest: fingerprint, tokens, groups with names, axes, types
                   BLOCK      rows of one attention layer for one token range, sent while the source still computes
                   STATE      all tensors of one linear layer after the last token
                   DONE       how many frames, how many bytes, the digest over all, and the source's timings
    both           KEEP_ALIVE nothing to send at the moment (source); the cache is still wanted (destination)
                   ABORT      this transfer is over, and why
    destination    HELLO      that only awaits: the source answers WELCOME when it begins to compute
                   ACK        everything arrived whole: the source may free its copy
    source         FREED      it did; the connection waits for the next HELLO

`receive_ledger.py` and `send_queue.py` hold the two halves as state machines.

The payload of BLOCK and STATE is the group's tensors one after the other in manifest order, each contiguous. They have
the byte order of both machines (little endian: the manifest's dtype names it). The frame's codec then encodes them.
"""

import math
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from prfaas.util import decode_json
from prfaas.wire.frames import Address, Buffer, FrameHeader, Kind, seal

VERSION: Final = 3
AWAIT_VERSION: Final = 4
"""Of a HELLO that awaits: a source that knows none of these answers ABORT, and binds nothing to it."""
MAX_TOKEN_CHARS: Final = 253
"""A source keeps the tokens of who declines what it does not know yet."""
KEEP_ALIVE_SECONDS: Final = 0.2
"""Longest silence of a source on an open data connection."""
HEARTBEAT_SECONDS: Final = 1.0
"""A destination confirms at least this often that it still wants the cache. So do both while it awaits a prompt."""
AWAIT_SILENT_SECONDS: Final = 5.0
"""Who hears nothing for this long, while a prompt is awaited, counts the other as gone."""
NO_PROGRESS_SECONDS: Final = 1.0
"""A destination counts a connection as broken after this long without a byte from the source."""

ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}

Ranges = tuple[tuple[int, int], ...]
"""Numbers as sorted ranges [first, end)."""


class TensorLayout(msgspec.Struct, frozen=True):
    """One tensor of a layer. In an attention group axes[0] counts rows (`token`, or `page`); `shape` leaves it out."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, or of one row in an attention group."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers of one kind with equal tensors. `layers` are the model's layer indices, from 0.

    A row of an attention group has `row_tokens` tokens: one, or a page's where an engine's memory has no smaller part.
    `spec` is the engine's own name of the kind.
    """

    kind: Literal["attention", "linear"]
    layers: tuple[int, ...]
    tensors: tuple[TensorLayout, ...]
    row_tokens: int = 1
    spec: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of one layer's state, or of one row in one layer of an attention group."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def rows_span(self, start_token: int, end_token: int) -> tuple[int, int]:
        """Return the tokens of all rows that hold any of these, from the first row's start to the last row's end."""
        return start_token // self.row_tokens * self.row_tokens, -(-end_token // self.row_tokens) * self.row_tokens

    def rows_bytes(self, tokens: int) -> int:
        """Return the bytes of whole rows with so many tokens, in one layer."""
        return tokens // self.row_tokens * self.nbytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a transfer: rows of tokens `start_token` up to (excluding) `end_token`, and all states there. Of
    an engine with several ranks, each has its own transfer: `rank` of `ranks` holds a part of every tensor. `prompt` is
    a digest of the tokens before `end_token`, since the two sides make token ids of a prompt by themselves.
    """

    format: Literal[3] = 3
    fingerprint: str
    transfer_id: str
    epoch: int
    start_token: int
    end_token: int
    groups: tuple[LayerGroup, ...]
    rank: int = 0
    ranks: int = 1
    prompt: str = ""

    @property
    def address(self) -> Address:
        """The transfer and epoch every frame must name."""
        return Address(self.transfer_id, self.epoch)

    @property
    def tokens(self) -> int:
        """Tokens whose attention rows travel."""
        return self.end_token - self.start_token

    @property
    def nbytes(self) -> int:
        """Cache bytes, before any codec."""
        found = 0
        for group in self.groups:
            if group.kind == "linear":
                found += len(group.layers) * group.nbytes
            elif self.tokens:
                start, end = group.rows_span(self.start_token, self.end_token)
                found += len(group.layers) * group.rows_bytes(end - start)
        return found


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame on a connection, or the next after FREED. The token is a secret: it never enters a log.

    `connection` numbers the connections of this transfer. Frames that were sent on one of the `broken` and are not
    among `received` were lost; the destination does not read from those connections any more. `start_token`, `rank`
    and `ranks` say what the destination wants of the transfer. One that `declines` wants nothing:
    the source answers ABORT, and need not keep the cache. One that `awaits` wants nothing yet: the source answers
    WELCOME when it begins to compute, and KEEP_ALIVE until then.
    """

    versions: tuple[int, ...] = (VERSION,)
    codecs: tuple[int, ...] = (0,)
    token: Annotated[str, Meta(max_length=MAX_TOKEN_CHARS)]
    connection: int = 0
    broken: tuple[int, ...] = ()
    received: Ranges = ()
    start_token: int = 0
    rank: int = 0
    ranks: int = 1
    declines: bool = False
    awaits: bool = False


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The source's answer: the connection's version, and the manifest."""

    version: int
    manifest: Manifest


class Done(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The source's account of a transfer: data frames and their payload bytes as sent, the digest over all of them,
    compute time, announcement to first cache byte sent, and whether it stands on nothing that a codec has changed. Then
    from the announcement until all was computed; None if the source does not report it. `origins` are the clusters, but
    the source's, whose bytes it stands on; None if the source does not know them.
    """

    frames: int
    payload_bytes: int
    digest: str
    prefill_seconds: float = 0.0
    first_byte_seconds: float = 0.0
    is_exact: bool = True
    computed_seconds: float | None = None
    origins: tuple[str, ...] | None = None


class Abort(msgspec.Struct, frozen=True, omit_defaults=True):
    """One side's reason for ending a transfer; with `later` only this connection: it may be asked again."""

    message: Annotated[str, Meta(max_length=4096)]
    later: bool = False


_Message = TypeVar("_Message", Hello, Welcome, Done, Abort)


def decode_message(header: FrameHeader, payload: Buffer, kind: type[_Message]) -> _Message:
    """Read a JSON payload as `kind`; raises ProtocolError where it is no such message."""
    return decode_json(payload, kind, f"{header.describe()} cannot be read")


def message_frame(kind: Kind, address: Address, message: msgspec.Struct | None = None) -> bytes:
    """Return a whole frame (header and payload) that carries a message, or none."""
    payload = msgspec.json.encode(message) if message is not None else b""
    return seal(FrameHeader(kind, address, len(payload)), [payload]).header + payload


def as_ranges(numbers: set[int]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = ranges[-1][0], number + 1
        else:
            ranges.append((number, number + 1))
    return tuple(ranges)


def in_ranges(number: int, ranges: Ranges) -> bool:
    return any(first <= number < end for first, end in ranges)
