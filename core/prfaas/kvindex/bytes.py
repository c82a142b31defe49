"""Names of byte blocks, by which a gateway without a tokenizer matches prompts.

The canonical bytes of a request are cut into blocks of 256. The hash of each block is xxh3 over its bytes, seeded with
the hash before it. So the hash names the whole prefix, like a token block's. The chain begins with a root of request
kind, model and salt (see `canonical`). Only full blocks have names.

xxh3 is fast and not safe against an adversary. A collision costs a detour, never a wrong answer, because workers decide
on the hashes of `blocks`.

Engines of others report blocks of token ids. Their chains are over digests of these blocks, because no token id of a
prompt leaves a cluster in events.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import xxhash

from prfaas.errors import ProtocolError

BYTE_BLOCK: Final = 256
TOKEN_ROOT: Final = b"token ids"
"""No root of canonical bytes: those are msgpack arrays."""
DIGEST_BYTES: Final = 8
"""Bytes of a digest of a block's token ids."""


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
    """Return the root of chains of foreign engines, whose own names cannot be computed here."""
    return TOKEN_ROOT + salt.encode()


def token_seed(salt: str) -> int:
    """Return the seed of these chains."""
    return xxhash.xxh3_64_intdigest(token_root(salt))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as 32-bit integers, little-endian. Raises ProtocolError for an id that is none."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ProtocolError(f"a stored block has an invalid token id: {error}") from error


def token_digests(data: bytes, block_bytes: int) -> bytes:
    """Return the digests of the full blocks of packed token ids, one behind the other. No token is read from one, but
    who guesses a whole block can compare."""
    ends = range(block_bytes, len(data) + 1, block_bytes)
    return b"".join(blake2b(data[end - block_bytes : end], digest_size=DIGEST_BYTES).digest() for end in ends)


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
            hashes += self._chained(hashes[-1] if hashes else self._seed, data)
        return hashes[block]

    def all(self) -> list[int]:
        if len(self):
            _ = self[len(self) - 1]
        return self._hashes

    def _chained(self, seed: int, data: bytes) -> list[int]:
        return chained(seed, data, self._block_bytes)


class TokenChain(ByteChain):
    """The hashes of blocks of packed token ids, under a salt."""

    def __init__(self, salt: str, data: bytes, block_bytes: int):
        super().__init__(token_root(salt), data, block_bytes)

    def _chained(self, seed: int, data: bytes) -> list[int]:
        return chained(seed, token_digests(data, self._block_bytes), DIGEST_BYTES)
