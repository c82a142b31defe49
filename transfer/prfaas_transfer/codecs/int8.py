"""INT8: attention rows as symmetric 8-bit integers with one scale a channel and frame. For links that cost more than
a small loss, and only where an operator asked for it.

Payload: for each tensor in manifest order, its scales (float32, little endian, [*shape]), then its integers (int8,
[items, *shape]). A value is decoded as integer * scale, rounded to the tensor's type, and is off by at most

    max|x| of its channel in this frame * (1/254 + 2^-22 + the type's own rounding) + the type's smallest step

which `error_bound` gives. Values that are not finite, or so large that rounding could take them over the type's
largest, have no such bound. Their frame is refused.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prfaas.errors import ProtocolError
from prfaas.wire.transfer import Buffer
from prfaas_transfer.codecs import Tensor, Words

LEVELS = 127
STRIP_ELEMENTS = 1 << 20  # Rows pass through float32 in strips of this many elements.


class FloatKind(NamedTuple):
    """One type's arithmetic: its largest value, its relative rounding, and the error of values near zero."""

    largest: float
    rounding: float
    step: float


KINDS = {
    "bfloat16": FloatKind((2 - 2**-7) * 2.0**127, 2.0**-8, 2.0**-126),
    "float16": FloatKind(65504.0, 2.0**-11, 2.0**-24),
    "float32": FloatKind((2 - 2**-23) * 2.0**127, 2.0**-24, 2.0**-126),
}
# The smallest float32 of full precision: no channel's scale is less, an empty one's neither.
_LEAST_SCALE = np.float32(2.0**-126)
_SCALE = np.dtype("<f4")
# Added to a number below 2^22, it leaves the nearest integer in the float's low bits.
_ROUNDER = np.float32(1.5 * 2**23)


def error_bound(dtype: str, largest: NDArray[Any]) -> NDArray[np.float64]:
    """Bound of a value's error, given the largest magnitude of its channel in the frame."""
    kind = KINDS[dtype]
    # Half a step of max/127 is max/254. Scale, its inverse, their product with a value, and the decoded value are each
    # rounded to float32: 4 x 2^-24 = 2^-22.
    return largest.astype(np.float64) * (1 / (2 * LEVELS) + 2.0**-22 + kind.rounding) + kind.step


def encode(tensors: Sequence[Tensor], raw_bytes: int) -> list[Buffer] | None:
    """Return the payload; None if it would not be smaller than `raw_bytes`, or if a value has no bound."""
    if sum(_wire_bytes(tensor) for tensor in tensors) >= raw_bytes:
        return None
    payload: list[Buffer] = []
    for tensor in tensors:
        rows = tensor.gather().reshape(tensor.items, tensor.channels)
        largest = _largest(rows, tensor.layout.dtype)
        # Not `any(... > ...)`: a NaN, which is neither, must be refused too.
        if not np.all(largest <= _most_scale(tensor) * LEVELS):
            return None
        scales = np.maximum(largest / np.float32(LEVELS), _LEAST_SCALE)
        payload += [scales.astype(_SCALE).data.cast("B"), _quantise(rows, tensor.layout.dtype, scales).data.cast("B")]
    return payload


def decode_into(payload: memoryview, tensors: Sequence[Tensor]) -> None:
    """Decode a payload into the tensors' pieces. Raises ProtocolError if it does not fit them."""
    want_bytes = sum(_wire_bytes(tensor) for tensor in tensors)
    if payload.nbytes != want_bytes:
        raise ProtocolError(f"payload of {payload.nbytes} bytes for tensors that take {want_bytes} as 8-bit integers")
    for tensor in tensors:
        scales = np.frombuffer(payload, _SCALE, tensor.channels)
        if not np.all((scales >= _LEAST_SCALE) & (scales <= _most_scale(tensor))):
            raise ProtocolError(f"a scale of {tensor.layout.name} is beyond what {tensor.layout.dtype} can hold")
        integers = np.frombuffer(payload, np.int8, tensor.elements, scales.nbytes)
        tensor.scatter(_restore(integers.reshape(-1, tensor.channels), scales, tensor))
        payload = payload[scales.nbytes + integers.nbytes :]


def _wire_bytes(tensor: Tensor) -> int:
    return tensor.channels * _SCALE.itemsize + tensor.elements


def _most_scale(tensor: Tensor) -> np.float32:
    """With this scale even -128 is a number of the type."""
    return np.float32(KINDS[tensor.layout.dtype].largest / 128)


def _largest(rows: Words, dtype: str) -> NDArray[np.float32]:
    """Largest magnitude of each channel, [channels]; without its sign a float orders like its bits, NaN last."""
    without_sign = rows.dtype.type((1 << (8 * rows.itemsize - 1)) - 1)
    largest = np.zeros(rows.shape[1], rows.dtype)
    for _, strip in _strips(rows):
        np.maximum(largest, (strip & without_sign).max(axis=0), out=largest)
    floats = np.empty(len(largest), np.float32)
    _to_float(largest, dtype, floats)
    return floats


def _quantise(rows: Words, dtype: str, scales: NDArray[np.float32]) -> NDArray[np.int8]:
    integers = np.empty(rows.shape, np.int8)
    factors = np.float32(1) / scales
    for at, strip in _strips(rows):
        values = np.empty(strip.shape, np.float32)
        _to_float(strip, dtype, values)
        values *= factors
        values += _ROUNDER
        np.copyto(integers[at : at + len(strip)], values.view(np.int32), casting="unsafe")  # the low byte only
    return integers


def _restore(integers: NDArray[np.int8], scales: NDArray[np.float32], tensor: Tensor) -> Words:
    rows = np.empty(integers.shape, tensor.word)
    for at, strip in _strips(rows):
        values = integers[at : at + len(strip)] * scales
        _from_float(values, tensor.layout.dtype, strip)
    return rows.reshape(-1)


def _strips(rows: Words) -> Iterator[tuple[int, Words]]:
    """Yield views of some rows each, after the index of their first."""
    step = max(1, STRIP_ELEMENTS // rows.shape[1])
    for at in range(0, len(rows), step):
        yield at, rows[at : at + step]


def _to_float(words: Words, dtype: str, out: NDArray[np.float32]) -> None:
    if dtype == "bfloat16":  # the upper half of a float32
        bits = out.view(np.uint32)
        np.copyto(bits, words)
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(out, words.view(dtype))


def _from_float(values: NDArray[np.float32], dtype: str, out: Words) -> None:
    """Round to the nearest of the type; overwrites `values`."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        # Sign and magnitude: halves go away from zero, as compression.md says. `_most_scale` keeps the carry below
        # infinity.
        np.add(bits, 0x8000, out=bits)
        np.right_shift(bits, 16, out=bits)
        np.copyto(out, bits, casting="unsafe")
    else:
        np.copyto(out.view(dtype), values, casting="unsafe")
