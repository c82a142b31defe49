"""Reports changes of the prefix cache to routers, as vLLM's KV cache events.

Attention blocks and state checkpoints are different groups. An event has the hash that comes before, which the pool
does not know: the chain of the sequence has it.
"""

from collections.abc import Callable, Iterator, Sequence

from prfaas.kvindex.blocks import BlockChain, BlockHash
from prfaas.wire.kvevents import (
    ATTENTION_GROUP,
    MEDIUM_DEVICE,
    STATE_GROUP,
    AllBlocksCleared,
    AttentionSpecKind,
    BlockRemoved,
    KvEvent,
    attention_stored,
    state_stored,
)
from prfaas_worker.cache.blocks import Evicted


class CacheEventRecorder:
    """Turns cache changes into events."""

    def __init__(self, on_event: Callable[[KvEvent], None] | None, kind: AttentionSpecKind):
        self._on_event = on_event or (lambda _: None)
        self._kind: AttentionSpecKind = kind

    def record_published(self, chain: BlockChain, blocks: Sequence[int]) -> None:
        """Report new blocks of a chain, ascending; neighbours share an event."""
        for first, last in _runs(blocks):
            hashes: list[BlockHash | int] = [*chain.hashes[first:last]]
            self._on_event(attention_stored(hashes, chain.parent(first), chain.block_tokens, self._kind))

    def record_checkpoint(self, chain: BlockChain, block: int) -> None:
        self._on_event(state_stored(chain.hashes[block], chain.parent(block), chain.block_tokens))

    def record_evicted(self, evicted: Sequence[Evicted]) -> None:
        for is_state, group in ((True, STATE_GROUP), (False, ATTENTION_GROUP)):
            keys: list[BlockHash | int] = [one.key for one in evicted if one.is_state == is_state]
            if keys:
                self._on_event(BlockRemoved(keys, MEDIUM_DEVICE, group))

    def record_cleared(self) -> None:
        self._on_event(AllBlocksCleared())


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive numbers, each as (first, end)."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[begin], numbers[at - 1] + 1
            begin = at
