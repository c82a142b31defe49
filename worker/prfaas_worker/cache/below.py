"""Between the device and the tiers below it: what the pool gives up goes down, what a prompt needs comes up again.

Down, an entry is copied as it is evicted, unless a tier has it. Up, a prompt's missing blocks and state are asked for
when the prompt arrives, and put into the pool once all are there, as far as they reach without a gap: an entry that
turned out to be damaged ends the prefix, and the rest is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from prfaas.kvindex.blocks import BlockHash
from prfaas_worker.cache.announce import Announcer
from prfaas_worker.cache.blocks import Blocks, Evicted, Match
from prfaas_worker.cache.entries import Entry, Name
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.tiers import Fetch, Tiers


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
        tiers.listen(announcer.tier_changed)

    def put(self, gone: Sequence[Evicted]) -> None:
        """Copy what the pool gives up to the tiers, while its bytes still stand there."""
        self.tiers.poll()
        for one in gone:
            name = Name(one.key, one.is_state)
            if not one.spent and self.tiers.wants(name, len(one.pages) * self._geometry.page_bytes):
                self.tiers.put(Entry(name, self._announcer.about(one.key), self._read(one.pages)))

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
        """Give an entry pages, if it is wanted and there are any, and copy it there."""
        if entry is None:
            return
        count = self._geometry.pages_per_state if entry.name.is_state else 1
        if len(entry.payload) != count * self._geometry.page_bytes:  # pages had another size when it was written
            return
        key = entry.name.key
        pages = self._blocks.adopt_state(key) if entry.name.is_state else self._blocks.adopt_block(key)
        if pages is None:
            return
        source = torch.frombuffer(entry.payload, dtype=torch.uint8).view(len(pages), -1)
        self._memory.pages[torch.tensor(pages)] = source.to(self._memory.device)
        self._announcer.adopted(entry.name, entry.about)

    def _read(self, pages: Sequence[int]) -> bytearray:
        return bytearray(self._memory.pages[torch.tensor(pages)].cpu().numpy().data.cast("B"))
