"""Proves that what goes through LOSSLESS, or through nothing, comes out bit by bit, whatever the bytes, the types and
the pieces of memory are; that a payload is smaller than its tensors or is the tensors; and that numbers do shrink."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InternalError
from prfaas.wire.frames import Codec
from prfaas_transfer.compression import decode, decode_into, encode

from .frames import DTYPES, contents, cut_at, packed, rows, state

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1e-45, -1e-40, 6e-8, 3.4e38, 65504.0, 1.0]


def joined(buffers) -> bytes:
    return b"".join(buffers)


@given(st.data())
def test_any_bytes_come_back_bit_by_bit_through_any_pieces(data):
    items = data.draw(st.integers(1, 300))
    layouts = [
        rows(data.draw(st.integers(1, 40)), data.draw(st.sampled_from(DTYPES)), f"tensor{index}")
        for index in range(data.draw(st.integers(1, 3)))
    ]
    contents_drawn = [data.draw(contents(items * layout.nbytes)) for layout in layouts]
    parts, room = [], []
    for layout, content in zip(layouts, contents_drawn, strict=True):
        cuts = st.lists(st.integers(1, items), max_size=4)
        parts += cut_at(content, layout.nbytes, data.draw(cuts))
        room += cut_at(bytearray(len(content)), layout.nbytes, data.draw(cuts))

    encoded = encode(Codec.LOSSLESS, layouts, items, parts)
    payload = joined(encoded.buffers)
    decode_into(encoded.codec, layouts, items, payload, room)

    assert joined(room) == joined(contents_drawn)
    assert [bytes(one) for one in decode(encoded.codec, layouts, items, payload)] == contents_drawn
    assert len(payload) == encoded.nbytes
    if encoded.codec is Codec.NONE:
        assert payload == joined(contents_drawn)
    else:
        assert encoded.codec is Codec.LOSSLESS
        assert len(payload) < len(joined(contents_drawn))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_infinity_denormals_and_both_zeros_keep_their_bits(dtype):
    with np.errstate(over="ignore"):
        content = packed(np.tile(np.array(SPECIAL, np.float64).astype(np.float32), 1000), dtype)
    encoded = encode(Codec.LOSSLESS, [state((12, 1000), dtype)], 1, [content])
    assert encoded.codec is Codec.LOSSLESS
    assert decode(encoded.codec, [state((12, 1000), dtype)], 1, joined(encoded.buffers)) == [content]


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 1.4), ("float16", 1.1), ("float32", 1.17)])
def test_normal_numbers_shrink_by_their_exponents(dtype, ratio):
    content = packed(np.random.default_rng(0).standard_normal(200_000), dtype)
    encoded = encode(Codec.LOSSLESS, [rows(100, dtype)], 2000, [content])
    assert len(content) / encoded.nbytes > ratio


def test_numbers_that_were_rounded_shrink_by_their_empty_half_too():
    content = packed(np.random.default_rng(0).standard_normal(200_000).astype(np.float16), "float32")
    assert len(content) / encode(Codec.LOSSLESS, [rows(100, "float32")], 2000, [content]).nbytes > 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_travels_as_the_memory_it_is_in(dtype):
    content = np.random.default_rng(0).bytes(400_000)
    pieces = cut_at(content, 400, [300, 700])
    encoded = encode(Codec.LOSSLESS, [rows(400 // (4 if dtype == "float32" else 2), dtype)], 1000, pieces)
    assert encoded.codec is Codec.NONE
    assert encoded.buffers is pieces


def test_what_was_encoded_does_not_change_with_the_cache():
    content = bytearray(packed(np.random.default_rng(0).standard_normal(50_000), "bfloat16"))
    before = bytes(content)
    encoded = encode(Codec.LOSSLESS, [rows(50, "bfloat16")], 1000, [content])
    content[:] = bytes(len(content))
    assert decode(encoded.codec, [rows(50, "bfloat16")], 1000, joined(encoded.buffers)) == [before]


def test_threads_at_once_do_not_disturb_each_other():
    layout = rows(64, "bfloat16")
    numbers = [np.random.default_rng(seed).standard_normal(64 * 2000) for seed in range(12)]

    def through(content: bytes) -> bool:
        encoded = encode(Codec.LOSSLESS, [layout], 2000, [content])
        return decode(encoded.codec, [layout], 2000, joined(encoded.buffers)) == [content]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(through, [packed(one, "bfloat16") for one in numbers]))


@pytest.mark.parametrize(
    ("items", "sizes"),
    [(4, [15]), (4, [16, 1]), (4, [8]), (4, [6, 10]), (4, []), (0, [])],
    ids=["short", "long", "half", "a piece ends within an item", "nothing", "no items"],
)
def test_memory_that_is_not_the_tensors_is_our_own_mistake(items, sizes):
    with pytest.raises(InternalError):
        encode(Codec.LOSSLESS, [rows(2, "bfloat16")], items, [bytes(size) for size in sizes])
