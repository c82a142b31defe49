"""Complete transfers as lists of frames, made up byte by byte, and a destination that takes them from no socket."""

import itertools
import random
from collections.abc import Iterable
from typing import NamedTuple

from prfaas.errors import DamagedError, UnreachableError
from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, FrameHeader, Kind, parse_header, seal, whole_digest
from prfaas.wire.receive_ledger import CachePart, LayerRows, LayerState, ReceiveLedger
from prfaas.wire.transfer import Done, LayerGroup, Manifest, TensorLayout, message_frame

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
)
ROW_BYTES = 6
STATE_BYTES = 22


class Sent(NamedTuple):
    """A stream as list of whole frames, data first, then KEEP_ALIVE and DONE; and what a destination must end with."""

    frames: list[bytes]
    memory: dict[object, bytes]


def header_of(frame: bytes) -> FrameHeader:
    return parse_header(frame[:HEADER_BYTES])


def data_frame(header: FrameHeader, payload: bytes) -> bytes:
    header = header._replace(payload_bytes=len(payload))
    return seal(header, [payload]).header + payload


def block(layer: int, start: int, payload: bytes, sequence: int = 0) -> bytes:
    tokens = len(payload) // ROW_BYTES
    return data_frame(FrameHeader(Kind.BLOCK, MANIFEST.address, 0, 1, layer, start, tokens, sequence), payload)


def state(layer: int, payload: bytes, sequence: int = 0) -> bytes:
    return data_frame(FrameHeader(Kind.STATE, MANIFEST.address, 0, 0, layer, sequence=sequence), payload)


def done_of(frames: Iterable[bytes]) -> Done:
    """The account of these data frames."""
    headers = sorted((header_of(frame) for frame in frames), key=lambda header: header.sequence)
    return Done(
        frames=len(headers),
        payload_bytes=sum(header.payload_bytes for header in headers),
        digest=whole_digest(header.digest for header in headers),
        prefill_seconds=2.0,
        first_byte_seconds=0.5,
    )


def sent(seed: int, cuts: list[int]) -> Sent:
    """A complete transfer with random content, the token range cut at `cuts`."""
    rng, sequence = random.Random(seed), itertools.count()
    frames: list[bytes] = []
    memory: dict[object, bytes] = {}
    for start, end in itertools.pairwise([2, *sorted(cuts), 11]):
        for layer in (2, 3):
            frames.append(block(layer, start, rows := rng.randbytes(ROW_BYTES * (end - start)), next(sequence)))
            memory |= rows_at(layer, start, rows)
    for layer in (0, 1):
        memory[layer] = rng.randbytes(STATE_BYTES)
        frames.append(state(layer, memory[layer], next(sequence)))
    done = message_frame(Kind.DONE, MANIFEST.address, done_of(frames))
    return Sent([*frames, message_frame(Kind.KEEP_ALIVE, MANIFEST.address), done], memory)


def rows_at(layer: int, start: int, rows: bytes) -> dict[object, bytes]:
    tokens = len(rows) // ROW_BYTES
    return {(layer, start + at): rows[ROW_BYTES * at : ROW_BYTES * (at + 1)] for at in range(tokens)}


class Receiver:
    """What a shell does, on bytes instead of a socket: payloads land before it is known whether they are right."""

    def __init__(self, expected: Manifest = MANIFEST):
        self.ledger = ReceiveLedger(expected)
        self.memory: dict[object, bytes] = {}

    def take(self, frame: bytes, connection: int = 0) -> None:
        """Read one frame that came over a connection; a frame that ends early is a connection that ends."""
        header, payload = header_of(frame), frame[HEADER_BYTES:]
        if header.kind not in DATA_KINDS:
            self.ledger.note(header, payload)
            return
        place = self.ledger.claim(connection, header)
        if len(payload) != header.payload_bytes:
            raise UnreachableError("cut")
        self._write(place, payload)
        self.ledger.accept(header, [payload])

    def take_all(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self.take(frame)

    def take_or_break(self, frame: bytes, connection: int) -> bool:
        """The same; False if the connection is of no more use."""
        try:
            self.take(frame, connection)
        except (UnreachableError, DamagedError):
            self.ledger.lost(connection)
            return False
        return True

    def _write(self, place: CachePart, payload: bytes) -> None:
        match place:
            case LayerRows(_, layer, start, _):
                self.memory |= rows_at(layer, start, payload)
            case LayerState(_, layer):
                self.memory[layer] = payload
