"""Chooses the codec for a link, from facts about the link and the codecs.

Encoding, the wire and decoding work at the same time on different frames. So the slowest of them decides when the last
byte is placed. For a cache of B bits, with a codec that makes it `ratio` times smaller,

    seconds = max(B / (encode_mbps * cores), B / (ratio * delivery_mbps), B / (decode_mbps * cores))

and without one B / delivery_mbps. Three things make this hard:

- Speeds change with what else the machine does, and ratios with what the cache holds. Both are measured on real frames
  (`observe`). But a codec that is not used is not measured: a bad minute would rule it out for ever. So what was seen
  fades, within minutes, into what was measured at the start.
- A link that gets a little faster or slower must not change the codec each time. One has to save `ADOPT_GAIN` of the
  time to be taken up, and is kept as long as it saves anything.
- A lossy codec changes answers. That is for an operator to decide, never for this module. `auto` knows exact ones only.
  A codec that was asked for by name is taken wherever the peer reads it.
"""

import math
from typing import Literal

import msgspec

from prfaas.wire.frames import Codec

WireCodec = Literal["auto", "none", "lossless", "int8"]
"""The settings of an operator."""

ADOPT_GAIN = 0.1
"""Share of the time that an unused codec must save to be taken up."""
START_WEIGHT_BYTES = 16 << 20
"""The weight of the first measurement, in bytes of real frames."""
HALF_LIFE_SECONDS = 60.0


class CodecSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a codec in Mbit of tensors a second of one core, and tensor bytes over wire bytes. All positive."""

    encode_mbps: float
    decode_mbps: float
    ratio: float


class CodecFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a choice for one link depends on."""

    setting: WireCodec
    delivery_mbps: float | None
    """Measured delivery of the link, in wire bytes; None: not measured yet."""
    cores: float
    """Cores that the codec may take, at each end; 0.5: half of one."""
    lossless: CodecSpeed
    peer_decodes: tuple[int, ...]
    """Wire values of the codecs that the peer reads; some may be of later versions."""
    current: Codec = Codec.NONE


class CodecChoice(msgspec.Struct, frozen=True):
    codec: Codec
    reason: str


def choose_codec(facts: CodecFacts) -> CodecChoice:
    """Choose for one link; see the module's opening. A faster link never gets a heavier codec."""
    if facts.setting != "auto":
        return _named(Codec[facts.setting.upper()], facts)
    if Codec.LOSSLESS not in facts.peer_decodes:
        return CodecChoice(Codec.NONE, "the peer reads no exact codec")
    if facts.delivery_mbps is None or not _is_rate(facts.delivery_mbps):
        return CodecChoice(Codec.NONE, "the link is not measured yet")
    share = time_share(facts.lossless, facts.delivery_mbps, facts.cores)
    limit = 1.0 if facts.current is Codec.LOSSLESS else 1.0 - ADOPT_GAIN
    reason = f"lossless takes {share:.2f} of the time at {facts.delivery_mbps:.0f} Mbit/s"
    if share < limit:
        return CodecChoice(Codec.LOSSLESS, reason)
    return CodecChoice(Codec.NONE, f"{reason}, want less than {limit:.2f}")


def time_share(speed: CodecSpeed, delivery_mbps: float, cores: float) -> float:
    """Return the time to the last byte with a codec, of that without one; infinite if a figure makes no sense."""
    rates = (delivery_mbps, speed.ratio, speed.encode_mbps * cores, speed.decode_mbps * cores)
    if not all(_is_rate(rate) for rate in rates):
        return math.inf
    _, ratio, encode_mbps, decode_mbps = rates
    return max(delivery_mbps / encode_mbps, 1 / ratio, delivery_mbps / decode_mbps)


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A running estimate of one codec: what was measured at the start, and fading sums over real frames."""

    start: CodecSpeed
    at_seconds: float
    tensor_bytes: float = 0.0
    wire_bytes: float = 0.0
    encode_seconds: float = 0.0

    def observe(self, tensor_bytes: int, wire_bytes: int, encode_seconds: float, now_seconds: float) -> "Estimate":
        """Take note of frames: their size before and after, and the CPU seconds that encoding took."""
        kept = self._kept(now_seconds)
        return msgspec.structs.replace(
            self,
            at_seconds=max(now_seconds, self.at_seconds),
            tensor_bytes=self.tensor_bytes * kept + tensor_bytes,
            wire_bytes=self.wire_bytes * kept + wire_bytes,
            encode_seconds=self.encode_seconds * kept + encode_seconds,
        )

    def speed(self, now_seconds: float) -> CodecSpeed:
        """Return the estimate for now; the peer decodes, so that speed stays as measured here at the start."""
        kept = self._kept(now_seconds)
        tensor_bytes = START_WEIGHT_BYTES + self.tensor_bytes * kept
        wire_bytes = START_WEIGHT_BYTES / self.start.ratio + self.wire_bytes * kept
        start_seconds = START_WEIGHT_BYTES * 8 / 1e6 / self.start.encode_mbps
        return CodecSpeed(
            encode_mbps=tensor_bytes * 8 / 1e6 / (start_seconds + self.encode_seconds * kept),
            decode_mbps=self.start.decode_mbps,
            ratio=tensor_bytes / wire_bytes,
        )

    def _kept(self, now_seconds: float) -> float:
        return 0.5 ** (max(0.0, now_seconds - self.at_seconds) / HALF_LIFE_SECONDS)


def _named(codec: Codec, facts: CodecFacts) -> CodecChoice:
    # What INT8 cannot take, linear states above all, goes through LOSSLESS.
    needed = {Codec.NONE: (), Codec.LOSSLESS: (Codec.LOSSLESS,), Codec.INT8: (Codec.INT8, Codec.LOSSLESS)}[codec]
    if all(one in facts.peer_decodes for one in needed):
        return CodecChoice(codec, f"{facts.setting} was asked for")
    return CodecChoice(Codec.NONE, f"{facts.setting} was asked for, the peer does not read it")


def _is_rate(value: float) -> bool:
    return math.isfinite(value) and value > 0
