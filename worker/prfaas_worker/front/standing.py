"""What stands in the prefix cache now, kept from the engine's events, for readers that come too late for the events.

The engine owns the truth and tells every change in order, so the sum of its events is the truth as well. Kept here, in
a few hundred bytes a block, it costs no step of the engine when a reader comes; a block is kept once, whatever tiers
it stands in.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from prfaas.wire.kvevents import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent

EVENTS_PER_BATCH: Final = 256
"""Writing so many takes about a millisecond, after which the event loop goes on."""


class Place(NamedTuple):
    """Where a block stands: in which group and medium, and what the group is."""

    group: int | None
    medium: str | None
    kind: str | None


class Block(NamedTuple):
    """A block that stands in one place at least."""

    parent: BlockHash | None
    token_ids: array
    places: frozenset[Place]


Blocks: TypeAlias = Mapping[BlockHash, Block]


class Standing:
    """The blocks that the events so far left."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, Block] = {}
        # There are few sets of places, and many blocks that have each.
        self._sets: dict[frozenset[Place], frozenset[Place]] = {}

    def take(self, events: Sequence[KvEvent]) -> None:
        """Change with the cache."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._blocks.clear()

    def blocks(self) -> Blocks:
        """Return what stands now; later events do not change it."""
        return self._blocks.copy()

    def _store(self, event: BlockStored) -> None:
        place = Place(event.group_idx, event.medium, event.kv_cache_spec_kind)
        parent, size = event.parent_block_hash, event.block_size
        for number, key in enumerate(event.block_hashes):
            known = self._blocks.get(key)
            if known is None:
                token_ids = array("I", event.token_ids[number * size : (number + 1) * size])
                self._put(key, Block(parent, token_ids, frozenset([place])))
            else:
                self._put(key, known._replace(places=known.places | {place}))
            parent = key

    def _remove(self, event: BlockRemoved) -> None:
        for key in event.block_hashes:
            known = self._blocks.get(key)
            if known is None:
                continue
            left = frozenset(one for one in known.places if (one.group, one.medium) != (event.group_idx, event.medium))
            if left:
                self._put(key, known._replace(places=left))
            else:
                del self._blocks[key]

    def _put(self, key: BlockHash, block: Block) -> None:
        self._blocks[key] = block._replace(places=self._sets.setdefault(block.places, block.places))


def batch_count(blocks: Blocks) -> int:
    """Return how many batches `batches` makes."""
    return -(-(1 + sum(len(block.places) for block in blocks.values())) // EVENTS_PER_BATCH)


def batches(blocks: Blocks) -> Iterator[list[KvEvent]]:
    """Yield the events that lead from whatever was known to these blocks, parents before their children."""
    batch: list[KvEvent] = [AllBlocksCleared()]
    for key in _parents_first(blocks):
        for event in _stored(key, blocks[key]):
            if len(batch) == EVENTS_PER_BATCH:
                yield batch
                batch = []
            batch.append(event)
    yield batch


def _stored(key: BlockHash, block: Block) -> Iterator[BlockStored]:
    token_ids = block.token_ids.tolist()
    for place in sorted(block.places, key=lambda place: (place.group or 0, place.medium or "")):
        yield BlockStored(
            block_hashes=[key],
            parent_block_hash=block.parent,
            token_ids=token_ids,
            block_size=len(token_ids),
            medium=place.medium,
            group_idx=place.group,
            kv_cache_spec_kind=place.kind,
        )


def _parents_first(blocks: Blocks) -> Iterator[BlockHash]:
    told: set[BlockHash] = set()
    for key in blocks:
        path: list[BlockHash] = []
        above: BlockHash | None = key
        while above is not None and above in blocks and above not in told:
            told.add(above)
            path.append(above)
            above = blocks[above].parent
        yield from reversed(path)
