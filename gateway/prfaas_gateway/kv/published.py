"""The cache events of an engine of others, vLLM or SGLang, as they publish them over ZMQ.

    PUB at 5557      [topic, number as 8 bytes big-endian, payload] for each step that changed the cache
    ROUTER at 5558   asked for a number: [.., number, payload] for each batch from there on, then the number -1

PUB loses what a slow reader does not take, says nothing while nothing changes, and drops its end when it dies. So the
log is asked whenever a connection is new, a number is missing, or nothing was heard for a while: that an instance lives
and is still the same, and that its last words were not lost, are one question. A ROUTER drops too, in the middle of an
answer: then it is asked again from there.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Final
from urllib.parse import urlsplit

from prfaas import names
from prfaas.errors import ProtocolError, UnreachableError
from prfaas.kvindex.index import InstanceIndex
from prfaas.wire.routes import Instance
from prfaas_gateway.kv.cache_events import ForeignEvents
from prfaas_gateway.kv.numbered import Numbered
from prfaas_gateway.kv.zmtp import connected

SILENCE_SECONDS: Final = 20.0
LOG_SECONDS: Final = 10.0
"""Without an answer of the log: engines look after questions ten times a second."""
ASK_AGAIN_SECONDS: Final = 0.1
"""Between questions to one log: one that never answers whole is its own trouble and costs others nothing."""
LOG_PORT: Final = names.KV_EVENTS_PORT + 1
_END: Final = (-1).to_bytes(8, "big", signed=True)
_SUBSCRIBE_TO_ALL: Final = b"\x01"


class Published:
    """The stream of one instance.

    Args:
        instance: whose; its events are published at the host of its address.
        index: its own part.

    """

    def __init__(self, instance: Instance, index: InstanceIndex):
        self._host = urlsplit(instance.url).hostname or ""
        self._events = ForeignEvents(index)
        self._reading = Numbered(self._events)

    @property
    def tally(self) -> tuple[int, int, int]:
        """Batches taken in, snapshots, of which there are none, and gaps."""
        return self._reading.batches, 0, self._reading.gaps

    @property
    def is_whole(self) -> bool:
        """Whether all that the instance has cached is known."""
        return self._reading.is_whole

    @property
    def voids(self) -> int:
        """Times that all of the instance's cache was gone."""
        return self._reading.lives + self._events.emptied

    async def portions(self) -> AsyncGenerator[Iterator[None], None]:
        """Follow one connection to its end: yield what is to be taken in, portion by portion."""
        reading = self._reading
        message, is_check = None, False
        async with connected(self._host, names.KV_EVENTS_PORT, "SUB") as live:
            await live.send(_SUBSCRIBE_TO_ALL)
            reading.connected()
            while True:
                batch = None if message is None else _batch(message)
                is_gap = batch is not None and reading.is_gap(batch[0])
                reading.gaps += is_gap
                if batch is None or is_gap:
                    async with aclosing(self._from_log(is_check=is_check)) as missing:
                        async for one in missing:
                            yield one
                if batch is not None:
                    yield reading.published(*batch)
                message = await live.receive(SILENCE_SECONDS)
                is_check = message is None

    async def _from_log(self, *, is_check: bool) -> AsyncGenerator[Iterator[None], None]:
        """Yield the batches that the log has and we have not; without a log, a check changes nothing."""
        reading = self._reading
        has_ended, pause_seconds = False, 0.0
        while not has_ended:
            await asyncio.sleep(pause_seconds)
            due, pause_seconds = reading.next_number, ASK_AGAIN_SECONDS
            try:
                async with connected(self._host, LOG_PORT, "DEALER") as log:
                    await log.send(b"", reading.question().to_bytes(8, "big"))
                    while (message := await log.receive(LOG_SECONDS)) is not None:
                        if message[-2:] == [_END, b""]:
                            has_ended = reading.log_ended()
                            break
                        batch = reading.logged(*_batch(message))
                        if batch is None:
                            break
                        yield batch
            except UnreachableError:
                pass  # lost on the way, or never had
            if not has_ended and reading.next_number == due:
                if not is_check:
                    reading.no_log()
                has_ended = True
        yield iter(())  # so that it is known to be followed


def _batch(message: list[bytes]) -> tuple[int, bytes]:
    """Return number and payload, which come last, whatever an engine puts before them."""
    if len(message) < 2 or len(message[-2]) != 8:
        raise ProtocolError(f"a message of {len(message)} parts without a number")
    return int.from_bytes(message[-2], "big"), message[-1]
