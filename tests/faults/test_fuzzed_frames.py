"""Many fuzzed frames against the receiving state machine: none is ever taken for what was sent.

Mutations know the format: bits and bytes of header and payload, header fields with an honest seal, payloads with an
honest seal, cuts, repetitions, frames of other transfers, other messages. What may be accepted is known: what is
byte for byte what was sent. A transfer counts as whole only if all of its frames are, and then the memory is
right; whatever else was let in by itself is found by the digest over all.
"""

import random
from collections import Counter
from collections.abc import Callable

import msgspec

from prfaas.errors import DamagedError, PeerError, ProtocolError, UnreachableError
from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, Address, FrameHeader, Kind, seal
from prfaas.wire.receive_ledger import ReceiveLedger
from prfaas.wire.transfer import Abort, Done, message_frame

from ..unit.wire.wire_bench import MANIFEST, Receiver, Sent, data_frame, header_of, sent

FRAMES = 500_000
SENT = [sent(seed, cuts) for seed, cuts in enumerate([[], [5], [3, 10], [4, 7, 9]])]
OTHER = Address("f" * 32, MANIFEST.epoch)

Mutation = Callable[[random.Random, Sent, bytes], bytes]


def flip_bit(rng: random.Random, _sent: Sent, frame: bytes) -> bytes:
    damaged = bytearray(frame)
    at = rng.randrange(8 * len(frame))
    damaged[at >> 3] ^= 1 << (at & 7)
    return bytes(damaged)


def flip_header_byte(rng: random.Random, _sent: Sent, frame: bytes) -> bytes:
    at = rng.randrange(HEADER_BYTES)
    return frame[:at] + bytes([frame[at] ^ rng.randrange(1, 256)]) + frame[at + 1 :]


def swap_bytes(rng: random.Random, _sent: Sent, frame: bytes) -> bytes:
    """Reordered within the stream; the same bytes may come out."""
    damaged = bytearray(frame)
    one, other = rng.randrange(len(frame)), rng.randrange(len(frame))
    damaged[one], damaged[other] = damaged[other], damaged[one]
    return bytes(damaged)


def cut(rng: random.Random, _sent: Sent, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))]


def graft(rng: random.Random, transfer: Sent, frame: bytes) -> bytes:
    """One frame's header on another's payload."""
    return frame[:HEADER_BYTES] + rng.choice(transfer.frames)[HEADER_BYTES:]


def noise(rng: random.Random, _sent: Sent, frame: bytes) -> bytes:
    return rng.randbytes(len(frame))


FIELDS: list[tuple[str, int]] = [
    ("group", 16),
    ("layer", 16),
    ("start_token", 32),
    ("tokens", 32),
    ("sequence", 32),
    ("codec", 8),
    ("flags", 8),
    ("payload_bytes", 10),
    ("kind", 0),
]


def forge_field(rng: random.Random, _sent: Sent, frame: bytes) -> bytes:
    """Another value in a field, honestly sealed: what only somebody who knows the protocol can do."""
    header, payload = header_of(frame), frame[HEADER_BYTES:]
    name, bits = rng.choice(FIELDS)
    value = rng.randrange(14) if name == "kind" else rng.randrange(1 << rng.randint(1, bits))
    return seal(header._replace(**{name: value}), [payload]).header + payload


def forge_address(rng: random.Random, _sent: Sent, frame: bytes) -> bytes:
    header = header_of(frame)
    address = rng.choice([OTHER, MANIFEST.address._replace(epoch=MANIFEST.epoch + rng.choice((-1, 1)))])
    return data_frame(header._replace(address=address), frame[HEADER_BYTES:])


def forge_payload(rng: random.Random, _sent: Sent, frame: bytes) -> bytes:
    payload = bytearray(frame[HEADER_BYTES:])
    if payload:
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    return data_frame(header_of(frame), bytes(payload))


def repeat(rng: random.Random, transfer: Sent, _frame: bytes) -> bytes:
    """A frame that may have come already, or comes too early."""
    return rng.choice(transfer.frames)


MESSAGES = [
    message_frame(Kind.DONE, MANIFEST.address, Done(frames=3, payload_bytes=9, digest="0" * 32)),
    message_frame(Kind.DONE, MANIFEST.address),
    message_frame(Kind.KEEP_ALIVE, MANIFEST.address),
    message_frame(Kind.ABORT, MANIFEST.address),
    message_frame(Kind.ABORT, MANIFEST.address, Abort("no more")),
    message_frame(Kind.HELLO, MANIFEST.address),
    *(seal(FrameHeader(kind, MANIFEST.address, 0)).header for kind in (Kind.ACK, Kind.FREED, Kind.WELCOME)),
]


def other_message(rng: random.Random, _sent: Sent, _frame: bytes) -> bytes:
    return rng.choice(MESSAGES)


DAMAGE: list[Mutation] = [flip_bit, flip_header_byte, swap_bytes, cut, graft, noise]
FORGERY: list[Mutation] = [forge_field, forge_address, forge_payload, repeat, other_message]


def decoded(frame: bytes) -> Done:
    return msgspec.json.decode(frame[HEADER_BYTES:], type=Done)


def account(done: Done) -> tuple[int, int, str]:
    return done.frames, done.payload_bytes, done.digest


class Session:
    """One transfer, fuzzed until it breaks or is through; counts what became of the fuzzed frames."""

    def __init__(self, rng: random.Random, found: Counter[str]):
        self.rng = rng
        self.found = found
        self.transfer = rng.choice(SENT)
        self.originals = frozenset(self.transfer.frames)
        self.done = decoded(self.transfer.frames[-1])
        self.destination = Receiver()
        self.strange = 0
        """Accepted frames that were never sent and changed something."""
        self.wrong = 0
        """Those of them that say more than another time in an account that agrees."""

    def run(self, forgeries: float) -> None:
        rng, transfer = self.rng, self.transfer
        for frame in rng.sample(transfer.frames, len(transfer.frames)):
            for _ in range(rng.randrange(12)):
                mutations = FORGERY if rng.random() < forgeries else DAMAGE
                if not self.throw(rng.choice(mutations)(rng, transfer, frame)):
                    return
            if not self.go_on(frame):
                return
        self.end()

    def go_on(self, frame: bytes) -> bool:
        """Let the destination have an honest frame, unless it came fuzzed; False if that ended the transfer."""
        header = header_of(frame)
        if header.kind in DATA_KINDS and header.sequence in self.arrived:
            return True
        try:
            self.destination.take(frame)
        except ProtocolError:
            assert self.strange, "an honest frame was refused, and nothing strange had come"
            self.found["(transfers refused at an honest frame, for something strange came before)"] += 1
            return False
        return True

    @property
    def arrived(self) -> set[int]:
        return {number for first, end in self.destination.ledger.received for number in range(first, end)}

    def throw(self, frame: bytes) -> bool:
        """Let the destination have a fuzzed frame; False if that ended the transfer."""
        before = self.destination.ledger.received_bytes, self.destination.ledger.done
        try:
            self.destination.take(frame, connection=1)
        except (DamagedError, UnreachableError) as error:
            self.found[type(error).__name__] += 1
            self.destination.ledger.lost(1)
            return True
        except PeerError as error:
            self.found[reason_of(error)] += 1
            if self.destination.ledger.whole:  # it was before
                self.end()
            return False
        was_sent = frame in self.originals or self.says_what_was_said(frame)
        self.found["accepted: was sent" if was_sent else "accepted: the end will show"] += 1
        changed = before != (self.destination.ledger.received_bytes, self.destination.ledger.done)
        if changed and not was_sent:
            self.strange += 1
            self.wrong += header_of(frame).kind != Kind.DONE or account(decoded(frame)) != account(self.done)
        return True

    def says_what_was_said(self, frame: bytes) -> bool:
        """Whether this is a message that means what the honest one does: other fields of its header mean nothing, nor
        do fields of its JSON that nobody knows.
        """
        kind = header_of(frame).kind
        return kind == Kind.KEEP_ALIVE or (kind == Kind.DONE and decoded(frame) == self.done)

    def end(self) -> None:
        self.destination.ledger.require_whole()
        assert self.destination.memory == self.transfer.memory
        assert not self.wrong
        self.found["(transfers whole, memory right)"] += 1


REASONS = (
    "after an error", "stale or foreign", "repeats sequence number", "outside of tokens", "overlaps",
    "was sent before", "no such", "the group has layers", "codec", "the manifest says", "are allowed", "unknown",
    "no place here", "cannot be read", "gave up", "carries no cache", "the source counted", "digest over all",
)  # fmt: skip


def reason_of(error: PeerError) -> str:
    return next(reason for reason in REASONS if reason in str(error))


def fuzz(seed: int, frames: int) -> Counter[str]:
    rng, found = random.Random(seed), Counter[str]()
    while sum(count for what, count in found.items() if not what.startswith("(")) < frames:
        for _ in range(100):
            Session(rng, found).run(forgeries=rng.choice((0.0, 0.03, 0.3)))
    return found


def test_of_all_fuzzed_frames_none_is_accepted_wrongly():
    found = fuzz(20261121, FRAMES)
    print(*(f"{count:9,d} {what}" for what, count in found.most_common()), sep="\n")
    assert {reason for reason in REASONS if not found[reason]} <= {"after an error", "carries no cache"}
    assert found["(transfers whole, memory right)"] > 1000


class Blind(ReceiveLedger):
    """Looks at no digest."""

    def accept(self, header, payload, land=lambda: None):
        super().accept(header._replace(digest=seal(header, payload).digest), payload, land)

    def _compare(self):
        """Find everything right."""


def test_the_fuzzing_finds_a_destination_that_does_not_look_at_digests(monkeypatch):
    class Careless(Receiver):
        def __init__(self) -> None:
            super().__init__()
            self.ledger = Blind(MANIFEST)

    monkeypatch.setitem(globals(), "Receiver", Careless)
    rng, wrong = random.Random(1), 0
    for _ in range(200):
        session = Session(rng, Counter())
        try:
            session.run(forgeries=0.0)
        except (AssertionError, ProtocolError):
            wrong += 1
    assert wrong > 5


def test_a_manifest_in_which_anything_was_changed_is_refused():
    rng = random.Random(5)
    honest = msgspec.json.encode(MANIFEST)
    for _ in range(5000):
        payload = bytearray(honest)
        for _ in range(rng.randint(1, 3)):
            payload[rng.randrange(len(payload))] = rng.randrange(32, 127)
        try:
            found = msgspec.json.decode(bytes(payload), type=type(MANIFEST))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if found == MANIFEST:
            continue
        ledger = ReceiveLedger(MANIFEST)
        try:
            ledger.require_manifest(found)
        except ProtocolError:
            assert not ledger.whole
        else:
            raise AssertionError(payload)
