"""Which codec a frame goes through on its way to a peer cluster: what pays on that link, as it was measured just now.

The choice is `prfaas.routing.compression`'s; here are its facts. What a link delivers while data waits comes from
`rates`, what a codec does here from a short probe at the start and then from every frame that goes through it.
"""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from prfaas.routing.compression import CodecSpeed, Estimate, LinkFacts, WireCodec, choose_codec
from prfaas.wire.codecs import Codec
from prfaas.wire.transfer import TensorLayout
from prfaas_worker.transfer.accounting import Monitor
from prfaas_worker.transfer.codecs import Encoded, encode
from prfaas_worker.transfer.codecs.probe import probe
from prfaas_worker.transfer.rates import RENEW_SECONDS, Rates

CORES = 0.5
"""What codecs may take of the cores: the others compute."""
UNKNOWN = CodecSpeed(encode_mbps=1.0, decode_mbps=1.0, ratio=1.0)


class _Link(NamedTuple):
    """What was chosen for a link, and until when."""

    codec: Codec
    renew_at: float


class Packer:
    """Chooses for all links of an instance. Any thread may call."""

    def __init__(self, setting: WireCodec, monitor: Monitor):
        self._setting: WireCodec = setting
        self.rates = Rates(monitor)
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
            if now < link.renew_at and link.codec in decodable:
                return link.codec
            facts = LinkFacts(
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
        """Encode one frame, and learn from it."""
        began = time.thread_time()
        packed = encode(codec, layouts, items, payload)
        if packed.codec is Codec.LOSSLESS:
            seconds, raw_bytes = time.thread_time() - began, sum(len(part) for part in payload)
            with self._lock:
                self._lossless = self._lossless.observe(raw_bytes, packed.nbytes, seconds, time.monotonic())
        return packed
