"""Names of byte blocks, by which a gateway without a tokenizer matches prompts.

The canonical bytes of a request are cut into blocks of 256. The hash of each block is xxh3 over its bytes, seeded with
the hash before it. So the hash names the whole prefix, like a token block's. The chain begins with a root of request
kind, model and salt (see `canonical`). Only full blocks have names.

xxh3 is fast and not safe against an adversary. A collision costs a detour, never a wrong answer, because workers decide
on the hashes of `blocks`.
"""

from collections.abc import Sequence
from typing import Final

import xxhash

BYTE_BLOCK: Final = 256
TOKEN_ROOT: Final = b"token ids"
"""No root of canonical bytes: those are msgpack arrays."""


def byte_hashes(root: bytes, data: bytes) -> list[int]:
    """Return the chained hashes of the full blocks of canonical bytes, 64-bit each."""
    return chained(xxhash.xxh3_64_intdigest(root), data, BYTE_BLOCK)


def chained(seed: int, data: bytes, block_bytes: int) -> list[int]:
    """Return the hashes of the full blocks that follow the block with hash `seed`."""
    named, hashes = xxhash.xxh3_64_intdigest, list[int]()
    for end in range(block_bytes, len(data) + 1, block_bytes):
        seed = named(data[end - block_bytes : end], seed)
        hashes.append(seed)
    return hashes


def token_root(salt: str) -> bytes:
    """Return the root of chains over token ids of foreign engines, whose own names cannot be computed here."""
    return TOKEN_ROOT + salt.encode()


def token_seed(salt: str) -> int:
    """Return the seed of these chains."""
    return xxhash.xxh3_64_intdigest(token_root(salt))


def block_ends(hashes: Sequence[int]) -> range:
    """Return the end of each block in the canonical bytes: the cuts of `canonical.tokens_before`."""
    return range(BYTE_BLOCK, len(hashes) * BYTE_BLOCK + 1, BYTE_BLOCK)


class ByteChain:
    """The same hashes, computed on demand: most prompts are unknown after the first few."""

    def __init__(self, root: bytes, data: bytes, block_bytes: int = BYTE_BLOCK):
        self.data = data
        self._block_bytes = block_bytes
        self._seed = xxhash.xxh3_64_intdigest(root)
        self._hashes: list[int] = []

    def __len__(self) -> int:
        return len(self.data) // self._block_bytes

    def __getitem__(self, block: int) -> int:
        hashes, size = self._hashes, self._block_bytes
        if block >= len(hashes):
            data = self.data[len(hashes) * size : (block + 1) * size]
            hashes += chained(hashes[-1] if hashes else self._seed, data, size)
        return hashes[block]

    def all(self) -> list[int]:
        if len(self):
            _ = self[len(self) - 1]
        return self._hashes
