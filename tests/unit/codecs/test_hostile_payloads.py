"""Proves that no payload, however made, does more than be refused as a ProtocolError or fill the room it was decoded
into: nothing else is raised, and no memory is taken beyond what the tensors' sizes allow."""

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.wire.frames import Codec
from prfaas_transfer.compression import DECODABLE, decode, decode_into, encode

from .frames import DTYPES, packed, rows

ITEMS, CHANNELS = 512, 64
LAYOUTS = {dtype: [rows(CHANNELS, dtype)] for dtype in DTYPES}
VALID = {
    (codec, dtype): b"".join(
        encode(
            codec, LAYOUTS[dtype], ITEMS, [packed(np.random.default_rng(0).standard_normal((ITEMS, CHANNELS)), dtype)]
        ).buffers
    )
    for codec in DECODABLE
    for dtype in DTYPES
}
HIGH_BYTES = ITEMS * CHANNELS
"""A plane of high bytes."""


def try_decode(codec: Codec, dtype: str, payload: bytes) -> bool:
    """Whether it was decoded; anything but a ProtocolError fails the test. Guards around the room stay as they were."""
    layout = LAYOUTS[dtype]
    size = ITEMS * layout[0].nbytes
    memory = bytearray(b"\xa5" * (size + 128))
    try:
        decode_into(codec, layout, ITEMS, payload, [memoryview(memory)[64 : 64 + size]])
    except ProtocolError:
        return False
    finally:
        assert memory[:64] == memory[-64:] == b"\xa5" * 64
    return True


@given(st.sampled_from(DECODABLE), st.sampled_from(DTYPES), st.binary(max_size=600))
def test_any_bytes_are_refused_or_decoded(codec, dtype, payload):
    assert not try_decode(codec, dtype, payload)  # too short to be one by chance


@settings(max_examples=150)
@given(st.sampled_from(sorted(VALID)), st.data())
def test_a_changed_payload_is_refused_or_decoded(which, data):
    codec, dtype = which
    payload = bytearray(VALID[which])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(300, len(payload) - 1)) | st.integers(0, len(payload) - 1))
        match data.draw(st.sampled_from(["flip", "truncate", "insert", "overwrite"])):
            case "flip":
                payload[at] ^= 1 << data.draw(st.integers(0, 7))
            case "truncate":
                del payload[max(1, at) :]
            case "insert":
                payload[at:at] = data.draw(st.binary(min_size=1, max_size=40))
            case "overwrite":
                payload[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    try_decode(codec, dtype, bytes(payload))


@pytest.mark.parametrize("which", sorted(VALID), ids=lambda which: f"{which[0].name}-{which[1]}")
def test_a_whole_payload_is_decoded_and_one_of_another_length_never(which):
    payload = VALID[which]
    assert try_decode(*which, payload)
    for wrong in (payload[:-1], payload + b"\0", payload[1:], b"", payload * 2):
        assert not try_decode(*which, wrong)


def test_a_payload_read_with_another_codec_is_refused():
    for (made, dtype), payload in VALID.items():
        for read in DECODABLE:
            assert try_decode(read, dtype, payload) == (read is made)


def zstd_frame(stated_bytes: int, content: bytes, *, window: int = 7 << 3) -> bytes:
    """A frame by hand: content size in 8 bytes, then this window descriptor and these blocks."""
    return b"\x28\xb5\x2f\xfd\xc0" + bytes([window]) + struct.pack("<Q", stated_bytes) + content


def run_block(count: int, *, last: bool) -> bytes:
    """A block that repeats one byte `count` times."""
    return struct.pack("<I", count << 3 | 1 << 1 | last)[:3] + b"\x07"


RUN = run_block(HIGH_BYTES, last=True)
HUGE = 1 << 40
BAD_FRAMES = {
    "no content size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(HIGH_BYTES)),
    "content size beyond the plane": zstd_frame(HUGE, RUN),
    "content size below the plane": zstd_frame(HIGH_BYTES - 1, RUN),
    "more content than stated": zstd_frame(HIGH_BYTES, run_block(HIGH_BYTES, last=False) + RUN),
    "less content than stated": zstd_frame(HIGH_BYTES, run_block(HIGH_BYTES - 1, last=True)),
    "a window of 2 GiB that never ends": zstd_frame(HIGH_BYTES, run_block(9, last=False), window=21 << 3),
    "two frames": zstandard.ZstdCompressor().compress(bytes(HIGH_BYTES)) * 2,
    "a skippable frame": struct.pack("<II", 0x184D2A50, 4) + b"skip" + zstd_frame(HIGH_BYTES, RUN),
    "no frame": b"not a frame",
    "an empty one": b"",
}


def with_high_plane(wire: bytes) -> bytes:
    """A payload of bfloat16 rows whose high plane is this."""
    low = bytes(HIGH_BYTES)
    return struct.pack("!2I", len(low), len(wire)) + low + wire


def test_a_frame_made_by_hand_is_decoded():
    assert try_decode(Codec.LOSSLESS, "bfloat16", with_high_plane(zstd_frame(HIGH_BYTES, RUN)))


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_bad_zstd_frame_is_refused(name):
    assert not try_decode(Codec.LOSSLESS, "bfloat16", with_high_plane(BAD_FRAMES[name]))


@pytest.mark.parametrize("lengths", [(0xFFFFFFFF, 0xFFFFFFFF), (HIGH_BYTES, 0xFFFFFFFF), (0, 0), (2 * HIGH_BYTES, 9)])
def test_plane_lengths_that_do_not_add_up_are_refused(lengths):
    payload = with_high_plane(zstd_frame(HIGH_BYTES, RUN))
    assert not try_decode(Codec.LOSSLESS, "bfloat16", struct.pack("!2I", *lengths) + payload[8:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 0.0, 3e38])
def test_a_scale_that_no_source_makes_is_refused(dtype, scale):
    payload = bytearray(VALID[Codec.INT8, dtype])
    payload[4:8] = np.float32(scale).tobytes()
    assert not try_decode(Codec.INT8, dtype, bytes(payload))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_scale_with_the_largest_integers_is_still_finite(dtype):
    largest = {"bfloat16": (2 - 2**-7) * 2.0**127, "float16": 65504.0, "float32": np.finfo(np.float32).max}[dtype]
    scales = np.full(CHANNELS, largest / 128, "<f4").tobytes()
    (found,) = decode(Codec.INT8, LAYOUTS[dtype], ITEMS, scales + b"\x80" * (ITEMS * CHANNELS))
    exponents = np.frombuffer(found, "<u4" if dtype == "float32" else "<u2")
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype]
    assert np.all(exponents & infinity != infinity)


def test_decoding_takes_no_more_memory_than_a_few_times_the_tensors():
    bound = 8 * ITEMS * CHANNELS * 4
    hostile = [with_high_plane(frame) for frame in BAD_FRAMES.values()]
    tracemalloc.start()
    try:
        for (codec, dtype), payload in VALID.items():
            try_decode(codec, dtype, payload)
        for payload in hostile:
            try_decode(Codec.LOSSLESS, "bfloat16", payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < peak < bound
