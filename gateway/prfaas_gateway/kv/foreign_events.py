"""Follows cache events of engines without our mover over ZMQ, and applies those of all engines but our worker.

    PUB      [topic, number as 8 bytes big-endian, payload] for each step that changed the cache
    ROUTER   request: a number; answer: [.., number, payload] for each batch from there on, then the number -1

Each data-parallel rank of an instance has both sockets (`prfaas.names`). Newer vLLM adds 16 bytes to the number, if its
snapshots are on. They name the life of the publisher, so a restarted one is known at once.

PUB drops messages for a slow reader, sends nothing while nothing changes, and loses its last messages when it dies. So
the reader asks the log after a connect, a missing number or a silence. One question finds a dead instance, a restarted
one and lost messages. A ROUTER also drops messages in the middle of an answer; then the reader asks again from there.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from prfaas import names
from prfaas.errors import ProtocolError, UnreachableError
from prfaas.kvindex.bytes import DIGEST_BYTES, chained, pack_tokens, token_digests, token_seed
from prfaas.kvindex.canonical import TOKEN_BYTES
from prfaas.kvindex.index import InstanceIndex
from prfaas.kvindex.keys import NONE, key_of
from prfaas.wire.kvevents import BlockStored
from prfaas.wire.routes import Instance
from prfaas_gateway.kv.cache_events import ATTENTION_KINDS, PORTION_BLOCKS, CacheEvents, portions_of
from prfaas_gateway.kv.zmtp import connected

SILENCE_SECONDS: Final = 20.0
LOG_SECONDS: Final = 10.0
"""The timeout of the log: engines poll for questions ten times a second."""
ASK_AGAIN_SECONDS: Final = 0.1
"""Interval between questions to one log, so that a faulty log costs little."""
NUMBER_BYTES: Final = 8
LIFE_BYTES: Final = 16
_END: Final = (-1).to_bytes(8, "big", signed=True)
# In ZMTP 3.0 a subscription is a message: a 1, then how topics begin.
_SUBSCRIBE_TO_ALL: Final = b"\x01"
_NOWHERE: Final = -1
"""A parent that no tree has: Python's hash is never -1."""


class NumberedBatch(NamedTuple):
    seq: int
    payload: bytes
    life: bytes = b""
    """Names the life of the publisher; empty if it does not."""


class ForeignEventStream:
    """The events of one data-parallel rank of an instance."""

    def __init__(self, instance: Instance, index: InstanceIndex, rank: int = 0):
        self._host = urlsplit(instance.url).hostname or ""
        self._port, self._log_port = names.KV_EVENTS_PORT + rank, names.kv_log_port(instance.ranks) + rank
        self._events = ForeignEvents(index)
        self.reader = ForeignEventReader(self._events)

    @property
    def tally(self) -> tuple[int, int, int]:
        return self.reader.batches, 0, self.reader.gaps

    @property
    def cache_losses(self) -> int:
        return self.reader.lives + self._events.emptied

    @property
    def is_whole(self) -> bool:
        return self.reader.is_whole

    async def portions(self) -> AsyncGenerator[Iterator[None], None]:
        reader = self.reader
        message, is_check = None, False
        async with connected(self._host, self._port, "SUB") as live:
            await live.send(_SUBSCRIBE_TO_ALL)
            reader.connected()
            while True:
                batch = None if message is None else _batch(message)
                is_gap = batch is not None and reader.is_gap(batch)
                reader.gaps += is_gap
                if batch is None or is_gap:
                    async with aclosing(self._from_log(is_check=is_check)) as missing:
                        async for one in missing:
                            yield one
                if batch is not None:
                    yield reader.published(batch)
                message = await live.receive(SILENCE_SECONDS)
                is_check = message is None

    async def _from_log(self, *, is_check: bool) -> AsyncGenerator[Iterator[None], None]:
        """Yield the missing batches from the log; a check without a log changes nothing."""
        reader = self.reader
        has_ended, pause_seconds = False, 0.0
        while not has_ended:
            await asyncio.sleep(pause_seconds)
            due, pause_seconds = reader.next_number, ASK_AGAIN_SECONDS
            try:
                async with connected(self._host, self._log_port, "DEALER") as log:
                    # A DEALER does not add the empty part that a REQ sends first, and the engines' ROUTER expects it.
                    await log.send(b"", reader.question().to_bytes(NUMBER_BYTES, "big"))
                    while (message := await log.receive(LOG_SECONDS)) is not None:
                        if message[-2:] == [_END, b""]:
                            has_ended = reader.log_ended()
                            break
                        batch = reader.logged(_batch(message))
                        if batch is None:
                            break
                        yield batch
            except UnreachableError:
                pass  # lost on the way, or never kept
            if not has_ended and reader.next_number == due:
                if not is_check:
                    reader.no_log()
                has_ended = True
        yield iter(())  # so that the stream counts as followed


def _batch(message: list[bytes]) -> NumberedBatch:
    """Read number and payload, which come last after an engine's other parts."""
    if len(message) < 2 or len(message[-2]) not in (NUMBER_BYTES, NUMBER_BYTES + LIFE_BYTES):
        raise ProtocolError(f"a message of {len(message)} parts without a number")
    number, life = message[-2][:NUMBER_BYTES], message[-2][NUMBER_BYTES:]
    return NumberedBatch(int.from_bytes(number, "big"), message[-1], life)


class ForeignEventReader:
    """Tracks the position in an engine's numbered batches, and detects a restart. No I/O.

    The engine numbers batches from 0 and keeps the latest in a log, from which a reader requests missing ones. After a
    restart the numbers begin at 0 again, and most engines do not name their life. So a reader always requests its last
    batch again. If the log begins with the same batch, the engine is the same. If not, the reader discards its part of
    the index. If a log no longer reaches back to 0, older blocks and their descendants stay unknown.
    """

    def __init__(self, events: "ForeignEvents"):
        self.batches = self.gaps = self.lives = 0
        self._events = events
        self._next: int | None = 0  # None: any number
        self._last = 0  # the hash of the last batch that was applied
        self._life = b""  # of its publisher
        self._live = -1  # the last number that was published on this connection
        self._is_whole = True
        self._proving = self._has_any = False

    @property
    def next_number(self) -> int | None:
        """The number of the next batch; None: any."""
        return self._next

    @property
    def is_whole(self) -> bool:
        """Whether the whole cache of the instance is known."""
        return self._is_whole and not self._events.left_out

    def connected(self) -> None:
        self._live = -1

    def question(self) -> int:
        """Return the number to ask the log from; pass its answer to `logged`, then call `log_ended`."""
        self._proving = self._has_any
        # One further back: the last batch that is known proves that it is the same engine.
        return max(0, (self._next or 0) - self._has_any)

    def logged(self, batch: NumberedBatch) -> Iterator[None] | None:
        """Return the portions of a batch of the log; None if the reader must ask again (lost batches or another log).

        Raises ProtocolError for an unreadable log.
        """
        if self._proving:
            self._proving = False
            if batch.seq == (self._next or 0) - 1 and hash(batch) == self._last:
                return iter(())
            self._begin(0)
            return None
        if not self._has_any:
            self._begin(batch.seq)
        if batch.seq != self._next or self._is_of_another_life(batch):
            return None
        return self._take(batch)

    def log_ended(self) -> bool:
        """End the answer; return False if the reader must ask once more, because the log is another engine's."""
        if not self._proving:
            return True
        self._proving = False
        self._begin(0)
        return False

    def no_log(self) -> None:
        """Discard the instance's part of the index: batches may be missing and no log is available."""
        self._proving = False
        if self._has_any:
            self._begin(None)
        elif self._next == 0:
            self._next = None

    def is_gap(self, batch: NumberedBatch) -> bool:
        """Return whether batches before a published one are missing."""
        return self._next is not None and (batch.seq > self._next or self._is_of_another_life(batch))

    def published(self, batch: NumberedBatch) -> Iterator[None]:
        """Apply a published batch, in portions.

        Raises ProtocolError if numbers went back: another engine uses this address.
        """
        seq = batch.seq
        if seq <= self._live:
            raise ProtocolError(f"batch {seq} came after batch {self._live}")
        self._live = seq
        is_other = self._is_of_another_life(batch)
        if self._next is not None and seq < self._next and not is_other:
            return iter(())  # the log had it
        if seq != self._next or is_other:
            self._begin(seq)
        return self._take(batch)

    def _is_of_another_life(self, batch: NumberedBatch) -> bool:
        return self._has_any and batch.life != self._life

    def _begin(self, seq: int | None) -> None:
        """Begin anew at a number; discard the instance's part of the index."""
        if self._has_any:
            self.lives += 1
            self._events.forget()
        self._next, self._is_whole, self._has_any = seq, seq == 0, False

    def _take(self, batch: NumberedBatch) -> Iterator[None]:
        yield from self._events.take(batch.payload)
        self._next, self._last, self._life, self._has_any = batch.seq + 1, hash(batch), batch.life, True
        self.batches += 1


class ForeignEvents(CacheEvents):
    """Applies the events of a foreign engine, which reports token ids or their digests instead of a byte map.

    A prompt of token ids is found by a chain over blocks of the engine's size. The chain is computed here once for each
    block and stored as the byte map.

    A chain begins with the prompt's salt. Blocks with other extra keys (images) or of an adapter are left out with
    their descendants: other prompts with the same tokens cannot use them.
    """

    def __init__(self, index: InstanceIndex):
        super().__init__(index)
        self._chains = array("Q")  # by the tree's number of a block: the chained hash of the tokens up to its end
        self._early: dict[int, int] = {}  # states that arrived before their blocks in this batch: key to medium
        self._groups: set[int] = set()  # those reported so far, of all kinds

    def forget(self) -> None:
        super().forget()
        self.left_out = 0
        self._groups.clear()

    def take(self, payload: bytes) -> Iterator[None]:
        self._early.clear()
        yield from super().take(payload)
        for key, medium in self._early.items():
            self._note([key], medium, is_state=True)

    def _note_group(self, event: BlockStored) -> None:
        """Record a group, and that the model has states if they are reported, or if groups before attention are silent.

        vLLM lists no block if it computed states and kept none. An instance that got a cache from another one may
        report its attention alone. Groups of windows would be reported with it, and before it.
        """
        super()._note_group(event)
        number = event.group_idx
        if number is None:
            return
        if event.kv_cache_spec_kind in ATTENTION_KINDS and number and not any(one < number for one in self._groups):
            self._index.tree.note_states()
        if len(self._groups) < PORTION_BLOCKS:
            self._groups.add(number)

    def _place(self, event: BlockStored, medium: int, *, is_state: bool) -> Iterator[None]:
        if is_state:
            yield from self._states(event, medium)
            return
        size = event.block_size
        parent = None if event.parent_block_hash is None else key_of(event.parent_block_hash)
        unit = DIGEST_BYTES if isinstance(event.token_ids, bytes) else size
        # Some engines send only the names of blocks in other mediums, which is enough for known blocks.
        has_tokens = len(event.token_ids) == unit * len(event.block_hashes)
        salt = _salt_of(event)
        if not has_tokens or salt is None or (parent is not None and self._index.tree.find(parent) == NONE):
            for keys in portions_of(event.block_hashes):
                self._note(keys, medium, is_state=False)
                yield
            return
        at = 0
        for keys in portions_of(event.block_hashes):
            self._index.tree.store(keys, parent, False, medium)
            tokens = event.token_ids[at * unit : (at + len(keys)) * unit]
            digests = tokens if isinstance(tokens, bytes) else token_digests(pack_tokens(tokens), TOKEN_BYTES * size)
            self._learn_tokens(keys, parent, digests, salt)
            parent, at = keys[-1], at + len(keys)
            yield

    def _learn_tokens(self, keys: list[int], parent: int | None, digests: bytes, salt: str) -> None:
        """Map prompts of token ids with these digests to blocks that were stored behind `parent`, the first ones under
        this salt."""
        find, chains = self._index.tree.find, self._chains
        behind = NONE if parent is None else find(parent)
        if parent is not None and behind == NONE:
            return  # it found no room, and neither do these
        hashes = chained(token_seed(salt) if parent is None else chains[behind], digests, DIGEST_BYTES)
        numbers = [find(key) for key in keys]
        room = numbers.index(NONE) if NONE in numbers else len(numbers)
        chains.extend([0] * (max(numbers[:room], default=0) + 1 - len(chains)))
        for number, chain in zip(numbers[:room], hashes, strict=False):
            chains[number] = chain
        self._index.bytes.learn(hashes[:room], keys[:room])

    def _states(self, event: BlockStored, medium: int) -> Iterator[None]:
        """Record states of blocks. Some engines send states before their blocks."""
        for keys in portions_of(event.block_hashes):
            known = [key for key in keys if self._index.tree.find(key) != NONE]
            self._note(known, medium, is_state=True)
            self._early.update(dict.fromkeys(set(keys).difference(known), medium))
            yield

    def _remove(self, keys: list[int], medium: int, *, is_state: bool) -> None:
        super()._remove(keys, medium, is_state=is_state)
        if is_state:
            for key in keys:
                self._early.pop(key, None)

    def _note(self, keys: list[int], medium: int, *, is_state: bool) -> None:
        known = [key for key in keys if self._index.tree.find(key) != NONE]
        self.left_out += len(keys) - len(known)
        self._index.tree.store(known, _NOWHERE, is_state, medium)


def _salt_of(event: BlockStored) -> str | None:
    """Return the salt that a prompt's first block has, empty without one; None if blocks depend on more than it and
    their tokens. vLLM names it once, as the one extra key of that block."""
    first, *others = event.extra_keys or [None]
    if event.lora_id is not None or event.lora_name is not None or any(others):
        return None
    match first:
        case None | ():
            return ""
        case (str() as salt,) if event.parent_block_hash is None:
            return salt
        case _:
            return None
