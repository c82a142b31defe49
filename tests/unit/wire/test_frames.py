"""Frames of the data port: what is packed is read back, and bytes that are no frame of ours are refused."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import DamagedError, ProtocolError
from prfaas.wire.frames import (
    HEADER_BYTES,
    MAX_DATA_BYTES,
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    Address,
    FrameHeader,
    Kind,
    parse_header,
    seal,
    verify,
    whole_digest,
)
from prfaas.wire.transfer import (
    Abort,
    Done,
    Hello,
    LayerGroup,
    Manifest,
    TensorLayout,
    Welcome,
    as_ranges,
    decode_message,
    in_ranges,
    message_frame,
)

ADDRESS = Address("0123456789abcdef" * 2, 7)

headers = st.builds(
    FrameHeader,
    kind=st.sampled_from([Kind.BLOCK, Kind.STATE]),
    address=st.builds(Address, st.binary(min_size=16, max_size=16).map(bytes.hex), st.integers(0, 2**64 - 1)),
    payload_bytes=st.integers(0, MAX_DATA_BYTES),
    group=st.integers(0, 2**16 - 1),
    layer=st.integers(0, 2**16 - 1),
    start_token=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 2**32 - 1),
    sequence=st.integers(0, 2**32 - 1),
    codec=st.integers(0, 2**8 - 1),
    flags=st.just(0),
    digest=st.just(0),
)


@given(headers, st.binary(max_size=64))
def test_a_sealed_header_reads_back_and_verifies(header: FrameHeader, payload: bytes):
    raw, digest = seal(header, [payload])
    found = parse_header(raw)
    assert len(raw) == HEADER_BYTES == 64
    assert found == header._replace(digest=digest)
    verify(found, [payload])


@given(headers, st.binary(min_size=2, max_size=64), st.data())
def test_the_digest_does_not_depend_on_how_the_payload_is_cut(header: FrameHeader, payload: bytes, data: st.DataObject):
    cut = data.draw(st.integers(0, len(payload)))
    assert seal(header, [payload]) == seal(header, [memoryview(payload)[:cut], bytearray(payload[cut:])])


@given(headers, st.binary(max_size=64), st.data())
def test_any_flipped_bit_of_header_or_payload_is_damage(header: FrameHeader, payload: bytes, data: st.DataObject):
    raw = bytearray(seal(header, [payload]).header + payload)
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedError):
        verify(parse_header(raw[:HEADER_BYTES]), [raw[HEADER_BYTES:]])


@given(headers, st.data())
def test_a_flipped_bit_of_the_header_is_noticed_before_anything_is_read_on_its_word(
    header: FrameHeader, data: st.DataObject
):
    raw = bytearray(seal(header).header)
    bit = data.draw(st.integers(0, 8 * (HEADER_BYTES - 8) - 1))  # all but the digest, which only judges
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedError):
        parse_header(raw)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_never_a_frame(raw: bytes):
    with pytest.raises(ProtocolError):
        verify(parse_header(raw), [])


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (Kind.BLOCK, MAX_DATA_BYTES),
        (Kind.STATE, MAX_DATA_BYTES),
        (Kind.HELLO, MAX_HELLO_BYTES),
        (Kind.WELCOME, MAX_MESSAGE_BYTES),
        (Kind.DONE, MAX_HELLO_BYTES),
        (Kind.ABORT, MAX_HELLO_BYTES),
        (Kind.KEEP_ALIVE, 0),
        (Kind.ACK, 0),
        (Kind.FREED, 0),
    ],
)
def test_a_payload_beyond_the_limit_of_its_kind_is_refused_before_it_is_read(kind: Kind, limit: int):
    assert parse_header(seal(FrameHeader(kind, ADDRESS, limit)).header).payload_bytes == limit
    with pytest.raises(ProtocolError, match="are allowed"):
        parse_header(seal(FrameHeader(kind, ADDRESS, limit + 1)).header)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (FrameHeader(Kind.BLOCK, ADDRESS, 0, flags=1), "unknown flags"),
        (FrameHeader(Kind.BLOCK, ADDRESS, 0, flags=0x8001), "unknown flags"),
        (FrameHeader(0, ADDRESS, 0), "unknown kind"),  # type: ignore[arg-type]
        (FrameHeader(5, ADDRESS, 0), "unknown kind"),  # type: ignore[arg-type]  # version 2's hidden state
        (FrameHeader(200, ADDRESS, 0), "unknown kind"),  # type: ignore[arg-type]
    ],
)
def test_an_undamaged_header_of_a_later_protocol_is_refused(header: FrameHeader, why: str):
    with pytest.raises(ProtocolError, match=why) as caught:
        parse_header(seal(header).header)
    assert not isinstance(caught.value, DamagedError), "sending it again would not help"


def test_the_digest_over_all_depends_on_every_frame_and_on_their_order():
    assert whole_digest([1, 2]) == whole_digest(iter([1, 2]))
    assert len({whole_digest(digests) for digests in ([], [1], [1, 2], [2, 1], [1, 2, 3], [1, 2, 0])}) == 6


def test_messages_come_back_as_they_were():
    manifest = Manifest(
        fingerprint="f" * 64,
        transfer_id=ADDRESS.transfer_id,
        epoch=ADDRESS.epoch,
        start_token=3,
        end_token=9,
        groups=(LayerGroup("attention", (3,), (TensorLayout("latent", ("token", "row"), (64,), "float32"),)),),
    )
    messages: list[tuple[Kind, msgspec.Struct]] = [
        (Kind.HELLO, Hello(token="secret", connection=3, broken=(1, 2), received=((0, 5), (7, 8)))),
        (Kind.WELCOME, Welcome(version=3, manifest=manifest)),
        (Kind.DONE, Done(frames=3, payload_bytes=5, digest="0" * 32, prefill_seconds=0.5, first_byte_seconds=0.125)),
        (Kind.ABORT, Abort("out of memory")),
    ]
    for kind, message in messages:
        raw = message_frame(kind, ADDRESS, message)
        header, payload = parse_header(raw[:HEADER_BYTES]), raw[HEADER_BYTES:]
        verify(header, [payload])
        assert header.payload_bytes == len(payload)
        assert decode_message(header, payload, type(message)) == message  # type: ignore[type-var]


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"{}", b'{"token": 1}', b"\xff\xfe", b'{"token": "\\ud800"}', b'{"x":' + b"[" * 9999]
)
def test_a_payload_that_is_no_such_message_is_a_protocol_error(payload: bytes):
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_message(FrameHeader(Kind.HELLO, ADDRESS, len(payload)), payload, Hello)


def test_a_reason_longer_than_allowed_is_no_message():
    frame = message_frame(Kind.ABORT, ADDRESS, Abort("x" * 4097))
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_message(parse_header(frame[:HEADER_BYTES]), frame[HEADER_BYTES:], Abort)


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_exactly_the_numbers_they_were_made_of(numbers: set[int]):
    ranges = as_ranges(numbers)
    assert {number for number in range(62) if in_ranges(number, ranges)} == numbers
    assert all(end < after for (_, end), (after, _) in itertools.pairwise(ranges)), "no two ranges touch"
