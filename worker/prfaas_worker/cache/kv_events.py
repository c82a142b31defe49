"""Reports changes of the prefix cache to routers, as vLLM's KV cache events.

Attention blocks and state checkpoints are different groups. A block's event needs its tokens, which the pool does not
know. They are remembered here, and go with an entry to the tiers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prfaas.kvindex.blocks import BlockChain, BlockHash
from prfaas.wire.kvevents import (
    ATTENTION_GROUP,
    MEDIUM_DEVICE,
    MEDIUM_DISK,
    MEDIUM_HOST,
    STATE_GROUP,
    AllBlocksCleared,
    AttentionSpecKind,
    BlockRemoved,
    KvEvent,
    attention_stored,
    state_stored,
)
from prfaas_worker.cache.blocks import Evicted
from prfaas_worker.cache.entries import BlockContent, EntryName
from prfaas_worker.cache.tiers import Tier

_MEDIUMS: Final[dict[Tier, str]] = {"host": MEDIUM_HOST, "disk": MEDIUM_DISK}


class CacheEventRecorder:
    """Turns cache changes into events, and remembers the content of every block on the device."""

    def __init__(self, on_event: Callable[[KvEvent], None] | None, kind: AttentionSpecKind):
        self._on_event = on_event or (lambda _: None)
        self._kind: AttentionSpecKind = kind
        self._contents: dict[BlockHash, BlockContent] = {}

    def content_of(self, key: BlockHash) -> BlockContent:
        return self._contents[key]

    def record_published(self, chain: BlockChain, blocks: Sequence[int]) -> None:
        """Report new blocks of a chain, ascending; neighbours share an event."""
        for first, last in _runs(blocks):
            for block in range(first, last):
                content = BlockContent(chain.parent(block), chain.token_ids(block, block + 1))
                self._contents[chain.hashes[block]] = content
            hashes: list[BlockHash | int] = [*chain.hashes[first:last]]
            tokens = chain.token_ids(first, last).tolist()
            self._on_event(attention_stored(hashes, chain.parent(first), tokens, self._kind, MEDIUM_DEVICE))

    def record_adopted(self, name: EntryName, content: BlockContent) -> None:
        """Report an entry that a tier returned to the device."""
        if not name.is_state:
            self._contents[name.key] = content
        self._report_stored(name, content, MEDIUM_DEVICE)

    def record_checkpoint(self, key: BlockHash) -> None:
        self._report_stored(EntryName(key, True), self._contents[key], MEDIUM_DEVICE)

    def record_evicted(self, evicted: Sequence[Evicted]) -> None:
        for is_state, group in ((True, STATE_GROUP), (False, ATTENTION_GROUP)):
            keys: list[BlockHash | int] = [one.key for one in evicted if one.is_state == is_state]
            if keys:
                self._on_event(BlockRemoved(keys, MEDIUM_DEVICE, group))
        for one in evicted:
            if not one.is_state:
                del self._contents[one.key]

    def record_tier_change(self, name: EntryName, tier: Tier, content: BlockContent | None) -> None:
        """Report an entry that a tier got, or lost if `content` is None."""
        if content is not None:
            self._report_stored(name, content, _MEDIUMS[tier])
        else:
            self._on_event(BlockRemoved([name.key], _MEDIUMS[tier], STATE_GROUP if name.is_state else ATTENTION_GROUP))

    def record_cleared(self) -> None:
        self._contents.clear()
        self._on_event(AllBlocksCleared())

    def _report_stored(self, name: EntryName, content: BlockContent, medium: str) -> None:
        tokens = content.token_ids.tolist()
        if name.is_state:
            self._on_event(state_stored(name.key, content.parent, tokens, medium))
        else:
            self._on_event(attention_stored([name.key], content.parent, tokens, self._kind, medium))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive numbers, each as (first, end)."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[begin], numbers[at - 1] + 1
            begin = at
