"""Between the device and the tiers below it: what the pool gives up goes down, what a prompt needs comes up again.

Down, entries are copied as they are evicted, unless a tier has them. Up, a prompt's missing blocks and state are asked
for when the prompt arrives, and put into the pool once all are there, as far as they reach without a gap: an entry that
turned out to be damaged ends the prefix, and the rest is computed.

A copy between an accelerator and the host holds the step loop up, however small it is, so what is decided together is
copied together: one copy for all that gives way at once, one for all that a prompt brings.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from prfaas.kvindex.blocks import BlockHash
from prfaas.wire.transfer import Buffer
from prfaas_worker.cache.announce import Announcer
from prfaas_worker.cache.blocks import Blocks, Evicted, Match
from prfaas_worker.cache.entries import Entry, Name
from prfaas_worker.cache.keeping import Kept, by_worth, keep
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.tiers import Fetch, Tiers

MAX_COPY_BYTES: Final = 64 << 20
"""Copied at once: each copy needs as much again on the device, where memory is short when the pool is full."""


@dataclass(slots=True, eq=False)
class Loading:
    """Entries of a prompt on their way to the device."""

    fetch: Fetch
    chain: Sequence[BlockHash]
    cached_blocks: int
    names: frozenset[Name]

    def done(self) -> bool:
        """Tell whether the prompt can be opened with them."""
        return self.fetch.done()

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called once that is so, from any thread."""
        if self.fetch.reading is None:
            call()
        else:
            self.fetch.reading.add_done_callback(lambda _future: call())


class Below:
    """Moves entries between one memory and its tiers. Used from the engine's thread alone."""

    def __init__(self, memory: CacheMemory, blocks: Blocks, tiers: Tiers, announcer: Announcer):
        self.tiers = tiers
        self.host_hit_tokens = self.disk_hit_tokens = 0
        self._memory, self._blocks, self._announcer = memory, blocks, announcer
        self._geometry = memory.geometry
        self._loadings: list[Loading] = []
        self._brought: dict[Name, tuple[tuple[int, ...], Buffer]] = {}  # has pages, and is not in them yet
        tiers.listen(announcer.tier_changed)

    def put(self, gone: Sequence[Evicted]) -> None:
        """Copy what the pool gives up to the tiers, while its bytes still stand there."""
        self._write_brought()  # some of it may be among what gives way
        self.tiers.poll()
        wanted = (Name(one.key, one.is_state) for one in gone if not one.spent)
        places = {Name(one.key, one.is_state): one.pages for one in gone}
        for names in self._copies(name for name in wanted if self.tiers.wants(name, self._size(name))):
            for entry in self._read({name: places[name] for name in names}):
                self.tiers.put(entry)

    def pending(self, chain: Sequence[BlockHash]) -> Loading | None:
        """Start bringing what makes a longer match of this chain; None when there is nothing, or no room for it."""
        self.tiers.poll()
        self.adopt_loaded()
        match = self._blocks.match(chain, len(chain))
        names = self._wanted(chain, match)
        all_names = frozenset(names).union(*(loading.names for loading in self._loadings))
        under_way = sum(self._geometry.pages_per_state if name.is_state else 1 for name in all_names)
        # Until it is taken it stands in host memory, which is not endless.
        if not names or 2 * under_way > self._memory.num_pages or under_way > self._blocks.free_pages:
            return None
        loading = Loading(self.tiers.fetch(names), chain, match.state_blocks, frozenset(names))
        self._loadings.append(loading)
        return loading

    def adopt_loaded(self) -> None:
        """Put what has come into the pool."""
        while self._loadings and self._loadings[0].done():
            loading = self._loadings.pop(0)
            self._adopt(loading, {entry.name: entry for entry in self.tiers.take(loading.fetch)})

    def clear(self) -> None:
        """Forget what the tiers have and what is on its way."""
        self._loadings.clear()
        self.tiers.clear()

    def keep(self, seconds_left: Callable[[], float]) -> Kept | None:
        """Write to the disk what would be of use after a restart; None where there is no disk."""
        if self.tiers.disk is None:
            return None
        self.tiers.poll()
        states, blocks = self._blocks.newest()
        on_host = self.tiers.newest_on_host()
        states += [name.key for name in on_host if name.is_state]
        blocks += [name.key for name in on_host if not name.is_state]
        copies = (copy for names in by_worth(states, blocks, self._parent) for copy in self._copies(names))
        return keep(copies, self._read_anywhere, self.tiers.disk, seconds_left)

    def _parent(self, key: BlockHash) -> BlockHash | None:
        """Return the block before this one, None where it is the first or memory has neither."""
        if self._blocks.page(key) is not None:
            return self._announcer.about(key).parent
        entry = self.tiers.on_host(Name(key))
        return entry.about.parent if entry is not None else None

    def _read_anywhere(self, names: Sequence[Name]) -> Iterator[Entry]:
        """Copy entries from the device and from host memory, in this order; those that neither has are left out."""
        pages = {name: self._blocks.pages_of(name.key, is_state=name.is_state) for name in names}
        on_device = self._read({name: found for name, found in pages.items() if found})
        for name, found in pages.items():
            entry = next(on_device) if found else self.tiers.on_host(name)
            if entry is not None:
                yield entry

    def _wanted(self, chain: Sequence[BlockHash], match: Match) -> list[Name]:
        """Return what the device lacks of the longest match that it and the tiers have together."""
        blocks, tiers = self._blocks, self.tiers
        absent: list[Name] = []
        wanted: list[Name] = []
        for length, key in enumerate(chain, 1):
            if blocks.page(key) is None:
                if Name(key) not in tiers:
                    break
                absent.append(Name(key))
            if length <= match.state_blocks:
                continue
            if not self._geometry.pages_per_state or blocks.has_state(key):
                wanted = absent[:]
            elif Name(key, True) in tiers:
                wanted = [*absent, Name(key, True)]
        return wanted

    def _adopt(self, loading: Loading, entries: dict[Name, Entry]) -> None:
        blocks, chain = self._blocks, loading.chain
        reached = list(self._reached(chain, entries))
        here = [page for key in reached if (page := blocks.page(key)) is not None]
        # Held meanwhile, and the tail first: a chain's head must not give way to its tail, now or later.
        blocks.hold(here)
        for key in reversed(reached):
            self._fill(entries.get(Name(key)))
        blocks.release(here)
        for key in reached:
            self._fill(entries.get(Name(key, True)))
        self._write_brought()
        gained = blocks.match(chain, len(chain)).state_blocks - loading.cached_blocks
        if loading.fetch.reading is None:
            self.host_hit_tokens += max(0, gained) * self._geometry.page_tokens
        else:
            self.disk_hit_tokens += max(0, gained) * self._geometry.page_tokens

    def _reached(self, chain: Sequence[BlockHash], entries: dict[Name, Entry]) -> Iterator[BlockHash]:
        for key in chain:
            if self._blocks.page(key) is None and Name(key) not in entries:
                return
            yield key

    def _fill(self, entry: Entry | None) -> None:
        """Give an entry pages, if it is wanted and there are any; `_write_brought` copies it there."""
        # Pages may have had another size when it was written.
        if entry is None or len(entry.payload) != self._size(entry.name):
            return
        key = entry.name.key
        pages = self._blocks.adopt_state(key) if entry.name.is_state else self._blocks.adopt_block(key)
        if pages is None:
            return
        self._announcer.adopted(entry.name, entry.about)
        self._brought[entry.name] = pages, entry.payload

    def _write_brought(self) -> None:
        for names in self._copies(self._brought):
            brought = [self._brought[name] for name in names]
            self._memory.write_pages([page for pages, _ in brought for page in pages], [piece for _, piece in brought])
        self._brought.clear()

    def _read(self, places: dict[Name, tuple[int, ...]]) -> Iterator[Entry]:
        """Copy entries from the device, together."""
        content = self._memory.read_pages([page for pages in places.values() for page in pages])
        at = 0
        for name in places:
            end = at + self._size(name)
            yield Entry(name, self._announcer.about(name.key), bytearray(content[at:end]))
            at = end

    def _copies(self, names: Iterable[Name]) -> Iterator[list[Name]]:
        """Divide entries into what is copied at once."""
        batch: list[Name] = []
        size = 0
        for name in names:
            if batch and size + self._size(name) > MAX_COPY_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(name)
            size += self._size(name)
        if batch:
            yield batch

    def _size(self, name: Name) -> int:
        return self._geometry.page_bytes * (self._geometry.pages_per_state if name.is_state else 1)
