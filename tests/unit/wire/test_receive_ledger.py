"""The receiving state machine: in any order it ends whole with exactly the sent bytes, or it says that it did not.

Faults are put into a complete stream of frames: whatever is repeated, left out, cut, damaged, stale or foreign, nothing
is ever taken for whole. Damage and breaks are mended by sending the frames again; whatever else is wrong is final.
"""

from contextlib import nullcontext

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import DamagedError, MismatchError, PeerError, ProtocolError, UnreachableError
from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, MAX_DATA_BYTES, FrameHeader, Kind, parse_header
from prfaas.wire.receive_ledger import LayerRows, LayerState, ReceiveLedger
from prfaas.wire.transfer import Abort, message_frame

from .wire_bench import (
    MANIFEST,
    ROW_BYTES,
    STATE_BYTES,
    Receiver,
    Sent,
    block,
    data_frame,
    done_of,
    header_of,
    sent,
    state,
)

cut_points = st.lists(st.integers(3, 10), unique=True, max_size=4)
transfers = st.builds(sent, st.integers(0, 2**32), cut_points)
COMPLETE = sent(1, [4, 9])


def is_needed(frame: bytes) -> bool:
    return header_of(frame).kind != Kind.KEEP_ALIVE


def is_data(frame: bytes) -> bool:
    return header_of(frame).kind in DATA_KINDS


@given(transfers, st.randoms())
def test_frames_in_any_order_end_whole_with_exactly_the_sent_bytes(transfer: Sent, rng):
    rng.shuffle(transfer.frames)
    destination = Receiver()
    needed_left = sum(map(is_needed, transfer.frames))
    for frame in transfer.frames:
        assert destination.ledger.whole == (needed_left == 0)
        destination.take(frame)
        needed_left -= is_needed(frame)
    assert destination.ledger.require_whole().prefill_seconds == 2.0
    assert destination.memory == transfer.memory
    assert destination.ledger.received == ((0, sum(map(is_data, transfer.frames))),)


@given(transfers, st.data())
def test_a_data_frame_that_comes_twice_is_refused(transfer: Sent, data: st.DataObject):
    twice = data.draw(st.sampled_from([frame for frame in transfer.frames if is_data(frame)]))
    destination = Receiver()
    destination.take(twice)
    with pytest.raises(ProtocolError, match="repeats sequence number"):
        destination.take(twice, connection=1)
    assert not destination.ledger.whole


@given(transfers, st.data())
def test_a_place_that_is_sent_twice_under_another_number_is_refused(transfer: Sent, data: st.DataObject):
    twice = data.draw(st.sampled_from([frame for frame in transfer.frames if is_data(frame)]))
    destination = Receiver()
    destination.take(twice)
    with pytest.raises(ProtocolError, match="before"):
        destination.take(data_frame(header_of(twice)._replace(sequence=1000), twice[HEADER_BYTES:]))
    assert not destination.ledger.whole


@given(transfers, st.data())
def test_a_frame_left_out_is_named_as_missing(transfer: Sent, data: st.DataObject):
    lost = data.draw(st.sampled_from([frame for frame in transfer.frames if is_needed(frame)]))
    destination = Receiver()
    destination.take_all(frame for frame in transfer.frames if frame is not lost)
    assert not destination.ledger.whole
    with pytest.raises(ProtocolError, match=r"without (rows|\d linear|DONE).*not used"):
        destination.ledger.require_whole()


@given(transfers, st.data())
def test_a_flipped_bit_is_noticed_and_mended_by_sending_the_frame_again(transfer: Sent, data: st.DataObject):
    at = data.draw(st.integers(0, len(transfer.frames) - 1))
    damaged = bytearray(transfer.frames[at])
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    destination = Receiver()
    destination.take_all(transfer.frames[:at])
    with pytest.raises(DamagedError):
        destination.take(bytes(damaged))
    destination.ledger.lost(0)
    assert not destination.ledger.whole or not is_needed(transfer.frames[at])
    for frame in transfer.frames[at:]:
        destination.take(frame, connection=1)
    destination.ledger.require_whole()
    assert destination.memory == transfer.memory


FIELDS = {"group": 16, "layer": 16, "start_token": 32, "tokens": 32, "sequence": 32, "codec": 8, "flags": 8}


@given(transfers, st.data())
def test_a_forged_frame_is_refused_or_never_whole(transfer: Sent, data: st.DataObject):
    """Another value in a field or in the payload, honestly sealed: what a peer that knows the protocol can send."""
    at = data.draw(st.integers(0, len(transfer.frames) - 1))
    header, payload = header_of(transfer.frames[at]), bytearray(transfer.frames[at][HEADER_BYTES:])
    field = data.draw(st.sampled_from(["payload", *FIELDS]))
    if field != "payload":
        header = header._replace(**{field: data.draw(st.integers(0, 2 ** FIELDS[field] - 1))})
    elif payload:
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    transfer.frames[at] = data_frame(header, bytes(payload))
    destination = Receiver()
    try:
        destination.take_all(transfer.frames)
        destination.ledger.require_whole()
    except ProtocolError:
        assert not destination.ledger.whole
    else:
        assert destination.memory == transfer.memory


@given(transfers, st.data())
def test_a_stream_that_is_cut_anywhere_is_never_whole(transfer: Sent, data: st.DataObject):
    destination = Receiver()
    at = data.draw(st.integers(0, len(transfer.frames) - 1))
    destination.take_all(transfer.frames[:at])
    last = transfer.frames[at]
    with pytest.raises((UnreachableError, DamagedError)):
        destination.take(last[: data.draw(st.integers(0, len(last) - 1))])
    assert not destination.ledger.whole


@pytest.mark.parametrize("frame", COMPLETE.frames[:-2])
def test_what_a_broken_connection_had_claimed_is_free_for_another_but_not_before(frame: bytes):
    ledger = ReceiveLedger(MANIFEST)
    position = ledger.claim(0, header_of(frame))
    ledger.lost(1)  # another connection's claims are its own
    ledger.lost(0)
    assert ledger.claim(2, header_of(frame)) == position
    with pytest.raises(ProtocolError, match="repeats"):
        ledger.claim(3, header_of(frame))
    assert ledger.received == ()


def test_what_arrived_by_a_connection_stays_when_it_breaks():
    destination = Receiver()
    destination.take_all(COMPLETE.frames[:3])
    destination.ledger.lost(0)
    assert destination.ledger.received == ((0, 3),)
    with pytest.raises(ProtocolError, match="repeats"):
        destination.take(COMPLETE.frames[1], connection=1)


def readdressed(frame: bytes, **changes: object) -> bytes:
    """The same frame, honestly sealed, for another transfer or epoch."""
    header = parse_header(frame[:HEADER_BYTES])
    return data_frame(header._replace(address=header.address._replace(**changes)), frame[HEADER_BYTES:])


@pytest.mark.parametrize("at", range(len(COMPLETE.frames)))
@pytest.mark.parametrize("changes", [{"epoch": 40}, {"epoch": 42}, {"transfer_id": "f" * 32}])
def test_a_frame_of_another_epoch_or_transfer_is_refused(at: int, changes: dict[str, object]):
    destination = Receiver()
    with pytest.raises(ProtocolError, match="stale or foreign"):
        destination.take(readdressed(COMPLETE.frames[at], **changes))
    assert destination.memory == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "b" * 64),
        ("start_token", 0),
        ("end_token", 12),
        ("epoch", 42),
        ("transfer_id", "f" * 32),
        ("prompt", "c" * 64),
        ("rank", 1),
        ("ranks", 2),
        ("groups", MANIFEST.groups[:1]),
        ("groups", (MANIFEST.groups[0], msgspec.structs.replace(MANIFEST.groups[1], layers=(3, 2)))),
    ],
)
def test_a_manifest_that_differs_in_any_field_is_refused_and_the_field_named(field: str, value: object):
    destination = Receiver()
    with pytest.raises(ProtocolError, match=f"manifest field {field}") as refused:
        destination.ledger.require_manifest(msgspec.structs.replace(MANIFEST, **{field: value}))
    is_a_mismatch = field in ("fingerprint", "groups", "rank", "ranks")
    assert isinstance(refused.value, MismatchError) == is_a_mismatch
    with pytest.raises(ProtocolError, match="after an error"):
        destination.take(COMPLETE.frames[0])


def test_of_groups_the_first_difference_is_named_with_both_values_and_a_long_one_is_cut():
    first, second = MANIFEST.groups
    unlike = msgspec.structs.replace(second, row_tokens=64, spec="s" * 1000)
    with pytest.raises(MismatchError, match=rf"field groups\[1\]\.row_tokens is 64, .* needs {second.row_tokens}:"):
        ReceiveLedger(MANIFEST).require_manifest(msgspec.structs.replace(MANIFEST, groups=(first, unlike)))
    unlike = msgspec.structs.replace(second, spec="s" * 1000)
    with pytest.raises(MismatchError) as refused:
        ReceiveLedger(MANIFEST).require_manifest(msgspec.structs.replace(MANIFEST, groups=(first, unlike)))
    assert len(str(refused.value)) < 400


def test_what_a_source_is_is_named_before_the_goal_and_the_shapes_that_follow_from_it():
    first, second = MANIFEST.groups
    tensors = tuple(msgspec.structs.replace(tensor, shape=(99,)) for tensor in second.tensors)
    groups = (first, msgspec.structs.replace(second, row_tokens=64, tensors=tensors))
    with pytest.raises(MismatchError, match=r"field groups\[1\]\.row_tokens is 64"):
        ReceiveLedger(MANIFEST).require_manifest(msgspec.structs.replace(MANIFEST, groups=groups, end_token=12))


@pytest.mark.parametrize(
    "changes", [{"axes": ("key", "head")}, {"name": "conv"}, {"dtype": "float16"}, {"shape": (4, 1)}]
)
def test_a_tensor_that_is_not_ours_in_name_axes_type_or_shape_is_refused(changes: dict[str, object]):
    tensors = MANIFEST.groups[0].tensors
    swapped = msgspec.structs.replace(tensors[0], **changes)
    groups = (msgspec.structs.replace(MANIFEST.groups[0], tensors=(swapped, tensors[1])), MANIFEST.groups[1])
    with pytest.raises(ProtocolError, match="manifest field groups"):
        ReceiveLedger(MANIFEST).require_manifest(msgspec.structs.replace(MANIFEST, groups=groups))


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (block(2, 1, bytes(12)), "outside"),
        (block(2, 10, bytes(12)), "outside"),
        (block(2, 5, b""), "outside"),
        (block(4, 5, bytes(6)), "the group has layers"),
        (data_frame(FrameHeader(Kind.BLOCK, MANIFEST.address, 0, 0, 0, 5, 1), bytes(6)), "no such attention group"),
        (data_frame(FrameHeader(Kind.BLOCK, MANIFEST.address, 0, 9, 2, 5, 1), bytes(6)), "no such attention group"),
        (data_frame(FrameHeader(Kind.STATE, MANIFEST.address, 0, 1, 2), bytes(22)), "no such linear group"),
        (data_frame(FrameHeader(Kind.BLOCK, MANIFEST.address, 0, 1, 2, 5, 1), bytes(7)), "the manifest says 6"),
        (state(0, bytes(21)), "the manifest says 22"),
        (data_frame(FrameHeader(Kind.STATE, MANIFEST.address, 0, codec=1), bytes(9)), "has codec 1"),
        (message_frame(Kind.HELLO, MANIFEST.address), "no place here"),
        (message_frame(Kind.WELCOME, MANIFEST.address), "no place here"),
        (message_frame(Kind.FREED, MANIFEST.address), "no place here"),
        (message_frame(Kind.DONE, MANIFEST.address), "cannot be read"),
    ],
)
def test_a_frame_that_the_manifest_has_no_place_for_is_refused(frame: bytes, why: str):
    destination = Receiver()
    with pytest.raises(ProtocolError, match=why):
        destination.take(frame)
    assert destination.memory == {}


@pytest.mark.parametrize(("start", "tokens"), [(4, 1), (3, 2), (5, 2), (2, 9), (4, 3)])
def test_rows_that_overlap_earlier_rows_are_refused(start: int, tokens: int):
    destination = Receiver()
    destination.take(block(2, 4, bytes(12), 0))
    destination.take(block(3, start, bytes(6 * tokens), 1))  # another layer's rows are another position
    with pytest.raises(ProtocolError, match="overlaps"):
        destination.take(block(2, start, bytes(6 * tokens), 2))


def test_takes_nothing_after_an_error():
    destination = Receiver()
    with pytest.raises(ProtocolError):
        destination.take(block(2, 1, bytes(6)))
    for frame in COMPLETE.frames:
        with pytest.raises(ProtocolError, match="after an error"):
            destination.take(frame)
    assert not destination.ledger.whole


@pytest.mark.parametrize(
    "late",
    [block(2, 1, bytes(6)), COMPLETE.frames[0], message_frame(Kind.HELLO, MANIFEST.address)],
    ids=["another frame", "a frame again", "a message out of place"],
)
def test_what_is_wrong_after_everything_arrived_is_refused_and_takes_nothing_back(late: bytes):
    destination = Receiver()
    destination.take_all(COMPLETE.frames)
    done = destination.ledger.require_whole()
    with pytest.raises(ProtocolError):
        destination.take(late)
    assert destination.ledger.require_whole() == done


def test_a_frame_that_was_on_its_way_when_another_was_wrong_makes_nothing_whole():
    destination = Receiver()
    *most, last = [frame for frame in COMPLETE.frames if is_needed(frame)]
    ledger = destination.ledger
    destination.take_all([*most[1:], last])
    header, payload = header_of(most[0]), most[0][HEADER_BYTES:]
    ledger.claim(0, header)
    with pytest.raises(ProtocolError):
        destination.take(block(2, 1, bytes(6)))
    ledger.accept(header, [payload])
    assert not ledger.whole


def test_a_source_that_gives_up_is_quoted():
    destination = Receiver()
    with pytest.raises(PeerError, match="gave up: out of memory"):
        destination.take(message_frame(Kind.ABORT, MANIFEST.address, Abort("out of memory")))
    assert not destination.ledger.whole


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"payload_bytes": 1}, "the source counted 6 of 1$"),
        ({"frames": 5}, "the source counted 5 of"),
        ({"digest": "0" * 32}, "digest over all frames"),
    ],
)
def test_a_source_that_counted_otherwise_is_not_believed(changes: dict[str, object], why: str):
    transfer = sent(1, [5])
    wrong = msgspec.structs.replace(done_of(transfer.frames[:-2]), **changes)
    done = message_frame(Kind.DONE, MANIFEST.address, wrong)
    for frames in ([*transfer.frames[:-1], done], [done, *transfer.frames[:-1]]):
        destination = Receiver()
        with pytest.raises(ProtocolError, match=why):
            destination.take_all(frames)
        assert not destination.ledger.whole
        with pytest.raises(ProtocolError, match="not used"):
            destination.ledger.require_whole()


def test_the_account_may_come_again_after_a_break_and_may_not_change():
    destination = Receiver()
    destination.take(COMPLETE.frames[-1], connection=0)
    destination.take(COMPLETE.frames[-1], connection=1)
    other = msgspec.structs.replace(done_of(COMPLETE.frames[:-2]), payload_bytes=3)
    with pytest.raises(ProtocolError, match="with other content"):
        destination.take(message_frame(Kind.DONE, MANIFEST.address, other))


def test_a_destination_that_has_every_row_needs_the_states_only():
    frames = [frame for frame in COMPLETE.frames if header_of(frame).kind == Kind.STATE]
    frames = [
        data_frame(header_of(frame)._replace(sequence=at), frame[HEADER_BYTES:]) for at, frame in enumerate(frames)
    ]
    destination = Receiver(msgspec.structs.replace(MANIFEST, start_token=MANIFEST.end_token))
    destination.take_all([*frames, message_frame(Kind.DONE, MANIFEST.address, done_of(frames))])
    assert destination.ledger.require_whole().frames == len(frames)
    refused = next(frame for frame in COMPLETE.frames if header_of(frame).kind == Kind.BLOCK)
    with pytest.raises(ProtocolError):
        destination.take(data_frame(header_of(refused)._replace(sequence=99), refused[HEADER_BYTES:]))


def test_an_agreed_codec_makes_a_payload_smaller_and_never_empty():
    ledger = ReceiveLedger(MANIFEST, codecs=(0, 1))
    for number, (header, place) in enumerate(
        [
            (FrameHeader(Kind.BLOCK, MANIFEST.address, 1, 1, 2, 5, 1), LayerRows(1, 2, 5, 1)),
            (FrameHeader(Kind.STATE, MANIFEST.address, STATE_BYTES - 1, 0, 1), LayerState(0, 1)),
        ]
    ):
        assert ledger.claim(0, header._replace(codec=1, sequence=number)) == place
    for size in (0, STATE_BYTES, STATE_BYTES + 1):
        with pytest.raises(ProtocolError, match="the manifest says"):
            ReceiveLedger(MANIFEST, codecs=(0, 1)).claim(
                0, FrameHeader(Kind.STATE, MANIFEST.address, size, 0, 1, codec=1)
            )


def test_refuses_a_frame_that_stands_for_more_than_a_frame_may_hold():
    """A reader takes memory for what a codec makes of them."""
    tokens = MAX_DATA_BYTES // ROW_BYTES
    expected = msgspec.structs.replace(MANIFEST, end_token=MANIFEST.start_token + tokens + 1)
    for count, refused in ((tokens, False), (tokens + 1, True)):
        ledger = ReceiveLedger(expected, codecs=(0, 1))
        header = FrameHeader(Kind.BLOCK, MANIFEST.address, 100, 1, 2, MANIFEST.start_token, count, codec=1)
        with pytest.raises(ProtocolError, match="stands for") if refused else nullcontext():
            ledger.claim(0, header)
