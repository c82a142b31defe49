"""LOSSLESS: separates the bytes of numbers by significance, because exponents repeat and mantissas are noise.

Payload: for each tensor in manifest order, for each of its planes, the plane's length on the wire (unsigned, 32 bits,
network order). Then the planes in the same order. A plane of its full length is as it is, a shorter one is a zstd frame
that states its content's size.

    uint8               the byte
    bfloat16, float16   low byte, high byte (sign and exponent, or the most of it)
    float32             low half (16 bits, little endian), third byte, high byte

zstd runs with its smallest table for matches: planes of exponents have no repetitions worth the search. What is left is
its Huffman coder, at more than twice the speed of level 1. It is not behind in size (docs/understand/compression.md).
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from prfaas.errors import ProtocolError
from prfaas.wire.transfer import Buffer
from prfaas_transfer.codecs import Tensor, Words

Plane = NDArray[Any]

# By bytes of an element: the bits of each plane, least significant first.
PLANES = {1: (8,), 2: (8, 8), 4: (16, 8, 8)}
_KINDS = {8: np.dtype("u1"), 16: np.dtype("<u2")}

SAMPLE_BYTES, SAMPLES = 1024, 8  # Judge a plane by so many samples, spread over it.
WORTH = 0.9  # Compress if samples shrink to this: a smaller gain is not worth the time on any link.

_LENGTH_BYTES = 4
_ZSTD = zstandard.ZstdCompressionParameters(
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,  # with anything higher literals stay as they are
    strategy=zstandard.STRATEGY_FAST,
)


def encode(tensors: Sequence[Tensor], raw_bytes: int) -> list[Buffer] | None:
    """Return the payload, or None if it would not be smaller than the `raw_bytes` of the tensors."""
    planes = [_pack(plane) for tensor in tensors for plane in _split(tensor.gather())]
    lengths = [plane.nbytes for plane in planes]
    if _LENGTH_BYTES * len(lengths) + sum(lengths) >= raw_bytes:
        return None
    return [struct.pack(f"!{len(lengths)}I", *lengths), *planes]


def decode_into(payload: memoryview, tensors: Sequence[Tensor]) -> None:
    """Decode a payload into the tensors' pieces. Raises ProtocolError if it does not fit them."""
    count = sum(len(PLANES[tensor.word.itemsize]) for tensor in tensors)
    if payload.nbytes < _LENGTH_BYTES * count:
        raise ProtocolError(f"payload of {payload.nbytes} bytes has no room for the lengths of {count} planes")
    lengths = struct.unpack_from(f"!{count}I", payload)
    if _LENGTH_BYTES * count + sum(lengths) != payload.nbytes:
        raise ProtocolError(f"planes of {sum(lengths)} bytes in a payload of {payload.nbytes}")
    wire, left = payload[_LENGTH_BYTES * count :], list(reversed(lengths))
    for tensor in tensors:
        planes = []
        for bits in PLANES[tensor.word.itemsize]:
            length = left.pop()
            planes.append(_unpack(wire[:length], tensor.elements, _KINDS[bits]))
            wire = wire[length:]
        tensor.scatter(_join(planes, tensor.word))


def _split(words: Words) -> list[Plane]:
    planes, shift = [], 0
    for bits in PLANES[words.itemsize]:
        planes.append((words >> shift if shift else words).astype(_KINDS[bits]))  # the low bits only
        shift += bits
    return planes


def _join(planes: Sequence[Plane], word: np.dtype[Any]) -> Words:
    *lower, highest = planes
    words = highest.astype(word)
    for plane in reversed(lower):
        words <<= 8 * plane.itemsize
        words |= plane
    return words


def _pack(plane: Plane) -> memoryview:
    """Return the plane's bytes, compressed if that saves enough."""
    raw = plane.view(np.uint8)
    if _shrinks(raw):
        packed = _compress(raw)
        if len(packed) < raw.nbytes:
            return memoryview(packed)
    return raw.data


def _shrinks(raw: NDArray[np.uint8]) -> bool:
    """Judge a plane by samples, which cost a fraction of compressing it."""
    if raw.nbytes <= SAMPLES * SAMPLE_BYTES:
        return True
    starts = np.linspace(0, raw.nbytes - SAMPLE_BYTES, SAMPLES, dtype=np.int64)
    sample = np.concatenate([raw[start : start + SAMPLE_BYTES] for start in starts])
    return len(_compress(sample)) < WORTH * sample.nbytes


def _compress(raw: NDArray[np.uint8]) -> bytes:
    # A compressor a call: two threads may not use one of python-zstandard's objects at once.
    return zstandard.ZstdCompressor(compression_params=_ZSTD).compress(raw.data)


def _unpack(wire: memoryview, elements: int, kind: np.dtype[Any]) -> Plane:
    """Return a plane of so many elements; zstd's output is bounded before it runs."""
    want_bytes = elements * kind.itemsize
    if wire.nbytes == want_bytes:
        return np.frombuffer(wire, kind)
    try:
        stated_bytes = zstandard.frame_content_size(wire)
        if wire.nbytes > want_bytes or stated_bytes != want_bytes:
            raise ProtocolError(f"a plane of {want_bytes} bytes arrived as {wire.nbytes} that state {stated_bytes}")
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _ZSTD.window_log)
        return np.frombuffer(decompressor.decompress(wire, allow_extra_data=False), kind)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"a plane of {want_bytes} bytes cannot be decompressed: {error}") from error
