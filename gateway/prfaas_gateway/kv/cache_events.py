"""Applies the cache events of one instance to its part of the index, from any stream (`EventStream`).

Events are applied in portions, between which the caller may yield to other tasks. Our workers' events carry a byte map
that links them to prompts.
"""

from collections.abc import AsyncGenerator, Iterator
from typing import Final, Literal, Protocol

from prfaas.errors import ProtocolError
from prfaas.kvindex.index import InstanceIndex
from prfaas.kvindex.keys import key_of, keys_of
from prfaas.wire.kvevents import (
    MEDIUM_DEVICE,
    MEDIUM_DISK,
    MEDIUM_HOST,
    STATE_SPEC_KIND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventHash,
    read_events,
)

PORTION_BLOCKS: Final = 512
"""Blocks of a portion, which takes well below a millisecond."""
PORTION_EVENTS: Final = 16
LARGEST_BLOCK_TOKENS: Final = 4096
ATTENTION_KINDS: Final = (None, "full_attention", "mla_attention")
_MEDIUMS: Final = {None: 0, MEDIUM_DEVICE: 0, MEDIUM_HOST: 1, MEDIUM_DISK: 2}
_OTHER_MEDIUM: Final = 3


class NoStreamError(ProtocolError):
    """The instance publishes no cache events in a known form."""


class EventStream(Protocol):
    """The cache events of one instance. It keeps its position, and resumes there with each new connection."""

    @property
    def tally(self) -> tuple[int, int, int]:
        """Batches and snapshots applied, and gaps met, so far."""
        ...

    @property
    def cache_losses(self) -> int:
        """How often the instance lost its whole cache."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the whole cache of the instance is known."""
        ...

    def portions(self) -> AsyncGenerator[Iterator[None], None]:
        """Follow one connection to its end; yield after each applied portion.

        Raises NoStreamError without such a stream, PrfaasError if it is lost or damaged, TimeoutError after silence.
        """
        ...


class CacheEvents:
    def __init__(self, index: InstanceIndex):
        self.emptied = 0
        """How often the instance's cache became empty."""
        self.left_out = 0
        """Blocks of which only the existence is known."""
        self._index = index
        self._attention_group: int | None = None
        self._state_groups: set[int | None] = set()

    def forget(self) -> None:
        self._index.clear()
        self._attention_group, self._state_groups = None, set()

    def clear(self) -> None:
        """Note that the instance has nothing cached."""
        self._index.tree.clear()
        self.left_out = 0

    def take(self, payload: bytes) -> Iterator[None]:
        """Apply a batch portion by portion. Raises ProtocolError for an unreadable batch."""
        for number, event in enumerate(read_events(payload)):
            if number % PORTION_EVENTS == 0:
                yield
            match event:
                case BlockStored():
                    yield from self._stored(event)
                case BlockRemoved():
                    yield from self._removed(event)
                case AllBlocksCleared():
                    self.clear()
                    self.emptied += 1

    def _stored(self, event: BlockStored) -> Iterator[None]:
        self._note_group(event)
        group = self._group(event)
        if group is not None:
            yield from self._place(event, medium_of(event.medium), is_state=group == "state")

    def _place(self, event: BlockStored, medium: int, *, is_state: bool) -> Iterator[None]:
        parent = None if event.parent_block_hash is None else key_of(event.parent_block_hash)
        for keys in portions_of(event.block_hashes):
            self._index.tree.store(keys, parent, is_state, medium)
            parent = keys[-1]
            yield

    def _removed(self, event: BlockRemoved) -> Iterator[None]:
        is_state = event.group_idx in self._state_groups
        if not is_state and event.group_idx not in (None, self._attention_group):
            return
        tree = self._index.tree
        held = len(tree)
        for keys in portions_of(event.block_hashes):
            self._remove(keys, medium_of(event.medium), is_state=is_state)
            yield
        self.emptied += bool(held and not len(tree))

    def _remove(self, keys: list[int], medium: int, *, is_state: bool) -> None:
        self._index.tree.remove(keys, is_state, medium)

    def _note_group(self, event: BlockStored) -> None:
        """Record a group of states, even if none of its blocks is kept."""
        if event.kv_cache_spec_kind == STATE_SPEC_KIND:
            self._index.tree.note_states()

    def _group(self, event: BlockStored) -> Literal["attention", "state"] | None:
        """Return the kind of a group; None for windows, further attention groups, and blocks of another size.

        All attention groups of an engine hold the same prompts, so the first one represents the others.
        """
        if event.kv_cache_spec_kind == STATE_SPEC_KIND:
            # An instance may name as many groups as it likes; a model has a few.
            if len(self._state_groups) < PORTION_BLOCKS:
                self._state_groups.add(event.group_idx)
            return "state"
        if event.kv_cache_spec_kind not in ATTENTION_KINDS or not 1 <= event.block_size <= LARGEST_BLOCK_TOKENS:
            return None
        # Only an empty tree may change its unit: its blocks would mean other tokens.
        if not len(self._index.tree):
            self._attention_group, self._index.block_tokens = event.group_idx, event.block_size
        known = event.group_idx == self._attention_group and event.block_size == self._index.block_tokens
        return "attention" if known else None


def medium_of(name: str | None) -> int:
    return _MEDIUMS.get(name, _OTHER_MEDIUM)


def portions_of(names: list[EventHash]) -> Iterator[list[int]]:
    for start in range(0, len(names), PORTION_BLOCKS):
        yield keys_of(names[start : start + PORTION_BLOCKS])
