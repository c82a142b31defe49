"""The cache events of one of our workers, over its API port.

GET /v1/kv-events      frames: 4 bytes of length, big-endian, then msgpack [topic, seq, payload]
"""

import asyncio
import struct
from collections.abc import AsyncGenerator, Iterator
from typing import Final

import msgspec

from prfaas.errors import ProtocolError, UnreachableError
from prfaas.kvindex.index import InstanceIndex
from prfaas.wire.routes import Instance
from prfaas_gateway.kv.follower import NoStreamError
from prfaas_gateway.kv.reading import Reading
from prfaas_gateway.upstream import Upstream

CONTENT_TYPE: Final = "application/x-prfaas-events"
LARGEST_FRAME_BYTES: Final = 8 << 20
"""The events of one step: those of a prompt of a million tokens fit."""
SILENCE_SECONDS: Final = 20.0
"""A stream says something every five."""
_LENGTH: Final = struct.Struct("!I")
_FRAME: Final = msgspec.msgpack.Decoder(tuple[str, int, bytes])


class HttpStream:
    """The stream of one instance.

    Args:
        instance: whose.
        index: its own part.
        upstream: reaches it.

    """

    def __init__(self, instance: Instance, index: InstanceIndex, upstream: Upstream):
        self._instance = instance
        self._reading = Reading(index)
        self._upstream = upstream

    @property
    def tally(self) -> tuple[int, int, int]:
        """Batches and snapshots taken in, and gaps met, so far."""
        return self._reading.batches, self._reading.snapshots, self._reading.gaps

    async def portions(self) -> AsyncGenerator[Iterator[None], None]:
        """Follow one connection to its end."""
        url = self._instance.url
        async with self._upstream.reading(self._instance, self._reading.path) as answer:
            if answer.status != 200 or answer.content_type != CONTENT_TYPE:
                if answer.status >= 500:
                    raise UnreachableError(f"{url} answers HTTP {answer.status}")
                raise NoStreamError(f"{url} has no event stream (HTTP {answer.status})")
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    (size,) = _LENGTH.unpack(await answer.content.readexactly(_LENGTH.size))
                    if size > LARGEST_FRAME_BYTES:
                        raise ProtocolError(f"a frame of {size} bytes; {LARGEST_FRAME_BYTES} are the most")
                    topic, seq, payload = _frame(await answer.content.readexactly(size))
                if topic == "prfaas.end":
                    return
                yield self._reading.take(topic, seq, payload)


def _frame(body: bytes) -> tuple[str, int, bytes]:
    try:
        return _FRAME.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a frame of the event stream cannot be read: {error}") from error
