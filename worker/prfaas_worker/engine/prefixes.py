"""Prefixes that another instance has cached: asked for when a prompt is admitted, once for all who want the same.

A fetch lands in the asking sequence's own pages and slot. It may fail at any time, which costs nothing but that: the
prompt is computed. What is hard is that nobody knows beforehand which prefix comes, so what is joined are questions:

- two prompts with the same blocks ask the same: the second waits, and whatever the first got is the answer for it too;
- prompts that begin alike may, or may not, want the same: the second waits once, looks into the cache, and asks for
  itself if nothing was there for it. So n prompts behind one system prompt make one transfer, and a stranger among them
  costs a moment.

Who waits holds nothing, and does so no longer than the fetch that it waits for takes.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from prfaas.errors import PrfaasError
from prfaas.kvindex.blocks import BlockHash
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.engine import sequences
from prfaas_worker.engine.sequences import Phase
from prfaas_worker.transfer.fetch import AbsentError, Fetched

Outcome = Literal["fetched", "absent", "failed", "cancelled", "joined"]


class _Asked(NamedTuple):
    """A question under way: who is asked (address and cluster), about which blocks, and who waits for the answer."""

    source: tuple[str, str]
    blocks: Sequence[BlockHash]
    waiting: list[sequences.Sequence]


class Prefixes:
    """Questions of one engine. Used from its thread alone."""

    def __init__(self, cache: HybridCache):
        self.outcomes: Counter[Outcome] = Counter()
        self.tokens = 0
        """Tokens that came."""
        self._cache = cache
        self._asked: dict[int, _Asked] = {}  # by the handle of who asks

    def joins(self, sequence: sequences.Sequence) -> bool:
        """Tell whether a sequence that could be admitted waits for another's fetch instead, from now on."""
        request, blocks = sequence.request, _blocks(sequence)
        if not request.prefix_url:
            return False
        known = self._cache.cached_tokens(blocks, len(sequence.token_ids)) // sequence.chain.block_tokens
        if known == len(blocks):
            return False
        for asked in self._asked.values():
            alike = _share(asked.blocks, blocks, known) and not request.has_joined
            if asked.source == _source(request) and (alike or _same(asked.blocks, blocks)):
                request.has_joined = True
                request.awaits.add("prefix")
                sequence.phase = Phase.PREPARING
                asked.waiting.append(sequence)
                self.outcomes["joined"] += 1
                return True
        return False

    def asks(self, sequence: sequences.Sequence) -> bool:
        """Tell whether a sequence that was just admitted asks for more than is cached; its fetch starts then."""
        request, blocks = sequence.request, _blocks(sequence)
        if not request.prefix_url or sequence.computed_tokens >= len(blocks) * sequence.chain.block_tokens:
            request.prefix_url = ""
            return False
        self._asked[request.handle] = _Asked(_source(request), blocks, [])
        return True

    def ended(self, sequence: sequences.Sequence, result: Fetched | PrfaasError) -> bool:
        """Note that a sequence's fetch ended, and let go on who waits for it; False if it was not one of a prefix."""
        asked = self._asked.pop(sequence.request.handle, None)
        if asked is None:
            return False
        outcome = _outcome(sequence, result)
        self.outcomes[outcome] += 1
        if isinstance(result, Fetched):
            self.tokens += result.tokens - sequence.computed_tokens
        sequence.request.prefix_url = ""
        for waiter in asked.waiting:
            request = waiter.request
            request.awaits.discard("prefix")
            waiter.phase = Phase.WAITING
            if outcome == "cancelled":
                request.has_joined = False
            elif outcome == "failed" or _same(asked.blocks, _blocks(waiter)):
                request.prefix_url = ""
        return True


def _source(request: sequences.Request) -> tuple[str, str]:
    return request.prefix_url, request.prefix_cluster


def _outcome(sequence: sequences.Sequence, result: Fetched | PrfaasError) -> Outcome:
    if sequence.phase is Phase.ENDING:
        return "cancelled"
    if isinstance(result, AbsentError):
        return "absent"
    return "failed" if isinstance(result, PrfaasError) else "fetched"


def _blocks(sequence: sequences.Sequence) -> Sequence[BlockHash]:
    """Return the blocks that a prompt may take from a cache: all but the one with its last token."""
    return sequence.chain.hashes[: (len(sequence.token_ids) - 1) // sequence.chain.block_tokens]


def _share(some: Sequence[BlockHash], others: Sequence[BlockHash], known: int) -> bool:
    """Tell whether two chains have more than the first `known` blocks in common; the second has more."""
    return some[known : known + 1] == others[known : known + 1]


def _same(some: Sequence[BlockHash], others: Sequence[BlockHash]) -> bool:
    return len(some) == len(others) and some[-1:] == others[-1:]
