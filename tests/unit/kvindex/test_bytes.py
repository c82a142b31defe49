"""Byte hashes name prefixes of canonical bytes under a root, full blocks only."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvindex.bytes import BYTE_BLOCK, block_ends, byte_hashes


@given(st.binary(max_size=3 * BYTE_BLOCK), st.binary(max_size=3 * BYTE_BLOCK))
def test_requests_share_as_many_hashes_as_whole_blocks(one: bytes, other: bytes):
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    pairs = zip(byte_hashes(b"r", one), byte_hashes(b"r", other), strict=False)
    assert sum(a == b for a, b in pairs) == shared // BYTE_BLOCK


def test_a_prefix_has_the_same_names_as_the_whole():
    data = bytes(range(256)) * 5
    assert byte_hashes(b"r", data)[:3] == byte_hashes(b"r", data[: 3 * BYTE_BLOCK + 255])
    assert list(block_ends(byte_hashes(b"r", data))) == [256, 512, 768, 1024, 1280]


def test_the_names_are_the_same_in_every_process():
    assert byte_hashes(b"r", bytes(512)) == [6534363035357730721, 5065160816688345086]


def test_roots_share_no_name():
    data = bytes(1024)
    assert not set(byte_hashes(b"a", data)) & set(byte_hashes(b"b", data))


def test_like_blocks_at_different_places_have_different_names():
    assert len(set(byte_hashes(b"r", bytes(8 * BYTE_BLOCK)))) == 8
