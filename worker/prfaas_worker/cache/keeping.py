"""What an orderly end writes to the disk: the prefixes that memory has and the disk lacks, most valuable first.

The time for it is short, so the order matters. A prefix is of use with a state at its end and all blocks before that,
so each state is written right behind the blocks that it stands on, beginning with the state that was of use last. An
end that is cut short, even by a kill, leaves what is whole: a file stands there wholly or not at all.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from prfaas.kvindex.blocks import BlockHash
from prfaas_worker.cache.disk import DiskTier
from prfaas_worker.cache.entries import Entry, Name, header_bytes

_APART_SECONDS: Final = 0.001
"""Files are dated so far apart, so that a restart knows which of them was of use last."""


class Kept(NamedTuple):
    """What became of all entries: so many stand on the disk, for which so much was written, and the others do not."""

    entries: int = 0
    written_bytes: int = 0
    left_out: int = 0


def by_worth(
    states: Iterable[BlockHash], blocks: Iterable[BlockHash], parent: Callable[[BlockHash], BlockHash | None]
) -> Iterator[list[Name]]:
    """Yield all entries, in lists that complete a prefix each; the blocks that no state stands on come last.

    `states` and `blocks` begin with what was of use last; `parent` is None for a first block and for one that memory
    does not have.
    """
    taken: set[BlockHash] = set()
    for state in dict.fromkeys(states):
        path: list[Name] = []
        key: BlockHash | None = state
        while key is not None and key not in taken:
            taken.add(key)
            path.append(Name(key))
            key = parent(key)
        yield [*reversed(path), Name(state, True)]
    yield [Name(key) for key in dict.fromkeys(blocks) if key not in taken]


def keep(
    copies: Iterable[Sequence[Name]],
    read: Callable[[Sequence[Name]], Iterable[Entry]],
    disk: DiskTier,
    seconds_left: Callable[[], float],
) -> Kept:
    """Keep entries in this order, for as long as there is time, and for as many bytes as the disk may hold.

    `copies` are those that `read` copies at once. An entry that cannot be written costs itself alone.
    """
    entries = total_bytes = written_bytes = left_out = 0
    now = time.time()
    for names in copies:
        sizes = {name: disk.holds(name) for name in names}
        entries += sum(size > 0 for size in sizes.values())
        total_bytes += sum(sizes.values())
        absent = [name for name, size in sizes.items() if not size]
        left_out += len(absent)
        if not absent or seconds_left() <= 0 or total_bytes >= disk.max_bytes:
            continue
        for entry in read(absent):
            size = header_bytes(entry.about) + len(entry.payload)
            # What goes beyond the bound would push out what was written before it, and is worth more.
            fits = total_bytes + size <= disk.max_bytes
            if seconds_left() > 0 and fits and disk.keep(entry, now - entries * _APART_SECONDS):
                entries, left_out = entries + 1, left_out - 1
                total_bytes, written_bytes = total_bytes + size, written_bytes + size
    disk.finish(seconds_left())
    return Kept(entries, written_bytes, left_out)
