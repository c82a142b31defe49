"""Proves that INT8 keeps its stated bound for any bytes that it takes, that the bound says something, and that what it
cannot bound is handed on to LOSSLESS: values that are not finite, linear states, frames that it would make larger."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.wire.frames import Codec
from prfaas_transfer.codecs.int8 import KINDS, STRIP_ELEMENTS, error_bound
from prfaas_transfer.compression import decode, encode

from .frames import DTYPES, contents, packed, rows, state, unpacked


def through(dtype: str, channels: int, items: int, content: bytes):
    """The codec that was used, and the numbers before and after."""
    layout = rows(channels, dtype)
    encoded = encode(Codec.INT8, [layout], items, [content])
    assert encoded.codec is Codec.NONE or encoded.nbytes < len(content)
    (found,) = decode(encoded.codec, [layout], items, b"".join(encoded.buffers))
    if encoded.codec is not Codec.INT8:
        assert found == content
    return encoded.codec, unpacked(content, dtype, channels), unpacked(found, dtype, channels)


def assert_within_bound(before, after, dtype: str) -> None:
    assert np.all(np.abs(after - before) <= error_bound(dtype, np.abs(before).max(axis=0)))


@st.composite
def frames(draw: st.DrawFn):
    dtype, channels, items = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 20)), draw(st.integers(1, 60))
    item_bytes = channels * (4 if dtype == "float32" else 2)
    if draw(st.booleans()):
        return dtype, channels, items, draw(contents(items * item_bytes))
    # Finite numbers, each channel with its own size, from denormals to near the largest.
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = 14 if dtype == "float16" else 126
    sizes = 2.0 ** rng.integers(-top - 22, top, channels)
    return dtype, channels, items, packed(rng.uniform(-1, 1, (items, channels)) * sizes, dtype)


@given(frames())
@example(("float32", 2, 8, packed(np.zeros((8, 2)), "float32")))
@example(("float32", 1, 8, packed(np.array([2**-149.0] * 8), "float32")))
def test_a_frame_keeps_the_bound_or_is_exact(frame):
    dtype, channels, items, content = frame
    codec, before, after = through(dtype, channels, items, content)
    if codec is Codec.INT8:
        assert np.isfinite(after).all()
        assert_within_bound(before, after, dtype)
    else:
        magnitudes = np.abs(before)
        item_bytes = len(content) // items
        takes_more = channels * 4 + channels * items >= items * item_bytes
        assert takes_more or not np.all(magnitudes <= KINDS[dtype].largest * 127 / 128 * (1 - 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_rows_are_quantised_within_the_bound_and_across_several_strips(dtype):
    values = np.random.default_rng(1).standard_normal((3 * STRIP_ELEMENTS // 1000, 1000)) * np.logspace(-3, 3, 1000)
    codec, before, after = through(dtype, 1000, len(values), packed(values, dtype))
    assert codec is Codec.INT8
    assert_within_bound(before, after, dtype)


def test_the_bound_is_no_larger_than_it_must_be():
    values = np.random.default_rng(1).standard_normal((5000, 10))
    _, before, after = through("float32", 10, 5000, packed(values, "float32"))
    worst = np.abs(after - before).max(axis=0) / np.abs(before).max(axis=0)
    assert np.all(worst > 0.99 / 254)
    assert np.all(error_bound("float32", np.ones(1)) < 1.001 / 254)


@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_of_zeros_stay_zero(dtype):
    values = np.random.default_rng(1).standard_normal((100, 4)) * [1, 0, 1, 0]
    codec, _, after = through(dtype, 4, 100, packed(values, dtype))
    assert codec is Codec.INT8
    assert not after[:, [1, 3]].any()
    assert after[:, [0, 2]].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_sends_the_frame_exact(dtype, value):
    values = np.random.default_rng(1).standard_normal((1000, 16))
    assert through(dtype, 16, 1000, packed(values, dtype))[0] is Codec.INT8
    values[500, 7] = value
    assert through(dtype, 16, 1000, packed(values, dtype))[0] is Codec.LOSSLESS


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_so_large_that_rounding_may_overflow_sends_the_frame_exact(dtype):
    values = np.random.default_rng(1).standard_normal((1000, 16))
    values[500, 7] = KINDS[dtype].largest
    assert through(dtype, 16, 1000, packed(values, dtype))[0] is Codec.LOSSLESS


def test_a_linear_state_is_exact_under_int8():
    layout = state((8, 64, 64), "float32")
    content = packed(np.random.default_rng(1).standard_normal(8 * 64 * 64), "float32")
    encoded = encode(Codec.INT8, [layout], 1, [content])
    assert encoded.codec is Codec.LOSSLESS
    assert decode(encoded.codec, [layout], 1, b"".join(encoded.buffers)) == [content]


def test_a_few_tokens_that_scales_would_make_larger_are_sent_exact():
    values = np.random.default_rng(1).standard_normal((5, 4096))
    assert through("bfloat16", 4096, 4, packed(values[:4], "bfloat16"))[0] is Codec.LOSSLESS
    assert through("bfloat16", 4096, 5, packed(values, "bfloat16"))[0] is Codec.INT8


def test_only_int8_is_called_inexact():
    assert [codec for codec in Codec if not codec.is_exact] == [Codec.INT8]
