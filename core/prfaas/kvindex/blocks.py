"""Names of token blocks: SHA-256 chains, so that one name stands for a block and for everything before it.

    root = SHA-256(length and bytes of the model's fingerprint, length and bytes of the salt)
    hash of block i = SHA-256(hash of block i - 1, or root; the block's token ids as little-endian uint32)

Equal names mean equal prefixes under the same weights, so a cache entry found by name can be used without a look at its
tokens. A tenant's salt changes every name: nobody can probe for another tenant's prompts by timing.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import Final

BLOCK_TOKENS: Final = 64
"""Tokens of a block; a page of the cache holds the rows of one."""

BlockHash = bytes


def chain_root(fingerprint: str, salt: str) -> BlockHash:
    """The name of nothing yet: what the first block's name is chained to. Lengths keep the two parts apart."""
    digest = hashlib.sha256()
    for part in (fingerprint.encode(), salt.encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


class BlockChain:
    """Names of the full blocks of one growing sequence of tokens."""

    def __init__(self, root: BlockHash, block_tokens: int = BLOCK_TOKENS):
        self.block_tokens = block_tokens
        self.root = root
        self.hashes: list[BlockHash] = []
        self._rest: list[int] = []

    @property
    def tokens(self) -> int:
        """Tokens taken in so far, those of the last, unfinished block included."""
        return len(self.hashes) * self.block_tokens + len(self._rest)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens, each of 0 to 2**32 - 1."""
        pending = [*self._rest, *token_ids]
        full = len(pending) - len(pending) % self.block_tokens
        data = _little_endian(pending[:full])
        parent, step = self.hashes[-1] if self.hashes else self.root, 4 * self.block_tokens
        for start in range(0, len(data), step):
            parent = hashlib.sha256(parent + data[start : start + step]).digest()
            self.hashes.append(parent)
        self._rest = pending[full:]

    def copy(self) -> "BlockChain":
        """An equal chain that grows by itself."""
        copy = BlockChain(self.root, self.block_tokens)
        copy.hashes, copy._rest = self.hashes[:], self._rest[:]
        return copy


def _little_endian(token_ids: list[int]) -> bytes:
    numbers = array("I", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
