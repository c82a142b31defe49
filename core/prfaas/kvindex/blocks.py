"""Names of token blocks: SHA-256 chains, so that a name identifies a block and its whole prefix.

    root = SHA-256(length and bytes of the model's fingerprint, length and bytes of the salt)
    hash of block i = SHA-256(hash of block i - 1, or root; the block's token ids as little-endian uint32)

Equal names mean equal prefixes under the same weights, so a cache needs no comparison of tokens. A tenant's salt
changes every name, so a tenant cannot probe for another tenant's prompts by timing.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import Final

BLOCK_TOKENS: Final = 64
"""Tokens of a block and of a page of the cache."""

BlockHash = bytes


def chain_root(fingerprint: str, salt: str) -> BlockHash:
    """Return the parent of the first block's name. Lengths keep fingerprint and salt apart."""
    digest = hashlib.sha256()
    for part in (fingerprint.encode(), salt.encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


class BlockChain:
    """The names of the full blocks of one growing sequence, each hashed once. Only `extend` changes `hashes`."""

    def __init__(self, root: BlockHash, block_tokens: int = BLOCK_TOKENS):
        self.block_tokens = block_tokens
        self.root = root
        self.hashes: list[BlockHash] = []
        self._rest = array("I")  # tokens of the last, unfinished block

    @property
    def tokens(self) -> int:
        """Tokens so far, with those of the last, unfinished block."""
        return len(self.hashes) * self.block_tokens + len(self._rest)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens, each from 0 to 2**32 - 1."""
        self._rest.extend(token_ids)
        data = _little_endian(self._rest[:])
        parent, step = self.hashes[-1] if self.hashes else self.root, 4 * self.block_tokens
        for end in range(step, len(data) + 1, step):
            parent = hashlib.sha256(parent + data[end - step : end]).digest()
            self.hashes.append(parent)
        self._rest = self._rest[len(data) // step * self.block_tokens :]

    def parent(self, block: int) -> BlockHash | None:
        """Return the name of the block before this one, None for the first."""
        return self.hashes[block - 1] if block else None

    def copy(self) -> "BlockChain":
        copy = BlockChain(self.root, self.block_tokens)
        copy.hashes, copy._rest = self.hashes[:], self._rest[:]
        return copy


def _little_endian(token_ids: "array[int]") -> bytes:
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tobytes()
