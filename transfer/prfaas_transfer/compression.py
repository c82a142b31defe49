"""Compresses the cache on the wire: converts between a frame's tensors and its payload.

    encode(codec, layouts, items, parts)         -> the codec that was used, and the payload in buffers
    decode_into(codec, layouts, items, payload, room)
    decode(codec, layouts, items, payload)       -> each tensor's bytes

A frame's tensors are one after the other, each contiguous [items, *shape]. A BLOCK of n tokens has n items, a STATE has
one. `parts` and `room` are that memory in pieces, each of one tensor, as the cache's pages give it: of whole items, or
of a single item in parts.

A codec must never cost more than it saves, and a payload is not trusted. So a frame that does not get smaller travels
as it is. **A payload with a codec is smaller than its tensors**. Every size is known from the layouts before the first
byte is decoded. Memory is bounded by the tensors', and whatever does not fit is a ProtocolError. The functions have no
state: any thread may call any of them. Both zstd and numpy release the GIL for the bulk of the work. Encoded buffers
belong to the caller, but those of Codec.NONE are `parts` themselves.

`Packer` chooses the codec for each link by `prfaas.routing.compression`. A link's rate is from `LinkRates`. A codec's
speed is from a short probe at the start, then from every frame that goes through it.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from prfaas.errors import ProtocolError
from prfaas.routing.compression import CodecFacts, CodecSpeed, Estimate, WireCodec, choose_codec
from prfaas.wire.frames import Codec
from prfaas.wire.transfer import Buffer, TensorLayout
from prfaas_transfer.codecs import cut, int8, lossless, size_bytes
from prfaas_transfer.link_stats import RENEW_SECONDS, LinkMonitor, LinkRates

DECODABLE = (Codec.NONE, Codec.LOSSLESS, Codec.INT8)  # Codecs that this version reads, for the handshake.
CORES = 0.5  # Share of the cores for codecs: the others compute.
UNKNOWN = CodecSpeed(encode_mbps=1.0, decode_mbps=1.0, ratio=1.0)
TOKENS, CHANNELS = 1024, 512
ROUNDS = 3


class Encoded(NamedTuple):
    codec: Codec
    buffers: Sequence[Buffer]

    @property
    def nbytes(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)


def encode(codec: Codec, layouts: Sequence[TensorLayout], items: int, parts: Sequence[Buffer]) -> Encoded:
    """Encode one frame with `codec`, or with a lesser one if that does not fit.

    INT8 gives way to LOSSLESS for linear states, for rows with values that are not finite or nearly overflow, and for a
    few tokens that its scales would make larger; LOSSLESS gives way to NONE when nothing shrinks. Raises InternalError
    if the parts are not the tensors' memory.
    """
    tensors = cut(layouts, items, parts)
    raw_bytes = size_bytes(layouts, items)
    if codec is Codec.INT8 and all(layout.axes[0] == "token" for layout in layouts):
        payload = int8.encode(tensors, raw_bytes)
        if payload is not None:
            return Encoded(Codec.INT8, payload)
    if codec is not Codec.NONE:
        payload = lossless.encode(tensors, raw_bytes)
        if payload is not None:
            return Encoded(Codec.LOSSLESS, payload)
    return Encoded(Codec.NONE, parts)


def decode_into(
    codec: Codec, layouts: Sequence[TensorLayout], items: int, payload: Buffer, room: Sequence[memoryview]
) -> None:
    """Decode one frame into `room`, whose bytes are undefined after an error. Raises ProtocolError if `encode` cannot
    have made the payload, InternalError if the room is not the tensors' memory."""
    wire = memoryview(payload).cast("B")
    tensors = cut(layouts, items, room)
    raw_bytes = size_bytes(layouts, items)
    if codec is Codec.NONE:
        if wire.nbytes != raw_bytes:
            raise ProtocolError(f"payload of {wire.nbytes} bytes for tensors of {raw_bytes}, sent as they are")
        for tensor in tensors:
            for piece in tensor.pieces:
                piece[:], wire = wire[: piece.nbytes], wire[piece.nbytes :]
        return
    if wire.nbytes >= raw_bytes:
        raise ProtocolError(f"payload of {wire.nbytes} bytes in {codec.name} for tensors of {raw_bytes}: not smaller")
    if codec is Codec.INT8:
        int8.decode_into(wire, tensors)
    else:
        lossless.decode_into(wire, tensors)


def decode(codec: Codec, layouts: Sequence[TensorLayout], items: int, payload: Buffer) -> list[memoryview]:
    """Decode one frame into memory of its own: each tensor's bytes, [items, *shape]. Raises as `decode_into`."""
    room = [memoryview(bytearray(items * layout.nbytes)) for layout in layouts]
    decode_into(codec, layouts, items, payload, room)
    return room


class _Link(NamedTuple):
    codec: Codec
    renew_at: float


class Packer:
    """Chooses codecs for all links of an instance. Any thread may call."""

    def __init__(self, setting: WireCodec, monitor: LinkMonitor):
        self._setting: WireCodec = setting
        self.rates = LinkRates(monitor)
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        speed = probe() if setting == "auto" else UNKNOWN
        self._lossless = Estimate(start=speed, at_seconds=time.monotonic())

    def codec(self, peer: str, decodable: tuple[int, ...]) -> Codec:
        """Return the codec for the next frame to a peer cluster that reads these."""
        if self._setting == "none":
            return Codec.NONE
        now = time.monotonic()
        with self._lock:
            link = self._links.get(peer) or _Link(Codec.NONE, 0.0)
            # Instances of one cluster may differ in what they read, in a rollout.
            if now < link.renew_at and link.codec in decodable:
                return link.codec
            facts = CodecFacts(
                setting=self._setting,
                delivery_mbps=self.rates.mbps(peer),
                cores=CORES,
                lossless=self._lossless.speed(now),
                peer_decodes=decodable,
                current=link.codec,
            )
            codec = choose_codec(facts).codec
            self._links[peer] = _Link(codec, now + RENEW_SECONDS)
            return codec

    def pack(self, codec: Codec, layouts: Sequence[TensorLayout], items: int, payload: Sequence[memoryview]) -> Encoded:
        """Encode one frame, and measure the codec."""
        # CPU time: a wait for a core or for the interpreter's lock says nothing of the codec.
        began = time.thread_time()
        packed = encode(codec, layouts, items, payload)
        # `auto` chooses between this codec and none, so no other one's speed is of use.
        if packed.codec is Codec.LOSSLESS:
            seconds, raw_bytes = time.thread_time() - began, sum(len(part) for part in payload)
            with self._lock:
                self._lossless = self._lossless.observe(raw_bytes, packed.nbytes, seconds, time.monotonic())
        return packed


def probe() -> CodecSpeed:
    """Measure bfloat16 rows of normal numbers, 1 MiB, in this thread's CPU time: the median of a few rounds."""
    layouts = [TensorLayout("probe", ("token", "channel"), (CHANNELS,), "bfloat16")]
    numbers = np.random.default_rng(0).standard_normal((TOKENS, CHANNELS), dtype=np.float32)
    rows = (numbers.view(np.uint32) >> 16).astype(np.uint16).data.cast("B")
    encoded = encode(Codec.LOSSLESS, layouts, TOKENS, [rows])
    payload = b"".join(encoded.buffers)
    megabits = rows.nbytes * 8 / 1e6
    return CodecSpeed(
        encode_mbps=megabits / _cpu_seconds(lambda: encode(Codec.LOSSLESS, layouts, TOKENS, [rows])),
        decode_mbps=megabits / _cpu_seconds(lambda: decode(encoded.codec, layouts, TOKENS, payload)),
        ratio=rows.nbytes / len(payload),
    )


def _cpu_seconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        work()
        taken.append(time.thread_time() - started)
    return statistics.median(taken)
