"""The global prefix index: the cached part of a prompt in every instance, found by bytes, without a tokenizer.

Each instance has a tree of its blocks (`tree`), which its cache events fill. Its reports on requests fill a map from
byte blocks to token blocks (`byte_maps`). A match searches a prompt's byte blocks for the last one whose token block
the instance has. Both chains are closed under prefixes, so bisection is exact. Then the tree gives the longest n with
attention up to n and a state at n.

Up to one byte block more than the match may be shared. The state of a conversation's last turn lies exactly there: half
of all states would be missed. So a state also counts within the tokens of one byte block and one token block
(rounding), unless the tree branches there. The error is at most a few blocks, in a result that is only a hint.

Reports of one instance do not change the result for another. Trees and maps are separate and bounded, and names are
salted. There is one exception. An instance that prefills for others sees tokens, never bytes, and reports no map. It
uses the map of the instance that knows most of the prompt. At no byte block may more instances contradict this map than
agree. So a forger can invent or hide cached blocks of such instances only for prompts that no other instance reports.
It can never do so beyond the prompt's length.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from prfaas.kvindex.blocks import BLOCK_TOKENS
from prfaas.kvindex.byte_maps import NO_BLOCK, ByteMap, last_where
from prfaas.kvindex.bytes import ByteChain
from prfaas.kvindex.keys import NONE
from prfaas.kvindex.tree import ROOT, BlockTree
from prfaas.memory import MAX_INDEX_BLOCKS

MAX_PAIRS: Final = 10_000_000
MIN_PAIRS: Final = 1 << 16
"""The size of a worker's largest snapshot."""
REFERENCE_MAPS: Final = 8
"""Maps that match for instances without a map: those of the best matches."""


class InstanceIndex:
    """The part of the index that one instance reported."""

    def __init__(self, max_blocks: int, max_pairs: int):
        self.tree = BlockTree(max_blocks)
        # A map holds two generations.
        self.bytes = ByteMap(max(1, max_pairs // 2))
        self.block_tokens = BLOCK_TOKENS

    def clear(self) -> None:
        self.tree = BlockTree(self.tree.max_blocks)
        self.bytes.clear()

    def match_tokens(self, chain: ByteChain) -> int:
        """Return the usable match of a prompt of token ids, in tokens, by a chain over blocks of `block_tokens`."""
        return self._match(chain, self.bytes, is_exact=True)

    def match(self, chain: ByteChain, byte_map: ByteMap) -> int:
        """Return the usable match of a prompt in tokens, by this or another instance's map."""
        return self._match(chain, byte_map, is_exact=False)

    def _match(self, chain: ByteChain, byte_map: ByteMap, *, is_exact: bool) -> int:
        number = ROOT  # of the last block that was found, which the search ends with
        get, find = byte_map.get, self.tree.find

        def is_here(at: int) -> bool:
            nonlocal number
            block = get(chain[at])
            if block is None or block == NO_BLOCK:
                return block is not None
            found = find(block)
            number = found or number
            return found != NONE

        last = last_where(len(chain), is_here)
        if last < 0:
            return 0
        byte_map.renew(chain, last + 1)
        if is_exact:
            return self.tree.usable(number) * self.block_tokens
        tokens = self.tree.depth(number) * self.block_tokens
        # Tokens of a byte block, by this prompt's own mean, and what rounding to blocks lost.
        ahead = tokens // (last + 1) + self.block_tokens
        return self.tree.usable(number, ahead // self.block_tokens) * self.block_tokens


class PrefixIndex:
    """The index of all instances.

    Each instance may hold an equal share. When instances are added, shares shrink. An instance above its share is
    forgotten; `set_instances` returns its name, so that the caller asks it again.
    """

    def __init__(self, max_blocks: int = MAX_INDEX_BLOCKS, max_pairs: int = MAX_PAIRS):
        self._max_blocks = max_blocks
        self._max_pairs = max_pairs
        self._instances: dict[str, InstanceIndex] = {}

    @property
    def blocks(self) -> int:
        return sum(len(one.tree) for one in self._instances.values())

    @property
    def refused_blocks(self) -> int:
        """Blocks that the known instances' bounds left out."""
        return sum(one.tree.refused_blocks for one in self._instances.values())

    @property
    def pairs(self) -> int:
        return sum(len(one.bytes) for one in self._instances.values())

    def set_instances(self, names: Iterable[str]) -> list[str]:
        """Keep exactly these instances; return the names that were forgotten because their share shrank."""
        wanted = list(dict.fromkeys(names))
        share, pairs = (bound // max(1, len(wanted)) for bound in (self._max_blocks, self._max_pairs))
        forgotten: list[str] = []
        kept: dict[str, InstanceIndex] = {}
        for name in wanted:
            known = self._instances.get(name)
            if known is not None and (len(known.tree) > share or len(known.bytes) > max(pairs, MIN_PAIRS)):
                forgotten.append(name)
                known = None
            kept[name] = known or InstanceIndex(share, max(pairs, MIN_PAIRS))
            kept[name].tree.max_blocks = share
        self._instances = kept
        return forgotten

    def __getitem__(self, name: str) -> InstanceIndex:
        return self._instances[name]

    def __contains__(self, name: object) -> bool:
        return name in self._instances

    def match(self, chain: ByteChain, own: Sequence[str], either: Sequence[str]) -> dict[str, int]:
        """Return the usable match by instance, in tokens, without instances that match nothing.

        Instances in `own` are matched by their own maps; those in `either`, which prefill for others, by their own
        or another's.
        """
        if not len(chain):
            return {}
        knowing = {name: one for name, one in self._instances.items() if one.bytes.get(chain[0]) is not None}
        if not knowing:
            return {}
        found = {name: knowing[name].match(chain, knowing[name].bytes) for name in (*own, *either) if name in knowing}
        others = [name for name in either if name not in knowing and name in self._instances]
        if others:
            best = sorted(knowing, key=lambda name: -found.get(name, 0))[:REFERENCE_MAPS]
            reference = _reference_map(chain, [knowing[name].bytes for name in best])
            found |= {name: self._instances[name].match(chain, reference) for name in others}
        return {name: tokens for name, tokens in found.items() if tokens}


def _reference_map(chain: ByteChain, maps: Sequence[ByteMap]) -> ByteMap:
    """Return the map that knows most of a prompt and is not outvoted at its end."""
    ends = [last_where(len(chain), lambda at, one=one: one.get(chain[at]) is not None) for one in maps]
    for end, candidate in sorted(zip(ends, maps, strict=True), key=lambda pair: -pair[0]):
        last = candidate.get(chain[end])
        votes = [vote for one in maps if (vote := one.get(chain[end])) is not None]
        if 2 * sum(vote == last for vote in votes) >= len(votes):
            return candidate
    return maps[0]
