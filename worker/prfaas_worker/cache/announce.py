"""What the prefix cache tells routers: its changes as vLLM's cache events, and what it must remember to tell them.

Attention blocks and state checkpoints are told apart by group; a block's event needs the tokens in it, which the pool
does not know. The same facts go with an entry to the tiers below.
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
from prfaas_worker.cache.entries import About, Name
from prfaas_worker.cache.tiers import Tier

MEDIUMS: Final[dict[Tier, str]] = {"host": MEDIUM_HOST, "disk": MEDIUM_DISK}


class Announcer:
    """Turns changes into events, and knows what every block on the device holds."""

    def __init__(self, on_event: Callable[[KvEvent], None] | None, kind: AttentionSpecKind):
        self._on_event = on_event or (lambda _: None)
        self._kind: AttentionSpecKind = kind
        self._about: dict[BlockHash, About] = {}

    def about(self, key: BlockHash) -> About:
        """Return what a block on the device holds."""
        return self._about[key]

    def published(self, chain: BlockChain, blocks: Sequence[int]) -> None:
        """Tell of blocks of a chain, ascending, that the device has now; one event for neighbours."""
        for first, last in _runs(blocks):
            for block in range(first, last):
                about = About(chain.parent(block), chain.token_ids(block, block + 1))
                self._about[chain.hashes[block]] = about
            hashes: list[BlockHash | int] = [*chain.hashes[first:last]]
            tokens = chain.token_ids(first, last).tolist()
            self._on_event(attention_stored(hashes, chain.parent(first), tokens, self._kind, MEDIUM_DEVICE))

    def adopted(self, name: Name, about: About) -> None:
        """Tell of an entry that came to the device from below."""
        if not name.is_state:
            self._about[name.key] = about
        self._tell_stored(name, about, MEDIUM_DEVICE)

    def kept_state(self, key: BlockHash) -> None:
        """Tell of a checkpoint that the device has now."""
        self._tell_stored(Name(key, True), self._about[key], MEDIUM_DEVICE)

    def evicted(self, gone: Sequence[Evicted]) -> None:
        """Tell of what the device gave up."""
        for is_state, group in ((True, STATE_GROUP), (False, ATTENTION_GROUP)):
            keys: list[BlockHash | int] = [one.key for one in gone if one.is_state == is_state]
            if keys:
                self._on_event(BlockRemoved(keys, MEDIUM_DEVICE, group))
        for one in gone:
            if not one.is_state:
                del self._about[one.key]

    def tier_changed(self, name: Name, tier: Tier, about: About | None) -> None:
        """Tell of an entry that a tier below got, or gave up."""
        if about is not None:
            self._tell_stored(name, about, MEDIUMS[tier])
        else:
            self._on_event(BlockRemoved([name.key], MEDIUMS[tier], STATE_GROUP if name.is_state else ATTENTION_GROUP))

    def cleared(self) -> None:
        """Tell that everything is forgotten."""
        self._about.clear()
        self._on_event(AllBlocksCleared())

    def _tell_stored(self, name: Name, about: About, medium: str) -> None:
        tokens = about.token_ids.tolist()
        if name.is_state:
            self._on_event(state_stored(name.key, about.parent, tokens, medium))
        else:
            self._on_event(attention_stored([name.key], about.parent, tokens, self._kind, medium))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the stretches of consecutive numbers, each as its first and the one behind its last."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[begin], numbers[at - 1] + 1
            begin = at
