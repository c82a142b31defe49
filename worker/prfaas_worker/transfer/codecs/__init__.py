"""Wire compression of the hybrid cache: between the bytes of a frame's tensors and those of its payload.

    encode(codec, layouts, items, parts)         -> the codec that was used, and the payload in buffers
    decode_into(codec, layouts, items, payload, room)
    decode(codec, layouts, items, payload)       -> each tensor's bytes

A frame's tensors stand one after the other, each contiguous [items, *shape]: a BLOCK of n tokens has n items, a STATE
has one. `parts` and `room` are that memory in pieces, each of whole items of one tensor, as the cache's pages give it.

What is hard: a codec must never cost more than it saves, and a payload may come from anyone. So a frame that does not
get smaller travels as it is, and **a payload with a codec is smaller than its tensors**; every size is known from the
layouts before the first byte is decoded, memory is bounded by the tensors', and whatever does not fit is a
ProtocolError. Everything here is a function without state: any thread may call any of them, and zstd and numpy release
the GIL for the bulk of the work. Encoded buffers belong to the caller, but those of Codec.NONE are `parts` themselves.
"""

from collections.abc import Sequence
from typing import NamedTuple

from prfaas.errors import ProtocolError
from prfaas.wire.codecs import Codec
from prfaas.wire.transfer import Buffer, TensorLayout
from prfaas_worker.transfer.codecs import int8, lossless
from prfaas_worker.transfer.codecs.pieces import cut, size_bytes

DECODABLE = (Codec.NONE, Codec.LOSSLESS, Codec.INT8)
"""What this version reads, for the handshake."""


class Encoded(NamedTuple):
    """A frame's payload, and the codec that it really went through."""

    codec: Codec
    buffers: Sequence[Buffer]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)


def encode(codec: Codec, layouts: Sequence[TensorLayout], items: int, parts: Sequence[Buffer]) -> Encoded:
    """Encode one frame with `codec`, or with a lesser one where that does not serve it.

    INT8 gives way to LOSSLESS for linear states, for rows with values that are not finite or nearly overflow, and for a
    few tokens that its scales would make larger; LOSSLESS gives way to NONE when nothing shrinks.

    Raises:
        InternalError: the parts are not the tensors' memory.

    """
    tensors = cut(layouts, items, parts)
    raw_bytes = size_bytes(layouts, items)
    if codec is Codec.INT8 and all(layout.axes[0] == "token" for layout in layouts):
        payload = int8.encode(tensors, raw_bytes)
        if payload is not None:
            return Encoded(Codec.INT8, payload)
    if codec is not Codec.NONE:
        payload = lossless.encode(tensors, raw_bytes)
        if payload is not None:
            return Encoded(Codec.LOSSLESS, payload)
    return Encoded(Codec.NONE, parts)


def decode_into(
    codec: Codec, layouts: Sequence[TensorLayout], items: int, payload: Buffer, room: Sequence[memoryview]
) -> None:
    """Decode one frame into `room`, whose bytes are undefined when this raises.

    Raises:
        ProtocolError: the payload is not one that `encode` makes for these tensors.
        InternalError: the room is not the tensors' memory.

    """
    wire = memoryview(payload).cast("B")
    tensors = cut(layouts, items, room)
    raw_bytes = size_bytes(layouts, items)
    if codec is Codec.NONE:
        if wire.nbytes != raw_bytes:
            raise ProtocolError(f"payload of {wire.nbytes} bytes for tensors of {raw_bytes}, sent as they are")
        for tensor in tensors:
            for piece in tensor.pieces:
                piece[:], wire = wire[: piece.nbytes], wire[piece.nbytes :]
        return
    if wire.nbytes >= raw_bytes:
        raise ProtocolError(f"payload of {wire.nbytes} bytes in {codec.name} for tensors of {raw_bytes}: not smaller")
    if codec is Codec.INT8:
        int8.decode_into(wire, tensors)
    else:
        lossless.decode_into(wire, tensors)


def decode(codec: Codec, layouts: Sequence[TensorLayout], items: int, payload: Buffer) -> list[memoryview]:
    """Decode one frame into memory of its own: each tensor's bytes, [items, *shape].

    Raises:
        ProtocolError: the payload is not one that `encode` makes for these tensors.

    """
    room = [memoryview(bytearray(items * layout.nbytes)) for layout in layouts]
    decode_into(codec, layouts, items, payload, room)
    return room
