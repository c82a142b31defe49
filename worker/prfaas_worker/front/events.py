"""Cache events for routers: numbered, kept for a while so that a reader can catch up, and read without slowing anybody.

Two topics, each with numbers of its own, so that a reader of one sees a gap where it lost something and nowhere else:
`kv@INSTANCE@MODEL` carries vLLM's event batches, `bytes@INSTANCE@MODEL` what requests taught about bytes and tokens.
Both payloads are defined in `prfaas.wire.kvevents`. The log is the only buffer: readers keep a position in it, and one
that falls behind its oldest entry has lost events and is told so.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from uuid import uuid4

from prfaas.wire.engine import KvEvents, ToEngine, ToFront
from prfaas.wire.kvevents import ByteBlock, ByteMapBatch, EventBatch, encode_byte_map, encode_events
from prfaas_worker.options import Options

KEPT_BATCHES: Final = 10_000
KEPT_BYTES: Final = 32 << 20
KNOWN_BYTE_BLOCKS: Final = 1 << 16
"""Byte blocks that are not published again while their batch can still be read: about 8 MB."""


class Entry(NamedTuple):
    """One published batch."""

    topic: str
    seq: int
    payload: bytes


class Log:
    """The latest batches of one topic, numbered from 0."""

    def __init__(self, topic: str, *, kept_batches: int = KEPT_BATCHES, kept_bytes: int = KEPT_BYTES):
        self.topic = topic
        self.first_seq = 0
        """The oldest batch that is still here; `next_seq` while there is none."""
        self.next_seq = 0
        self._limits = kept_batches, kept_bytes
        self._payloads: dict[int, bytes] = {}
        self._bytes = 0

    def append(self, payload: bytes) -> Entry:
        """Publish a batch; the oldest ones make room."""
        entry = Entry(self.topic, self.next_seq, payload)
        self._payloads[self.next_seq] = payload
        self._bytes += len(payload)
        self.next_seq += 1
        kept_batches, kept_bytes = self._limits
        while len(self._payloads) > kept_batches or (self._bytes > kept_bytes and len(self._payloads) > 1):
            self._bytes -= len(self._payloads.pop(self.first_seq))
            self.first_seq += 1
        return entry

    def read(self, seq: int, max_bytes: int) -> list[Entry]:
        """Return batches from `seq` on, at least one if there is any, and no more once they fill `max_bytes`."""
        entries: list[Entry] = []
        size = 0
        while size < max_bytes and (payload := self._payloads.get(seq)) is not None:
            entries.append(Entry(self.topic, seq, payload))
            size += len(payload)
            seq += 1
        return entries


class Events:
    """Publishes what the engine tells of its cache, and what requests teach about bytes. Listens to the engine."""

    def __init__(self, options: Options):
        place = f"@{options.instance}@{options.model_name}"
        self.kv = Log(f"kv{place}")
        self.byte_map = Log(f"bytes{place}")
        self.epoch = uuid4().hex
        """This process's life: numbers begin anew with the next one."""
        self.subscribers: list[Callable[[Entry], None]] = []
        """Called with every batch as it is published."""
        self.closed = False
        self._published = asyncio.Event()
        self._known: OrderedDict[int, int] = OrderedDict()

    def sent(self, message: ToEngine) -> None:
        """What goes to the engine changes no cache by itself."""

    def heard(self, message: ToFront) -> None:
        """Publish the engine's cache events."""
        if isinstance(message, KvEvents) and message.events:
            self._publish(self.kv, encode_events(EventBatch(time.time(), message.events, 0)))

    def learn(self, blocks: Sequence[ByteBlock]) -> None:
        """Publish which tokens lie behind byte blocks, but for what can still be read."""
        first_seq = self.byte_map.first_seq
        new = [block for block in blocks if self._known.get(block.byte_hash, -1) < first_seq]
        if not new:
            return
        for block in new:
            self._known.pop(block.byte_hash, None)
            self._known[block.byte_hash] = self.byte_map.next_seq
        while len(self._known) > KNOWN_BYTE_BLOCKS:
            self._known.popitem(last=False)
        self._publish(self.byte_map, encode_byte_map(ByteMapBatch(time.time(), new)))

    async def wait(self, seconds: float) -> bool:
        """Wait until something is published or the worker ends; False when neither came within `seconds`."""
        try:
            await asyncio.wait_for(self._published.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Let every reader end."""
        self.closed = True
        self._published.set()

    def _publish(self, log: Log, payload: bytes) -> None:
        entry = log.append(payload)
        for subscriber in self.subscribers:
            subscriber(entry)
        self._published.set()
        self._published = asyncio.Event()
