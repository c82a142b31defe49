"""The receiving state machine: in any order it ends whole with exactly the sent bytes, or it says that it did not.

Faults are put into a complete stream of frames: whatever is repeated, left out, cut, damaged, stale or foreign, nothing
is ever taken for whole.
"""

import itertools
import random
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import PeerError, ProtocolError
from prfaas.wire.receipt import Hidden, Note, Receipt, Rows, State
from prfaas.wire.transfer import (
    HEADER_BYTES,
    Done,
    Failure,
    FrameHeader,
    Kind,
    LayerGroup,
    Manifest,
    TensorLayout,
    message_frame,
    parse_header,
    seal,
)

MANIFEST = Manifest(
    fingerprint="a" * 64,
    transfer_id="0123456789abcdef" * 2,
    epoch=41,
    start_token=2,
    end_token=11,
    groups=(
        LayerGroup(
            "linear",
            (0, 1),
            (
                TensorLayout("recurrent", ("head", "key"), (2, 2), "float32"),
                TensorLayout("conv", ("tap",), (3,), "bfloat16"),
            ),
        ),
        LayerGroup("attention", (2, 3), (TensorLayout("latent", ("token", "row"), (3,), "bfloat16"),)),
    ),
    hidden_size=4,
)


class Sent(NamedTuple):
    """A stream as list of whole frames, and the memory that a receiver must end with."""

    frames: list[bytes]
    memory: dict[object, bytes]


def data_frame(header: FrameHeader, payload: bytes) -> bytes:
    header = header._replace(payload_bytes=len(payload))
    return seal(header, [payload]) + payload


def block(layer: int, start: int, payload: bytes) -> bytes:
    header = FrameHeader(Kind.BLOCK, MANIFEST.address, 0, 1, layer, start, len(payload) // 6)
    return data_frame(header, payload)


def sent(seed: int, cuts: list[int]) -> Sent:
    """A complete transfer with random content, the token range cut at `cuts`."""
    rng = random.Random(seed)
    frames = [message_frame(Kind.MANIFEST, MANIFEST.address, MANIFEST)]
    memory: dict[object, bytes] = {}
    edges = [2, *sorted(cuts), 11]
    for start, end in itertools.pairwise(edges):
        for layer in (2, 3):
            frames.append(block(layer, start, rows := rng.randbytes(6 * (end - start))))
            memory |= {(layer, start + token): rows[6 * token : 6 * token + 6] for token in range(end - start)}
    for layer in (0, 1):
        memory[layer] = rng.randbytes(22)
        frames.append(data_frame(FrameHeader(Kind.STATE, MANIFEST.address, 0, 0, layer), memory[layer]))
    memory["hidden"] = rng.randbytes(16)
    frames.append(data_frame(FrameHeader(Kind.HIDDEN, MANIFEST.address, 0), memory["hidden"]))
    total = sum(map(len, memory.values()))
    done = Done(payload_bytes=total, prefill_seconds=2.0, first_byte_seconds=0.5)
    frames += [message_frame(Kind.KEEP_ALIVE, MANIFEST.address), message_frame(Kind.DONE, MANIFEST.address, done)]
    return Sent(frames, memory)


class Receiver:
    """What a shell does, on bytes instead of a socket."""

    def __init__(self, expected: Manifest = MANIFEST):
        self.receipt = Receipt(expected)
        self.memory: dict[object, bytes] = {}

    def take(self, frame: bytes) -> None:
        header, payload = parse_header(frame[:HEADER_BYTES]), frame[HEADER_BYTES:]
        place = self.receipt.claim(header)
        if len(payload) != header.payload_bytes:
            raise ProtocolError("cut")
        match place:
            case Rows(_, layer, start, tokens):
                self.memory |= {(layer, start + at): payload[6 * at : 6 * at + 6] for at in range(tokens)}
            case State(_, layer):
                self.memory[layer] = payload
            case Hidden():
                self.memory["hidden"] = payload
            case Note():
                pass
        self.receipt.accept(header, [payload])

    def take_all(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self.take(frame)


cut_points = st.lists(st.integers(3, 10), unique=True, max_size=4)
transfers = st.builds(sent, st.integers(0, 2**32), cut_points)
COMPLETE = sent(1, [4, 9])


@given(transfers, st.randoms())
def test_frames_in_any_order_end_whole_with_exactly_the_sent_bytes(transfer: Sent, rng: random.Random):
    rng.shuffle(transfer.frames)
    receiver = Receiver()
    needed_left = len(transfer.frames) - 1  # all but the keep-alive
    for frame in transfer.frames:
        assert receiver.receipt.whole == (needed_left == 0)
        receiver.take(frame)
        needed_left -= parse_header(frame[:HEADER_BYTES]).kind != Kind.KEEP_ALIVE
    assert receiver.receipt.require_whole().prefill_seconds == 2.0
    assert receiver.memory == transfer.memory


@given(transfers, st.data())
def test_a_frame_that_comes_twice_is_refused(transfer: Sent, data: st.DataObject):
    repeatable = [f for f in transfer.frames if parse_header(f[:HEADER_BYTES]).kind != Kind.KEEP_ALIVE]
    twice = data.draw(st.sampled_from(repeatable))
    receiver = Receiver()
    receiver.take(twice)
    with pytest.raises(ProtocolError, match=r"before|overlaps"):
        receiver.take(twice)
    assert not receiver.receipt.whole


@given(transfers, st.data())
def test_a_frame_left_out_is_named_as_missing(transfer: Sent, data: st.DataObject):
    needed = [f for f in transfer.frames if parse_header(f[:HEADER_BYTES]).kind != Kind.KEEP_ALIVE]
    lost = data.draw(st.sampled_from(needed))
    receiver = Receiver()
    for frame in transfer.frames:
        if frame is not lost:
            receiver.take(frame)
    assert receiver.receipt.missing()
    with pytest.raises(ProtocolError, match="nothing of it is used"):
        receiver.receipt.require_whole()


@given(transfers, st.data())
def test_a_stream_with_one_flipped_bit_is_never_whole(transfer: Sent, data: st.DataObject):
    at = data.draw(st.integers(0, len(transfer.frames) - 1))
    damaged = bytearray(transfer.frames[at])
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    receiver = Receiver()
    frames = [*transfer.frames[:at], bytes(damaged), *transfer.frames[at + 1 :]]
    with pytest.raises(ProtocolError):
        receiver.take_all(frames)
    assert not receiver.receipt.whole


@given(transfers, st.data())
def test_a_stream_that_is_cut_anywhere_is_never_whole(transfer: Sent, data: st.DataObject):
    receiver = Receiver()
    receiver.take_all(transfer.frames[: data.draw(st.integers(0, len(transfer.frames) - 1))])
    assert not receiver.receipt.whole


def readdressed(frame: bytes, **changes: object) -> bytes:
    """The same frame, honestly sealed, for another transfer or epoch."""
    header = parse_header(frame[:HEADER_BYTES])
    return data_frame(header._replace(address=header.address._replace(**changes)), frame[HEADER_BYTES:])


@pytest.mark.parametrize("at", range(len(COMPLETE.frames)))
@pytest.mark.parametrize("changes", [{"epoch": 40}, {"epoch": 42}, {"transfer_id": "f" * 32}])
def test_a_frame_of_another_epoch_or_transfer_is_refused(at: int, changes: dict[str, object]):
    receiver = Receiver()
    with pytest.raises(ProtocolError, match="stale or foreign"):
        receiver.take(readdressed(COMPLETE.frames[at], **changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "b" * 64),
        ("hidden_size", 5),
        ("end_token", 12),
        ("groups", MANIFEST.groups[:1]),
        ("groups", (MANIFEST.groups[0], msgspec.structs.replace(MANIFEST.groups[1], layers=(3, 2)))),
    ],
)
def test_a_manifest_that_differs_in_any_field_is_refused_and_the_field_named(field: str, value: object):
    theirs = msgspec.structs.replace(MANIFEST, **{field: value})
    with pytest.raises(ProtocolError, match=f"manifest field {field}"):
        Receiver().take(message_frame(Kind.MANIFEST, MANIFEST.address, theirs))


def test_swapped_axis_names_of_equal_length_are_refused():
    tensors = MANIFEST.groups[0].tensors
    swapped = msgspec.structs.replace(tensors[0], axes=("key", "head"))
    groups = (msgspec.structs.replace(MANIFEST.groups[0], tensors=(swapped, tensors[1])), MANIFEST.groups[1])
    theirs = msgspec.structs.replace(MANIFEST, groups=groups)
    with pytest.raises(ProtocolError, match="manifest field groups"):
        Receiver().take(message_frame(Kind.MANIFEST, MANIFEST.address, theirs))


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
        (data_frame(FrameHeader(Kind.STATE, MANIFEST.address, 0, 0, 0), bytes(21)), "the manifest says 22"),
        (data_frame(FrameHeader(Kind.HIDDEN, MANIFEST.address, 0), bytes(20)), "the manifest says 16"),
        (message_frame(Kind.HELLO, MANIFEST.address), "never to one"),
        (message_frame(Kind.ACK, MANIFEST.address), "never to one"),
    ],
)
def test_a_frame_that_the_manifest_has_no_place_for_is_refused(frame: bytes, why: str):
    with pytest.raises(ProtocolError, match=why):
        Receiver().take(frame)


@pytest.mark.parametrize(("start", "tokens"), [(4, 1), (3, 2), (5, 2), (2, 9), (4, 3)])
def test_rows_that_overlap_earlier_rows_are_refused(start: int, tokens: int):
    receiver = Receiver()
    receiver.take(block(2, 4, bytes(12)))
    receiver.take(block(3, start, bytes(6 * tokens)))  # another layer's rows are another place
    with pytest.raises(ProtocolError, match="overlaps"):
        receiver.take(block(2, start, bytes(6 * tokens)))


def test_after_an_error_nothing_is_taken_any_more():
    receiver = Receiver()
    with pytest.raises(ProtocolError):
        receiver.take(block(2, 1, bytes(6)))
    for frame in COMPLETE.frames:
        with pytest.raises(ProtocolError, match="after an error"):
            receiver.take(frame)
    assert not receiver.receipt.whole


def test_a_sender_that_gives_up_is_quoted():
    receiver = Receiver()
    with pytest.raises(PeerError, match="gave up: out of memory"):
        receiver.take(message_frame(Kind.ERROR, MANIFEST.address, Failure("out of memory")))
    assert not receiver.receipt.whole


def test_a_sender_that_counted_other_bytes_is_not_believed():
    receiver = Receiver()
    for frame in COMPLETE.frames[:-1]:
        receiver.take(frame)
    wrong = Done(payload_bytes=1, prefill_seconds=1.0, first_byte_seconds=0.1)
    receiver.take(message_frame(Kind.DONE, MANIFEST.address, wrong))
    with pytest.raises(ProtocolError, match="the sender counted 1"):
        receiver.receipt.require_whole()


def test_a_transfer_without_rows_needs_states_and_hidden_only():
    manifest = msgspec.structs.replace(MANIFEST, start_token=11)
    receiver = Receiver(manifest)
    size = 22 + 22 + 16
    states = [
        frame for frame in COMPLETE.frames if parse_header(frame[:HEADER_BYTES]).kind in (Kind.STATE, Kind.HIDDEN)
    ]
    done = Done(payload_bytes=size, prefill_seconds=1.0, first_byte_seconds=0.1)
    for frame in [
        message_frame(Kind.MANIFEST, manifest.address, manifest),
        *states,
        message_frame(Kind.DONE, manifest.address, done),
    ]:
        receiver.take(frame)
    assert receiver.receipt.whole
