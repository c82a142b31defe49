"""What one instance says of its cache, batch by batch, taken into its part of the index.

Events come in portions between which the caller may let others run. Those of our workers are taken as they are: their
byte map says which prompts they belong to. Engines of others have none. What they tell instead are the token ids of
each block, so a prompt that comes as token ids is found by a chain over blocks of as many tokens as theirs, which is
computed here once for each block and put where the byte map would be.
"""

import struct
from array import array
from collections.abc import Iterator
from typing import Final, Literal

from prfaas.errors import ProtocolError
from prfaas.kvindex.bytes import chained, token_seed
from prfaas.kvindex.canonical import TOKEN_BYTES
from prfaas.kvindex.index import InstanceIndex
from prfaas.kvindex.keys import NONE, key_of, keys_of
from prfaas.wire.kvevents import (
    MEDIUM_DEVICE,
    MEDIUM_DISK,
    MEDIUM_HOST,
    STATE_SPEC_KIND,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    read_events,
)

PORTION_BLOCKS: Final = 512
"""Taken in at once: well below a millisecond."""
PORTION_EVENTS: Final = 16
LARGEST_BLOCK_TOKENS: Final = 4096
_ATTENTION_KINDS: Final = (None, "full_attention", "mla_attention")
_MEDIUMS: Final = {None: 0, MEDIUM_DEVICE: 0, MEDIUM_HOST: 1, MEDIUM_DISK: 2}
_OTHER_MEDIUM: Final = 3
_NOWHERE: Final = -1
"""A parent that no tree has: Python's hash is never -1."""


class CacheEvents:
    """The events of one instance.

    Args:
        index: the instance's own part.

    """

    def __init__(self, index: InstanceIndex):
        self.emptied = 0
        """Times that the instance said, or that its last removal meant, that nothing is cached any more."""
        self._index = index
        self._attention_group: int | None = None
        self._state_groups: set[int | None] = set()

    def forget(self) -> None:
        """Forget everything, as of an instance that began anew."""
        self._index.clear()
        self._attention_group, self._state_groups = None, set()

    def take(self, payload: bytes) -> Iterator[None]:
        """Take in a batch.

        Raises:
            ProtocolError: it cannot be read.

        """
        for number, event in enumerate(read_events(payload)):
            if number % PORTION_EVENTS == 0:
                yield
            match event:
                case BlockStored():
                    yield from self._stored(event)
                case BlockRemoved():
                    yield from self._removed(event)
                case AllBlocksCleared():
                    self._index.tree.clear()
                    self.emptied += 1

    def _stored(self, event: BlockStored) -> Iterator[None]:
        group = self._group(event)
        if group is not None:
            yield from self._placed(event, _medium(event.medium), is_state=group == "state")

    def _placed(self, event: BlockStored, medium: int, *, is_state: bool) -> Iterator[None]:
        """Put the blocks of an event where they belong."""
        parent = None if event.parent_block_hash is None else key_of(event.parent_block_hash)
        for keys in _portions(event.block_hashes):
            self._index.tree.store(keys, parent, is_state, medium)
            parent = keys[-1]
            yield

    def _removed(self, event: BlockRemoved) -> Iterator[None]:
        is_state = event.group_idx in self._state_groups
        if not is_state and event.group_idx not in (None, self._attention_group):
            return
        tree = self._index.tree
        held = len(tree)
        for keys in _portions(event.block_hashes):
            self._gone(keys, _medium(event.medium), is_state=is_state)
            yield
        self.emptied += bool(held and not len(tree))

    def _gone(self, keys: list[int], medium: int, *, is_state: bool) -> None:
        self._index.tree.remove(keys, is_state, medium)

    def _group(self, event: BlockStored) -> Literal["attention", "state"] | None:
        """Return what a group holds; None for windows, further attention groups, and blocks of another size.

        All attention groups of an engine hold the same prompts, so the first one stands for the others.
        """
        if event.kv_cache_spec_kind == STATE_SPEC_KIND:
            if len(self._state_groups) < PORTION_BLOCKS:
                self._state_groups.add(event.group_idx)
            return "state"
        if event.kv_cache_spec_kind not in _ATTENTION_KINDS or not 1 <= event.block_size <= LARGEST_BLOCK_TOKENS:
            return None
        if not len(self._index.tree):
            self._attention_group, self._index.block_tokens = event.group_idx, event.block_size
        known = event.group_idx == self._attention_group and event.block_size == self._index.block_tokens
        return "attention" if known else None


class ForeignEvents(CacheEvents):
    """The events of an engine of others.

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
        """Forget everything, as of an instance that began anew."""
        super().forget()
        self.left_out = 0

    def take(self, payload: bytes) -> Iterator[None]:
        """Take in a batch; see `CacheEvents.take`."""
        self._early.clear()
        yield from super().take(payload)
        for key, medium in self._early.items():
            self._note([key], medium, is_state=True)

    def _placed(self, event: BlockStored, medium: int, *, is_state: bool) -> Iterator[None]:
        if is_state:
            yield from self._states(event, medium)
            return
        size = event.block_size
        parent = None if event.parent_block_hash is None else key_of(event.parent_block_hash)
        # Of other tiers some engines tell names alone, and of blocks that are known that is enough.
        has_tokens = len(event.token_ids) == size * len(event.block_hashes)
        if not has_tokens or _is_apart(event) or (parent is not None and self._index.tree.find(parent) == NONE):
            for keys in _portions(event.block_hashes):
                self._note(keys, medium, is_state=False)
                yield
            return
        at = 0
        for keys in _portions(event.block_hashes):
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
        for keys in _portions(event.block_hashes):
            known = [key for key in keys if self._index.tree.find(key) != NONE]
            self._note(known, medium, is_state=True)
            self._early.update(dict.fromkeys(set(keys).difference(known), medium))
            yield

    def _gone(self, keys: list[int], medium: int, *, is_state: bool) -> None:
        super()._gone(keys, medium, is_state=is_state)
        if is_state:
            for key in keys:
                self._early.pop(key, None)

    def _note(self, keys: list[int], medium: int, *, is_state: bool) -> None:
        """Note what there is of blocks that are known."""
        known = [key for key in keys if self._index.tree.find(key) != NONE]
        self.left_out += len(keys) - len(known)
        self._index.tree.store(known, _NOWHERE, is_state, medium)


def _is_apart(event: BlockStored) -> bool:
    """Tell whether blocks are for prompts with more than tokens to them."""
    has_keys = event.extra_keys is not None and any(event.extra_keys)
    return has_keys or event.lora_id is not None or event.lora_name is not None


def _medium(name: str | None) -> int:
    return _MEDIUMS.get(name, _OTHER_MEDIUM)


def _portions(names: list[BlockHash]) -> Iterator[list[int]]:
    for start in range(0, len(names), PORTION_BLOCKS):
        yield keys_of(names[start : start + PORTION_BLOCKS])
