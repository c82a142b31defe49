"""Many fuzzed frames in one transfer against the receiving state machine: none is ever taken for what was sent.

Mutations know the format: damaged bytes, cuts, other payloads, honestly sealed forgeries, repetitions, frames of other
transfers, other messages. What may be accepted is known: what is byte for byte what was sent. A transfer is whole only
if all of its frames are, and then the memory is right; what else was let in is found by the digest of the whole.
"""

import random
from collections import Counter

import msgspec

from prfaas.errors import DamagedError, PeerError, ProtocolError, UnreachableError
from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, Address, FrameHeader, Kind, seal
from prfaas.wire.receive_ledger import ReceiveLedger
from prfaas.wire.transfer import Abort, Done, message_frame

from ..unit.wire.wire_bench import MANIFEST, Receiver, Sent, data_frame, header_of, sent

FRAMES = 200_000
SENT = [sent(seed, cuts) for seed, cuts in enumerate([[], [5], [3, 10], [4, 7, 9]])]
ADDRESSES = [
    Address("f" * 32, MANIFEST.epoch),
    *(MANIFEST.address._replace(epoch=MANIFEST.epoch + by) for by in (-1, 1)),
]
FIELDS = {
    "group": 16,
    "layer": 16,
    "start_token": 32,
    "tokens": 32,
    "sequence": 32,
    "codec": 8,
    "flags": 8,
    "payload_bytes": 10,
}
MESSAGES = [
    message_frame(Kind.DONE, MANIFEST.address, Done(frames=3, payload_bytes=9, digest="0" * 32)),
    *(message_frame(kind, MANIFEST.address) for kind in (Kind.DONE, Kind.KEEP_ALIVE, Kind.ABORT, Kind.HELLO)),
    message_frame(Kind.ABORT, MANIFEST.address, Abort("no more")),
    *(seal(FrameHeader(kind, MANIFEST.address, 0)).header for kind in (Kind.ACK, Kind.FREED, Kind.WELCOME)),
]


def damage(rng: random.Random, transfer: Sent, frame: bytes) -> bytes:
    """What a bad link does."""
    changed, at, other = bytearray(frame), rng.randrange(len(frame)), rng.randrange(len(frame))
    match rng.randrange(5):
        case 0:
            changed[at] ^= 1 << rng.randrange(8)
        case 1:
            changed[at], changed[other] = changed[other], changed[at]
        case 2:
            return frame[:at]
        case 3:
            return frame[:HEADER_BYTES] + rng.choice(transfer.frames)[HEADER_BYTES:]
        case _:
            return rng.randbytes(len(frame))
    return bytes(changed)


def forge(rng: random.Random, transfer: Sent, frame: bytes) -> bytes:
    """What a peer can send that knows the protocol: everything is honestly sealed."""
    header, payload = header_of(frame), bytearray(frame[HEADER_BYTES:])
    match rng.randrange(5):
        case 0:
            name = rng.choice(["kind", *FIELDS])
            value = rng.randrange(14) if name == "kind" else rng.randrange(1 << rng.randint(1, FIELDS[name]))
            return seal(header._replace(**{name: value}), [payload]).header + payload
        case 1:
            return data_frame(header._replace(address=rng.choice(ADDRESSES)), bytes(payload))
        case 2 if payload:
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
            return data_frame(header, bytes(payload))
        case 3:
            return rng.choice(MESSAGES)
        case _:
            return rng.choice(transfer.frames)


def done_in(frame: bytes) -> Done:
    return msgspec.json.decode(frame[HEADER_BYTES:], type=Done)


class Session:
    """One transfer, fuzzed until it breaks or is through; counts what became of the fuzzed frames."""

    def __init__(self, rng: random.Random, found: Counter[str], destination: Receiver):
        self.rng, self.found, self.destination = rng, found, destination
        self.transfer = rng.choice(SENT)
        self.done = done_in(self.transfer.frames[-1])
        self.strange = 0
        """Accepted frames that were never sent and changed something."""
        self.wrong = 0
        """Those of them that say more than another time in an account that agrees."""

    def run(self, forgeries: float) -> None:
        rng, transfer = self.rng, self.transfer
        for frame in rng.sample(transfer.frames, len(transfer.frames)):
            for _ in range(rng.randrange(12)):
                mutate = forge if rng.random() < forgeries else damage
                if not self.throw(mutate(rng, transfer, frame)):
                    return
            if not self.take_honest(frame):
                return
        self.end()

    def take_honest(self, frame: bytes) -> bool:
        """Let the destination have an honest frame, unless it came fuzzed; False if that ended the transfer."""
        header = header_of(frame)
        arrived = {number for first, end in self.destination.ledger.received for number in range(first, end)}
        if header.kind in DATA_KINDS and header.sequence in arrived:
            return True
        try:
            self.destination.take(frame)
        except ProtocolError:
            assert self.strange, "an honest frame was refused, and nothing strange had come"
            return False
        return True

    def throw(self, frame: bytes) -> bool:
        """Let the destination have a fuzzed frame; False if that ended the transfer."""
        ledger = self.destination.ledger
        before = ledger.received_bytes, ledger.done
        try:
            self.destination.take(frame, connection=1)
        except (DamagedError, UnreachableError) as error:
            self.found[type(error).__name__] += 1
            ledger.lost(1)
            return True
        except PeerError:
            self.found["refused"] += 1
            if ledger.whole:  # it was before
                self.end()
            return False
        kind = header_of(frame).kind
        done = done_in(frame) if kind == Kind.DONE else None
        is_as_sent = frame in self.transfer.frames or kind == Kind.KEEP_ALIVE or done == self.done
        self.found["accepted: was sent" if is_as_sent else "accepted: the end will show"] += 1
        if before != (ledger.received_bytes, ledger.done) and not is_as_sent:
            agrees = done is not None and msgspec.structs.astuple(done)[:3] == msgspec.structs.astuple(self.done)[:3]
            self.strange, self.wrong = self.strange + 1, self.wrong + (not agrees)
        return True

    def end(self) -> None:
        self.destination.ledger.require_whole()
        assert self.destination.memory == self.transfer.memory
        assert not self.wrong
        self.found["(whole, memory right)"] += 1


def test_of_all_fuzzed_frames_none_is_accepted_wrongly():
    rng, found = random.Random(20261121), Counter[str]()
    while found.total() < FRAMES:
        Session(rng, found, Receiver()).run(forgeries=rng.choice((0.0, 0.03, 0.3)))
    print(*(f"{count:9,d} {what}" for what, count in found.most_common()), sep="\n")
    assert found["(whole, memory right)"] > 400
    assert (
        min(found[what] for what in ("DamagedError", "UnreachableError", "refused", "accepted: the end will show"))
        > 100
    )


class Blind(ReceiveLedger):
    """Looks at no digest."""

    def accept(self, header, payload, land=lambda: None):
        super().accept(header._replace(digest=seal(header, payload).digest), payload, land)

    def _compare(self):
        """Find everything right."""


def test_the_fuzzing_finds_a_destination_that_does_not_look_at_digests():
    rng, wrong = random.Random(1), 0
    for _ in range(200):
        careless = Receiver()
        careless.ledger = Blind(MANIFEST)
        try:
            Session(rng, Counter(), careless).run(forgeries=0.0)
        except (AssertionError, ProtocolError):
            wrong += 1
    assert wrong > 5
