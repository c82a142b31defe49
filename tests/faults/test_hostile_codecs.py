"""A source that lies in its codecs: seals and counts its frames as it should, and puts into one of them what no encoder
makes. The destination refuses the transfer, uses nothing of it, and takes no more memory than its own tensors explain.
"""

import struct
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from prfaas.errors import ProtocolError
from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, Codec, FrameHeader, Kind, seal, whole_digest
from prfaas.wire.transfer import Done, decode_message, message_frame
from prfaas_transfer.compression import encode
from prfaas_transfer.limits import MemoryBudget
from prfaas_worker.cache.transfer_frames import CachePlace, layer_groups

from ..unit.codecs.test_hostile_payloads import run_block, zstd_frame
from ..unit.worker.transfer_bench import (
    LINEAR,
    TRAFFIC,
    WIDE,
    Model,
    Port,
    Taking,
    assert_same_bits,
    compute,
    transfer_threads,
)
from ..unit.worker.transfer_proxy import Proxy, Seen
from ..waiting import eventually

MODEL = Model((LINEAR, WIDE), 300)
ROWS = layer_groups(MODEL.layers)[1]
CHANNELS = ROWS.tensors[0].shape[0]
FRAME_BYTES = MODEL.tokens * ROWS.nbytes
LIMIT_BYTES = 64 << 20
BOMB_BYTES = 1 << 30
Payload = Callable[[int, memoryview], bytes]
"""Makes what travels for so many rows, and what they are."""


@pytest.fixture(scope="module")
def one_port() -> Port:
    return Port(MODEL)


@pytest.fixture
def port(one_port: Port) -> Iterator[Port]:
    one_port.renew()
    yield one_port
    one_port.settle()


def numbers() -> CachePlace:
    """A cache that codecs make smaller."""
    place, rng = MODEL.reserved(), torch.Generator().manual_seed(6)
    place.memory.rows(1)["latent"].normal_(generator=rng)
    for tensor in place.memory.states(0).values():
        tensor.normal_(generator=rng)
    return place


CACHE = numbers()


class Liar:
    """Changes the first BLOCK on its way down, and the account at the end so that it agrees."""

    def __init__(self, codec: int, payload: Payload):
        self._codec = codec
        self._payload = payload
        self._sent: dict[int, FrameHeader] = {}
        self.lied = 0

    def __call__(self, seen: Seen) -> list[bytes]:
        header, payload = seen.header, seen.raw[HEADER_BYTES:]
        if header.kind == Kind.BLOCK and not self.lied:
            payload = self._payload(header.tokens, memoryview(payload))
            header = header._replace(codec=self._codec, payload_bytes=len(payload))
            self.lied += 1
        if header.kind in DATA_KINDS:
            sealed = seal(header, [payload])
            self._sent[header.sequence] = header._replace(digest=sealed.digest)
            return [sealed.header + payload]
        if header.kind == Kind.DONE:
            done = decode_message(header, payload, Done)
            sent = [self._sent[number] for number in range(done.frames)]
            account = Done(
                frames=len(sent),
                payload_bytes=sum(header.payload_bytes for header in sent),
                digest=whole_digest(header.digest for header in sent),
            )
            return [message_frame(Kind.DONE, header.address, account)]
        return [seen.raw]


def lossless(rows: int, raw: memoryview) -> bytes:
    return b"".join(encode(Codec.LOSSLESS, ROWS.tensors, rows, [raw]).buffers)


def int8(rows: int, raw: memoryview) -> bytes:
    return b"".join(encode(Codec.INT8, ROWS.tensors, rows, [raw]).buffers)


def planes(low: int, third: bytes, high: bytes) -> bytes:
    """A payload of float32 rows with these two planes, and one that is as it is."""
    return struct.pack("!3I", low, len(third), len(high)) + bytes(low) + third + high


def bomb(stated_bytes: int) -> bytes:
    """A little that becomes a gibibyte, whatever it says of its size."""
    block = 128 << 10
    blocks = run_block(block, last=False) * (BOMB_BYTES // block) + run_block(1, last=True)
    return zstd_frame(stated_bytes, blocks)


def with_scale(value: float) -> Payload:
    def payload(rows: int, raw: memoryview) -> bytes:
        made = bytearray(int8(rows, raw))
        made[4:8] = np.float32(value).tobytes()
        return bytes(made)

    return payload


LIES: dict[str, tuple[int, Payload]] = {
    "lossless: a bomb that states its size": (1, lambda rows, _raw: planes(2 * rows * CHANNELS, bomb(BOMB_BYTES), b"")),
    "int8: a scale that is no number": (2, with_scale(float("nan"))),
    "an unknown codec": (3, lossless),
    "none: half": (0, lambda _rows, raw: bytes(raw[: len(raw) // 2])),
}


def open_transfer(port: Port, liar: Liar, budget: MemoryBudget) -> Iterator[Taking]:
    """Start a transfer from this source; its destination may use so much memory beside its cache."""
    with Proxy(port.address, liar) as proxy:
        offer, leg = port.announce()
        compute(MODEL, offer, CACHE)
        yield port.take(leg, at=proxy.address, traffic=TRAFFIC._replace(memory=budget))
        assert port.ends()


@pytest.mark.parametrize("name", LIES)
def test_what_no_encoder_makes_ends_the_transfer_and_nothing_of_it_is_used(port: Port, name: str):
    liar, budget = Liar(*LIES[name]), MemoryBudget(LIMIT_BYTES)
    tracemalloc.start()
    try:
        for taking in open_transfer(port, liar, budget):
            error = taking.failure()
            assert isinstance(error, ProtocolError), error
            assert liar.lied == 1
            assert not taking.ledger.whole
            eventually(lambda: "fetch-data" not in transfer_threads(), "no destination receives")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    port.assert_ended_once(failed=1)
    assert budget.used_bytes == 0
    # Frames as this test holds them too, on their way through the source and the middleman.
    assert peak < 16 * FRAME_BYTES < BOMB_BYTES / 10


@pytest.mark.parametrize(("codec", "payload"), [(1, lossless), (2, int8)])
def test_the_same_source_is_believed_when_it_does_not_lie(port: Port, codec: int, payload: Payload):
    """The control: what is refused above is refused for its payload."""
    liar, budget = Liar(codec, payload), MemoryBudget(LIMIT_BYTES)
    for taking in open_transfer(port, liar, budget):
        taking.whole()
        assert liar.lied == 1
        assert codec in taking.state.codecs
        assert taking.ledger.is_exact == (codec == Codec.LOSSLESS)
        if codec == Codec.LOSSLESS:
            assert_same_bits(MODEL, taking.place, CACHE)
    assert budget.used_bytes == 0
