"""Frames of the data port: what is packed is read back, and bytes that are no frame of ours are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.wire.transfer import (
    HEADER_BYTES,
    MAX_DATA_BYTES,
    MAX_MESSAGE_BYTES,
    Address,
    Done,
    FrameHeader,
    Hello,
    Kind,
    LayerGroup,
    Manifest,
    TensorLayout,
    decode_message,
    message_frame,
    parse_header,
    seal,
    verify,
)

ADDRESS = Address("0123456789abcdef" * 2, 7)

headers = st.builds(
    FrameHeader,
    kind=st.sampled_from([Kind.BLOCK, Kind.STATE, Kind.HIDDEN]),
    address=st.builds(Address, st.binary(min_size=16, max_size=16).map(bytes.hex), st.integers(0, 2**64 - 1)),
    payload_bytes=st.integers(0, MAX_DATA_BYTES),
    group=st.integers(0, 2**8 - 1),
    layer=st.integers(0, 2**16 - 1),
    start_token=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 2**32 - 1),
    digest=st.just(0),
)


@given(headers, st.binary(max_size=64))
def test_a_sealed_header_reads_back_and_verifies(header: FrameHeader, payload: bytes):
    raw = seal(header, [payload])
    found = parse_header(raw)
    assert len(raw) == HEADER_BYTES
    assert found._replace(digest=0) == header
    verify(found, [payload])


@given(headers, st.binary(min_size=2, max_size=64), st.data())
def test_the_digest_does_not_depend_on_how_the_payload_is_cut(header: FrameHeader, payload: bytes, data: st.DataObject):
    cut = data.draw(st.integers(0, len(payload)))
    assert seal(header, [payload]) == seal(header, [memoryview(payload)[:cut], bytearray(payload[cut:])])


@given(headers, st.binary(max_size=64), st.data())
def test_any_flipped_bit_of_header_or_payload_is_noticed(header: FrameHeader, payload: bytes, data: st.DataObject):
    raw = bytearray(seal(header, [payload]) + payload)
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        verify(parse_header(raw[:HEADER_BYTES]), [raw[HEADER_BYTES:]])


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_never_a_frame(raw: bytes):
    with pytest.raises(ProtocolError):
        verify(parse_header(raw), [])


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (Kind.BLOCK, MAX_DATA_BYTES),
        (Kind.STATE, MAX_DATA_BYTES),
        (Kind.HELLO, MAX_MESSAGE_BYTES),
        (Kind.DONE, MAX_MESSAGE_BYTES),
        (Kind.KEEP_ALIVE, 0),
        (Kind.ACK, 0),
    ],
)
def test_a_payload_beyond_the_limit_of_its_kind_is_refused_before_it_is_read(kind: Kind, limit: int):
    assert parse_header(seal(FrameHeader(kind, ADDRESS, limit))).payload_bytes == limit
    with pytest.raises(ProtocolError, match="are allowed"):
        parse_header(seal(FrameHeader(kind, ADDRESS, limit + 1)))


def test_messages_come_back_as_they_were():
    manifest = Manifest(
        fingerprint="f" * 64,
        transfer_id=ADDRESS.transfer_id,
        epoch=ADDRESS.epoch,
        start_token=3,
        end_token=9,
        groups=(LayerGroup("attention", (3,), (TensorLayout("latent", ("token", "row"), (64,), "float32"),)),),
        hidden_size=128,
    )
    for kind, message in [
        (Kind.HELLO, Hello("secret")),
        (Kind.MANIFEST, manifest),
        (Kind.DONE, Done(payload_bytes=5, prefill_seconds=0.5, first_byte_seconds=0.125)),
    ]:
        raw = message_frame(kind, ADDRESS, message)
        header, payload = parse_header(raw[:HEADER_BYTES]), raw[HEADER_BYTES:]
        verify(header, [payload])
        assert header.payload_bytes == len(payload)
        assert decode_message(header, payload, type(message)) == message


@pytest.mark.parametrize("payload", [b"", b"{", b"{}", b'{"token": 1}', b"\xff\xfe"])
def test_a_payload_that_is_no_such_message_is_a_protocol_error(payload: bytes):
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_message(FrameHeader(Kind.HELLO, ADDRESS, len(payload)), payload, Hello)
