"""Frames for codecs: layouts and bytes of every kind, and memory cut as a cache's pages cut it."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from prfaas.wire.transfer import TensorLayout

DTYPES = ("bfloat16", "float16", "float32")
NUMPY = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4")}


def rows(channels: int, dtype: str, name: str = "latent") -> TensorLayout:
    return TensorLayout(name, ("token", "channel"), (channels,), dtype)


def state(shape: tuple[int, ...], dtype: str) -> TensorLayout:
    return TensorLayout("state", tuple(f"axis{i}" for i in range(len(shape))), shape, dtype)


def packed(values: NDArray, dtype: str) -> bytes:
    """Numbers as bytes of `dtype`."""
    if dtype == "bfloat16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(NUMPY[dtype]).tobytes()


def unpacked(data: bytes | memoryview, dtype: str, channels: int) -> NDArray[np.float64]:
    """Bytes of `dtype` as numbers, [items, channels]."""
    if dtype == "bfloat16":
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data, NUMPY[dtype])
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.reshape(-1, channels).astype(np.float64)


def cut_at(data: bytes | memoryview, item_bytes: int, cuts: list[int]) -> list[memoryview]:
    """One tensor's memory in pieces that end after so many items."""
    view = memoryview(data)
    ends = sorted({cut * item_bytes for cut in cuts} | {len(view)})
    return [view[start:end] for start, end in zip([0, *ends], ends, strict=False) if start < end]


@st.composite
def contents(draw: st.DrawFn, size: int) -> bytes:
    """Bytes that are anything: noise with NaN and infinities among it, runs, or a few repeated patterns."""
    seed = draw(st.integers(0, 2**32 - 1))
    kind = draw(st.sampled_from(["noise", "zeros", "pattern", "sparse"]))
    noise = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    if kind == "noise":
        return noise.tobytes()
    if kind == "zeros":
        return bytes(size)
    if kind == "sparse":
        return np.where(noise > 250, noise, 0).astype(np.uint8).tobytes()
    pattern = draw(st.binary(min_size=1, max_size=32))
    return (pattern * (size // len(pattern) + 1))[:size]
