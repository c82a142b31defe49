"""Cache events of vLLM and SGLang, as they publish them over ZMQ.

    PUB at 5557      [topic, number as 8 bytes big-endian, payload] for each step that changed the cache
    ROUTER at 5558   asked for a number: [.., number, payload] for each batch from there on, then the number -1

PUB loses what a slow reader does not take, says nothing while nothing changes, and drops its end when it dies. So the
log is asked whenever a connection is new, a number is missing, or nothing was heard for a while: one question finds out
whether the instance lives, whether it is still the same, and whether its last words were lost. A ROUTER drops too, in
the middle of an answer: then it is asked again from there.
"""

import asyncio
import struct
from array import array
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Final
from urllib.parse import urlsplit

from prfaas import names
from prfaas.errors import ProtocolError, UnreachableError
from prfaas.kvindex.bytes import chained, token_seed
from prfaas.kvindex.canonical import TOKEN_BYTES
from prfaas.kvindex.index import InstanceIndex
from prfaas.kvindex.keys import NONE, key_of
from prfaas.wire.kvevents import BlockStored
from prfaas.wire.routes import Instance
from prfaas_gateway.kv.cache_events import CacheEvents, portions_of
from prfaas_gateway.kv.zmtp import connected

SILENCE_SECONDS: Final = 20.0
LOG_SECONDS: Final = 10.0
"""Without an answer of the log: engines look after questions ten times a second."""
ASK_AGAIN_SECONDS: Final = 0.1
"""Between questions to one log: one that never answers whole is its own trouble and costs others nothing."""
LOG_PORT: Final = names.KV_EVENTS_PORT + 1
_END: Final = (-1).to_bytes(8, "big", signed=True)
_SUBSCRIBE_TO_ALL: Final = b"\x01"
_NOWHERE: Final = -1
"""A parent that no tree has: Python's hash is never -1."""


class ForeignEventStream:
    """The cache events of one instance that runs vLLM or SGLang."""

    def __init__(self, instance: Instance, index: InstanceIndex):
        self._host = urlsplit(instance.url).hostname or ""
        self._events = ForeignEvents(index)
        self._reader = ForeignEventReader(self._events)

    @property
    def tally(self) -> tuple[int, int, int]:
        """Batches taken in, snapshots, of which there are none, and gaps."""
        return self._reader.batches, 0, self._reader.gaps

    @property
    def is_whole(self) -> bool:
        """Whether all that the instance has cached is known."""
        return self._reader.is_whole

    @property
    def voids(self) -> int:
        """Times that all of the instance's cache was gone."""
        return self._reader.lives + self._events.emptied

    async def portions(self) -> AsyncGenerator[Iterator[None], None]:
        """Follow one connection to its end: yield what is to be taken in, portion by portion."""
        reader = self._reader
        message, is_check = None, False
        async with connected(self._host, names.KV_EVENTS_PORT, "SUB") as live:
            await live.send(_SUBSCRIBE_TO_ALL)
            reader.connected()
            while True:
                batch = None if message is None else _batch(message)
                is_gap = batch is not None and reader.is_gap(batch[0])
                reader.gaps += is_gap
                if batch is None or is_gap:
                    async with aclosing(self._from_log(is_check=is_check)) as missing:
                        async for one in missing:
                            yield one
                if batch is not None:
                    yield reader.published(*batch)
                message = await live.receive(SILENCE_SECONDS)
                is_check = message is None

    async def _from_log(self, *, is_check: bool) -> AsyncGenerator[Iterator[None], None]:
        """Yield the batches that the log has and we have not; without a log, a check changes nothing."""
        reader = self._reader
        has_ended, pause_seconds = False, 0.0
        while not has_ended:
            await asyncio.sleep(pause_seconds)
            due, pause_seconds = reader.next_number, ASK_AGAIN_SECONDS
            try:
                async with connected(self._host, LOG_PORT, "DEALER") as log:
                    await log.send(b"", reader.question().to_bytes(8, "big"))
                    while (message := await log.receive(LOG_SECONDS)) is not None:
                        if message[-2:] == [_END, b""]:
                            has_ended = reader.log_ended()
                            break
                        batch = reader.logged(*_batch(message))
                        if batch is None:
                            break
                        yield batch
            except UnreachableError:
                pass  # lost on the way, or never had
            if not has_ended and reader.next_number == due:
                if not is_check:
                    reader.no_log()
                has_ended = True
        yield iter(())  # so that it is known to be followed


def _batch(message: list[bytes]) -> tuple[int, bytes]:
    """Return number and payload, which come last, whatever an engine puts before them."""
    if len(message) < 2 or len(message[-2]) != 8:
        raise ProtocolError(f"a message of {len(message)} parts without a number")
    return int.from_bytes(message[-2], "big"), message[-1]


class ForeignEventReader:
    """Knows where a reader is in an engine's numbered batches, and whether they are still the same. No I/O.

    The engine publishes batches under numbers from 0 and keeps the latest in a log, from which a reader asks for those
    that it lacks. Neither says whose numbers they are: after a restart they begin anew. So a reader always asks for the
    last batch that it has taken too. If the log begins with that very batch, all is well. If not, engine or log went on
    without the reader, and what was known is void. A log that no longer reaches back to its beginning gives less than
    the truth: nothing is known of blocks that stood before, and of all that come behind those.
    """

    def __init__(self, events: "ForeignEvents"):
        self.batches = self.gaps = self.lives = 0
        self._events = events
        self._next: int | None = 0  # None: whatever comes
        self._last = 0  # the hash of the last batch that was taken
        self._live = -1  # the last number that was published on this connection
        self._is_whole = True
        self._proving = self._has_any = False

    @property
    def next_number(self) -> int | None:
        """The number of the batch that is due; None: any."""
        return self._next

    @property
    def is_whole(self) -> bool:
        """Whether all that the instance has cached is known."""
        return self._is_whole and not self._events.left_out

    def connected(self) -> None:
        self._live = -1

    def question(self) -> int:
        """Return from which number on to ask the log; its answer goes to `logged`, then to `log_ended`."""
        self._proving = self._has_any
        return max(0, (self._next or 0) - self._has_any)

    def logged(self, seq: int, payload: bytes) -> Iterator[None] | None:
        """Take in a batch of the log, a portion with each step; None where it has to be asked once more: some batches
        before this one were lost on the way, or the log is another's.

        Raises:
            ProtocolError: the log cannot be read.

        """
        if self._proving:
            self._proving = False
            if seq == (self._next or 0) - 1 and hash(payload) == self._last:
                return iter(())
            self._begin(0)
            return None
        if not self._has_any:
            self._begin(seq)
        if seq != self._next:
            return None
        return self._take(seq, payload)

    def log_ended(self) -> bool:
        """Take in that there is no more; False where it has to be asked once more, because it is another's."""
        if not self._proving:
            return True
        self._proving = False
        self._begin(0)
        return False

    def no_log(self) -> None:
        """Take in that no log can be had, after a connection was lost or a number left out: what is known is void."""
        self._proving = False
        if self._has_any:
            self._begin(None)
        elif self._next == 0:
            self._next = None

    def is_gap(self, seq: int) -> bool:
        """Tell whether batches before a published one are missing."""
        return self._next is not None and seq > self._next

    def published(self, seq: int, payload: bytes) -> Iterator[None]:
        """Take in a batch as it is published, a portion with each step.

        Raises:
            ProtocolError: numbers went back: another engine speaks at this address.

        """
        if seq <= self._live:
            raise ProtocolError(f"batch {seq} came behind batch {self._live}")
        self._live = seq
        if self._next is not None and seq < self._next:
            return iter(())  # the log had it
        if seq != self._next:
            self._begin(seq)
        return self._take(seq, payload)

    def _begin(self, seq: int | None) -> None:
        """Begin anew: what was known, if anything, is void."""
        if self._has_any:
            self.lives += 1
            self._events.forget()
        self._next, self._is_whole, self._has_any = seq, seq == 0, False

    def _take(self, seq: int, payload: bytes) -> Iterator[None]:
        yield from self._events.take(payload)
        self._next, self._last, self._has_any = seq + 1, hash(payload), True
        self.batches += 1


class ForeignEvents(CacheEvents):
    """Takes in the events of an engine of others, which teaches no byte map.

    It tells the token ids of each block instead. So a prompt that comes as token ids is found by a chain over blocks of
    as many tokens as theirs. That chain is computed here once for each block and put where the byte map would be.

    Left out, with all that comes behind them, are blocks that other prompts with the same tokens cannot use: those with
    extra keys (a cache salt, images) or of an adapter.
    """

    def __init__(self, index: InstanceIndex):
        super().__init__(index)
        self.left_out = 0
        """Blocks of which nothing is known but that they are there."""
        self._chains = array("Q")  # by the tree's number of a block: the chained hash of the tokens up to its end
        self._early: dict[int, int] = {}  # states that were told before their blocks, in this batch: key to medium

    def forget(self) -> None:
        super().forget()
        self.left_out = 0

    def take(self, payload: bytes) -> Iterator[None]:
        self._early.clear()
        yield from super().take(payload)
        for key, medium in self._early.items():
            self._note([key], medium, is_state=True)

    def _place(self, event: BlockStored, medium: int, *, is_state: bool) -> Iterator[None]:
        if is_state:
            yield from self._states(event, medium)
            return
        size = event.block_size
        parent = None if event.parent_block_hash is None else key_of(event.parent_block_hash)
        # Some engines tell only the names of blocks in other tiers, which is enough for blocks that are known.
        has_tokens = len(event.token_ids) == size * len(event.block_hashes)
        if not has_tokens or _is_apart(event) or (parent is not None and self._index.tree.find(parent) == NONE):
            for keys in portions_of(event.block_hashes):
                self._note(keys, medium, is_state=False)
                yield
            return
        at = 0
        for keys in portions_of(event.block_hashes):
            self._index.tree.store(keys, parent, False, medium)
            self._teach(keys, parent, event.token_ids[at * size : (at + len(keys)) * size])
            parent, at = keys[-1], at + len(keys)
            yield

    def _teach(self, keys: list[int], parent: int | None, token_ids: list[int]) -> None:
        """Learn which prompts of token ids lead to blocks that were stored behind `parent`."""
        find, chains = self._index.tree.find, self._chains
        behind = NONE if parent is None else find(parent)
        if parent is not None and behind == NONE:
            return  # it found no room, and so did these
        try:
            data = struct.pack(f"<{len(token_ids)}I", *token_ids)
        except struct.error as error:
            raise ProtocolError(f"a stored block has a token id that is none: {error}") from error
        size = self._index.block_tokens
        hashes = chained(token_seed() if parent is None else chains[behind], data, TOKEN_BYTES * size)
        numbers = [find(key) for key in keys]
        room = numbers.index(NONE) if NONE in numbers else len(numbers)
        chains.extend([0] * (max(numbers[:room], default=0) + 1 - len(chains)))
        for number, chain in zip(numbers[:room], hashes, strict=False):
            chains[number] = chain
        self._index.bytes.learn(hashes[:room], keys[:room])

    def _states(self, event: BlockStored, medium: int) -> Iterator[None]:
        """Note states of blocks. Some engines tell the groups of one step in their own order, states before blocks."""
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


def _is_apart(event: BlockStored) -> bool:
    """Tell whether blocks are for prompts with more than tokens to them."""
    has_keys = event.extra_keys is not None and any(event.extra_keys)
    return has_keys or event.lora_id is not None or event.lora_name is not None
