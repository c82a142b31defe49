"""prfaas.bounds.answers: an answer is unpacked in small pieces, whole and nothing beside it, and read to a bound."""

import asyncio
import gzip
import random
import tracemalloc
import zlib
from collections.abc import AsyncIterator

import pytest

from prfaas.bounds.answers import UNPACKED_BYTES, read_at_most, unpack
from prfaas.errors import ProtocolError

MEBIBYTE = 1 << 20
BOMB = gzip.compress(b"x" * (64 * MEBIBYTE))
TEXTS = {
    "none": b"",
    "short": b"{}",
    "as long as a piece": b"x" * UNPACKED_BYTES,
    "a byte longer": b"x" * (UNPACKED_BYTES + 1),
    "long": b"x" * (5 * UNPACKED_BYTES),
    "long and of all bytes": random.Random(1).randbytes(3 * UNPACKED_BYTES),
}


async def cut(body: bytes, size_bytes: int = MEBIBYTE) -> AsyncIterator[bytes]:
    for at in range(0, len(body), size_bytes):
        yield body[at : at + size_bytes]


async def unpack_all(body: bytes, encoding: str = "gzip", size_bytes: int = MEBIBYTE) -> list[bytes]:
    return [piece async for piece in unpack(cut(body, size_bytes), encoding, "the answer of 10.0.0.9")]


@pytest.mark.parametrize("size_bytes", [7, MEBIBYTE])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_a_packed_answer_is_unpacked_whole_in_pieces_to_a_bound(text, size_bytes):
    for encoding, packed in (
        ("gzip", gzip.compress(text)),
        ("GZIP ", gzip.compress(text)),
        ("deflate", zlib.compress(text)),
    ):
        pieces = await unpack_all(packed, encoding, size_bytes)
        assert b"".join(pieces) == text
        assert max(map(len, pieces), default=0) <= UNPACKED_BYTES


@pytest.mark.parametrize("encoding", ["", "identity"])
async def test_an_answer_that_is_not_packed_is_read_as_it_is(encoding):
    assert await unpack_all(BOMB, encoding, 1000) == [piece async for piece in cut(BOMB, 1000)]


async def test_an_answer_without_a_byte_is_empty_whatever_its_head_says():
    assert await unpack_all(b"") == []


@pytest.mark.parametrize(
    ("encoding", "body", "why"),
    [
        ("br", b"{}", "is packed by 'br', but only gzip was asked for"),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), "is packed by 'gzip, gzip'"),
        ("gzip", b"{}", "is packed and damaged"),
        ("gzip", gzip.compress(b"{}")[:-1], "ends in the middle"),
        ("gzip", gzip.compress(b"{}") + b"{}", "goes on after the end"),
    ],
)
@pytest.mark.parametrize("size_bytes", [1, MEBIBYTE])
async def test_what_cannot_be_unpacked_is_refused_by_a_sentence(encoding, body, why, size_bytes):
    with pytest.raises(ProtocolError, match=f"^the answer of 10.0.0.9 {why}"):
        await unpack_all(body, encoding, size_bytes)


async def peak_bytes(limit_bytes: int) -> int:
    """Return the most memory that it takes to read so much of 64 MiB in 64 KiB."""
    tracemalloc.start()
    try:
        await read_at_most(unpack(cut(BOMB), "gzip", "it"), limit_bytes)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


async def test_a_body_takes_no_more_memory_than_is_read_of_it():
    assert await peak_bytes(MEBIBYTE) < 3 * MEBIBYTE


async def test_control_unpacked_at_once_it_takes_all_of_it(monkeypatch):
    monkeypatch.setattr("prfaas.bounds.answers.UNPACKED_BYTES", 1 << 30)
    assert await peak_bytes(MEBIBYTE) > 60 * MEBIBYTE


async def test_others_have_their_turn_while_one_packed_piece_is_unpacked():
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    await unpack_all(gzip.compress(b"x" * (100 * UNPACKED_BYTES)))
    other.cancel()
    assert turns >= 90


async def test_a_body_is_read_until_it_exceeds_the_limit_and_then_further():
    pieces = cut(b"x" * 10, 3)
    begun = await read_at_most(pieces, 4)
    assert begun == b"x" * 6
    assert await read_at_most(pieces, 100, begun) is begun
    assert begun == b"x" * 10
