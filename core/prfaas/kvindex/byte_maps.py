"""Maps byte blocks to token blocks of an instance, and remembers prompts that were sent to an instance.

Both keep two generations and drop the older one when the newer one is full. So the oldest entries go first, no entry is
moved, and memory is bounded. Both are closed under prefixes, so a chain is searched by galloping and bisection. The
reason: a client sends the whole prompt. An instance reports all blocks of a request except those that it reported
before, and each look-up renews these.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prfaas.kvindex.bytes import BYTE_BLOCK, ByteChain
from prfaas.kvindex.keys import Keys, key_of

NO_BLOCK: Final = -1
"""In place of a block's key: no whole block of tokens is behind a byte block. Python's hash is never -1."""
GENERATION_BLOCKS: Final = 1 << 14
"""Byte blocks of a generation of prompts sent to one instance: 4 MiB of text, a million tokens."""
GENERATION_SECONDS: Final = 600.0
"""Longest age of a generation; prompts that were not sent again for two generations count as evicted."""


def last_where(count: int, is_so: Callable[[int], bool]) -> int:
    """Return the last of `count` places at which `is_so` holds, -1 for none; it also holds at all places before.

    Galloping comes first because most prompts match little: the work grows with the logarithm of the answer.
    """
    low, step = -1, 1
    while low + step < count and is_so(low + step):
        low += step
        step *= 4
    high = min(low + step, count)
    while high - low > 1:
        middle = (low + high) // 2
        if is_so(middle):
            low = middle
        else:
            high = middle
    return low


class ByteMap:
    """Maps hashes of byte blocks of one instance to keys of token blocks."""

    def __init__(self, max_pairs: int):
        self._max_pairs = max_pairs
        self.clear()

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def clear(self) -> None:
        self._new, self._old = _Generation(), _Generation()

    def learn(self, byte_hashes: Sequence[int], blocks: Iterable[int]) -> None:
        if len(self._new) >= self._max_pairs:
            self._old, self._new = self._new, _Generation()
        self._new.learn(byte_hashes, blocks)

    def get(self, byte_hash: int) -> int | None:
        """Return the key of the token block behind a byte block, None if unknown."""
        key = hash(byte_hash.to_bytes(8, "little"))
        number = self._new.keys.find(key)
        if number:
            return self._new.blocks[number]
        number = self._old.keys.find(key)
        return self._old.blocks[number] if number else None

    def renew(self, chain: ByteChain, count: int) -> None:
        """Move the first `count` blocks of a chain to the newer generation if the last of them is in the older one."""
        if not len(self._old) or self._new.keys.find(key_of(chain[count - 1])):
            return
        known = [(one, block) for one in chain.all()[:count] if (block := self.get(one)) is not None]
        self.learn([one for one, _ in known], [block for _, block in known])


class _Generation:
    def __init__(self) -> None:
        self.keys = Keys()
        self.blocks = array("q", [0, 0])

    def __len__(self) -> int:
        return len(self.keys)

    def learn(self, byte_hashes: Sequence[int], blocks: Iterable[int]) -> None:
        for number, block in zip(self.keys.numbers([key_of(one) for one in byte_hashes]), blocks, strict=True):
            if number == len(self.blocks):
                self.blocks.append(block)
            else:
                self.blocks[number] = block


class SentPrompts:
    """The prompts sent to an instance that publishes no cache events."""

    def __init__(self, now_seconds: float):
        self._new: set[int] = set()
        self._old: set[int] = set()
        self._since_seconds = now_seconds

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def add(self, chain: ByteChain, now_seconds: float) -> None:
        """Record a sent prompt; of a prompt larger than a generation only the beginning."""
        self._turn(now_seconds)
        self._new.update(chain.all()[:GENERATION_BLOCKS])

    def match(self, chain: ByteChain, now_seconds: float) -> int:
        """Return how many leading bytes of a prompt were sent before."""
        self._turn(now_seconds)
        new, old = self._new, self._old
        return BYTE_BLOCK * (1 + last_where(len(chain), lambda at: chain[at] in new or chain[at] in old))

    def _turn(self, now_seconds: float) -> None:
        age_seconds = now_seconds - self._since_seconds
        if age_seconds >= 2 * GENERATION_SECONDS:
            self._new.clear()
        if age_seconds >= GENERATION_SECONDS or len(self._new) >= GENERATION_BLOCKS:
            self._old, self._new, self._since_seconds = self._new, set(), now_seconds
