"""Fetches prompts and cached prefixes from other instances, and offers them cached prefixes of ours.

Another instance sends the whole cache of a prompt that is prefilled there, with its last hidden state. Or it sends a
cached prefix of a prompt whose rest is computed here. Both land in the sequence's own pages and slot. From then on they
are as if they had been cached here.

A prefix is requested when its prompt is admitted. The fetch may fail at any time, which costs only time: the prompt is
computed. The prefix that a fetch brings is not known beforehand, so requests for the same prefix are joined:

- Two prompts with the same blocks want the same. The second waits, and the answer for the first is its answer, too.
- Prompts with the same first blocks may, or may not, want the same. The second waits once, looks into the cache, and
  asks for itself if that has nothing for it. So n prompts behind one system prompt make one transfer, and a prompt that
  only begins like them loses a moment.

A waiting sequence holds no memory, and waits no longer than the fetch of the other takes.

A prefix for another instance needs no computation, only a lease on what is cached. It must not disturb the requests
that compute here. So it takes no slot that a choice of a running request takes next, and no page that a decoding
sequence may need next. It waits for neither: the other instance can compute, too.
"""

from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from prfaas.errors import CapacityError, InternalError, PrfaasError
from prfaas.kvindex.blocks import BlockHash
from prfaas.wire.engine import Failed, Granted, StartPrefix
from prfaas.wire.headers import CODE_OVERLOADED, CODE_PREFIX_NOT_FOUND
from prfaas.wire.prefill import PrefillRequest, PrefixRequest
from prfaas_transfer.fetch import AbsentError, Fetched, RemoteFetch, SourceApi
from prfaas_transfer.leases import Offers
from prfaas_transfer.pull import FetchContext
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.transfer_frames import prefix_frames
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.schedule import ScheduleFacts
from prfaas_worker.engine.sequences import Event, FetchEnded, Phase, Sequence

FetchOutcome = Literal["fetched", "absent", "failed", "cancelled", "joined"]
"""The ways in which a request for a prefix ends."""


@dataclass(frozen=True)
class Fetcher:
    runner: Runner
    model_name: str
    shared: FetchContext

    def prepare(self, sequence: Sequence, *, is_prefix: bool) -> RemoteFetch:
        request = sequence.request
        prompt = {
            "request_id": request.prompt.request_id,
            "model": self.model_name,
            "token_ids": sequence.token_ids[:],
            "start_token": sequence.computed_tokens,
            "cache_salt": request.prompt.cache_salt,
        }
        if is_prefix:
            body, (url, cluster) = PrefixRequest(**prompt), request.prefix_source
        else:
            generate = request.generate
            url, cluster = generate.prefill_url, generate.prefill_cluster
            body = PrefillRequest(**prompt, prefix_url=generate.prefix_url, prefix_cluster=generate.prefix_cluster)
        source = SourceApi(url, cluster, self.shared.traffic.auth, request.message.trace)
        return RemoteFetch(request.handle, body, source, self.runner.place(sequence.held), self.shared)


class _PrefixFetch(NamedTuple):
    """A fetch of a prefix under way: its source (address and cluster), its blocks, and the waiting sequences."""

    source: tuple[str, str]
    blocks: abc.Sequence[BlockHash]
    waiting: list[Sequence]


class RemoteCaches:
    """The engine's fetches from and offers to other instances. `post` may be called from any thread."""

    def __init__(
        self, runner: Runner, cache: HybridCache, offers: Offers, fetcher: Fetcher, post: Callable[[Event], None]
    ):
        self._runner, self._cache, self._offers = runner, cache, offers
        self._fetcher, self._post = fetcher, post
        self._prefix_fetches: dict[int, _PrefixFetch] = {}  # by the handle of the request that fetches
        self.outcomes: Counter[FetchOutcome] = Counter()
        self.prefix_tokens = 0  # Tokens of fetched prefixes.

    def join_prefix_fetch(self, sequence: Sequence) -> bool:
        """Let a sequence wait for another sequence's fetch; False if no fetch brings its prefix."""
        request, blocks = sequence.request, _cacheable_blocks(sequence)
        source = request.prefix_source
        if not source[0]:
            return False
        known = self._cache.cached_tokens(blocks, len(sequence.token_ids)) // sequence.chain.block_tokens
        if known == len(blocks):
            return False
        for fetch in self._prefix_fetches.values():
            may_be_same = fetch.blocks[known : known + 1] == blocks[known : known + 1] and not request.has_joined
            if fetch.source == source and (may_be_same or _are_same(fetch.blocks, blocks)):
                request.has_joined = True
                request.awaits.add("prefix")
                sequence.phase = Phase.PREPARING
                fetch.waiting.append(sequence)
                self.outcomes["joined"] += 1
                return True
        return False

    def start_fetch(self, sequence: Sequence) -> None:
        """Fetch what another instance may have of an admitted sequence, which is FETCHING until `finish_fetch`."""
        request, blocks = sequence.request, _cacheable_blocks(sequence)
        is_prefix = not request.is_remote
        if is_prefix:
            source = request.prefix_source
            if not source[0] or sequence.computed_tokens >= len(blocks) * sequence.chain.block_tokens:
                request.prefix_done = True
                return
            self._prefix_fetches[request.handle] = _PrefixFetch(source, blocks, [])
        sequence.phase, handle = Phase.FETCHING, request.handle
        request.fetch = self._fetcher.prepare(sequence, is_prefix=is_prefix)
        request.fetch.start(lambda result: self._post(FetchEnded(handle, result)))

    def finish_fetch(self, sequence: Sequence, result: Fetched | PrfaasError) -> bool:
        """Continue after the fetch of a prefix; False if a whole prompt was fetched."""
        fetch = self._prefix_fetches.pop(sequence.request.handle, None)
        if fetch is None:
            return False
        outcome = _outcome(sequence, result)
        self.outcomes[outcome] += 1
        sequence.request.prefix_done = True
        self._wake(fetch, outcome)
        if isinstance(result, Fetched):
            self.prefix_tokens += result.tokens - sequence.computed_tokens
        if sequence.phase is Phase.ENDING:
            return True
        if isinstance(result, Fetched):
            self._adopt_prefix(sequence, result)
        else:
            sequence.release(self._cache)  # its state may be half written
        return True

    def offer_prefix(self, sequence: Sequence, facts: ScheduleFacts[Sequence], promised_slots: int) -> Granted | Failed:
        """Offer the longest cached prefix of a sequence's tokens to another instance; return the front's answer. A
        granted sequence is DELIVERING until its offer ends. `facts` describes the other requests."""
        request = sequence.request
        message, handle = request.message, request.handle
        if not isinstance(message, StartPrefix):
            raise InternalError(f"request {handle} asks for no prefix")
        start_token = message.request.start_token
        tokens = self._cache.cached_tokens(sequence.chain.hashes, len(sequence.token_ids) - 1)
        if tokens <= start_token:
            text = f"nothing longer than {start_token} tokens of this prompt is cached here"
            return Failed(handle, 404, CODE_PREFIX_NOT_FOUND, text)
        lease = self._cache.open_prefix(sequence.chain.hashes, tokens) if facts.free_slots > promised_slots else None
        if lease is None:
            return _overloaded(handle, "all sequences of this instance are in use: no prefix can be given now")
        if self._cache.free_pages < len(facts.running):
            self._cache.close(lease)
            return _overloaded(handle, "the cache of this instance is in use: no prefix can be given now")
        try:
            offer, grant = self._offers.grant(message.subject, start_token, tokens)
        except CapacityError as error:
            self._cache.close(lease)
            return _overloaded(handle, str(error))
        sequence.lease, sequence.phase, request.offer = lease, Phase.DELIVERING, offer
        offer.start_computing()
        for frame in prefix_frames(offer.manifest, self._runner.place(lease)):
            offer.put(frame)
        offer.finish_computing(0.0)
        return Granted(handle, grant)

    def _wake(self, fetch: _PrefixFetch, outcome: FetchOutcome) -> None:
        for waiter in fetch.waiting:
            request = waiter.request
            request.awaits.discard("prefix")
            waiter.phase = Phase.WAITING
            if outcome == "cancelled":
                request.has_joined = False
            elif outcome == "failed" or _are_same(fetch.blocks, _cacheable_blocks(waiter)):
                request.prefix_done = True

    def _adopt_prefix(self, sequence: Sequence, prefix: Fetched) -> None:
        sequence.request.prefix = prefix
        sequence.computed_tokens, sequence.phase, sequence.is_exact = prefix.tokens, Phase.RUNNING, prefix.is_exact
        sequence.cuts = (prefix.tokens, *(cut for cut in sequence.cuts if cut > prefix.tokens))
        sequence.request.cached_tokens = prefix.tokens
        sequence.publish(self._cache)


def _overloaded(handle: int, text: str) -> Failed:
    return Failed(handle, 503, CODE_OVERLOADED, text)


def _outcome(sequence: Sequence, result: Fetched | PrfaasError) -> FetchOutcome:
    if sequence.phase is Phase.ENDING:
        return "cancelled"
    if isinstance(result, AbsentError):
        return "absent"
    return "failed" if isinstance(result, PrfaasError) else "fetched"


def _cacheable_blocks(sequence: Sequence) -> abc.Sequence[BlockHash]:
    """Return a prompt's cacheable blocks: all but the one with its last token."""
    return sequence.chain.hashes[: (len(sequence.token_ids) - 1) // sequence.chain.block_tokens]


def _are_same(some: abc.Sequence[BlockHash], others: abc.Sequence[BlockHash]) -> bool:
    return len(some) == len(others) and some[-1:] == others[-1:]
