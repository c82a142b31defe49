"""Names of byte blocks: what a gateway, which has no tokenizer, matches prompts by.

The canonical bytes of a request are cut into blocks of 256; the hash of each is xxh3 over its bytes, seeded with the
hash before it, so that like a token block's hash it names the whole prefix. The chain hangs on a root that names kind
of request, model and salt (see `canonical`). Only full blocks have names.

xxh3 is quick and not made against an adversary: a collision here costs a detour, never a wrong answer, because workers
decide on the hashes of `blocks`.
"""

from collections.abc import Sequence
from typing import Final

import xxhash

BYTE_BLOCK: Final = 256
"""Bytes of a block."""


def byte_hashes(root: bytes, data: bytes) -> list[int]:
    """Return the chained hashes of the full blocks of canonical bytes, 64-bit each."""
    named, seed = xxhash.xxh3_64_intdigest, xxhash.xxh3_64_intdigest(root)
    hashes: list[int] = []
    for end in range(BYTE_BLOCK, len(data) + 1, BYTE_BLOCK):
        seed = named(data[end - BYTE_BLOCK : end], seed)
        hashes.append(seed)
    return hashes


def block_ends(hashes: Sequence[int]) -> range:
    """Return where each block ends in the canonical bytes: the cuts of `canonical.tokens_before`."""
    return range(BYTE_BLOCK, len(hashes) * BYTE_BLOCK + 1, BYTE_BLOCK)


class ByteChain:
    """The same hashes, each computed when it is asked for: of most prompts the first few say that nothing is known."""

    def __init__(self, root: bytes, data: bytes):
        self.data = data
        self._seed = xxhash.xxh3_64_intdigest(root)
        self._hashes: list[int] = []

    def __len__(self) -> int:
        return len(self.data) // BYTE_BLOCK

    def __getitem__(self, block: int) -> int:
        """Return the hash of a block, counted from 0."""
        hashes = self._hashes
        if block >= len(hashes):
            named, seed, data = xxhash.xxh3_64_intdigest, hashes[-1] if hashes else self._seed, self.data
            for start in range(len(hashes) * BYTE_BLOCK, (block + 1) * BYTE_BLOCK, BYTE_BLOCK):
                seed = named(data[start : start + BYTE_BLOCK], seed)
                hashes.append(seed)
        return hashes[block]

    def all(self) -> list[int]:
        """Return the hashes of all blocks."""
        if len(self):
            _ = self[len(self) - 1]
        return self._hashes
