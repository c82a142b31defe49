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

The engine's mover moves the bytes, so that they never wait for the interpreter that computes. Offers and fetches look
to the step loop as if they were here. When a mover dies its transfers fail, and another starts.
"""

import threading
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from prfaas.errors import CapacityError, InternalError, PeerError, PrfaasError
from prfaas.kvindex.blocks import BlockHash
from prfaas.wire.engine import (
    Direction,
    Failed,
    Granted,
    StartPrefill,
    StartPrefix,
    ToFront,
    TransferEnded,
    TransferSubject,
)
from prfaas.wire.frames import Address, Kind
from prfaas.wire.headers import CODE_OVERLOADED, CODE_PREFIX_NOT_FOUND
from prfaas.wire.prefill import PrefillGrant, PrefillRequest, PrefillState, PrefixRequest
from prfaas.wire.transfer import Manifest
from prfaas_transfer.cache import CacheLayout, SharedPlace
from prfaas_transfer.fetch import AbsentError, CacheFetch, Fetched
from prfaas_transfer.leases import GrantCaches, Grants, too_many
from prfaas_transfer.mover.client import MoverClient, Question
from prfaas_transfer.mover.messages import CopyPart, EndedFetch, MoverAnswer, OfferCache, RequestCache
from prfaas_transfer.send import Frame
from prfaas_transfer.transfer_log import TransferCounters, TransferLog, TransferTotals
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.transfer_frames import CachePlace, prefix_frames
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.schedule import ScheduleFacts
from prfaas_worker.engine.sequences import Event, FetchEnded, OfferEnded, Phase, Sequence
from prfaas_worker.engine.shared import StagedCopies, mover_options, pin
from prfaas_worker.options import Options

FetchOutcome = Literal["fetched", "absent", "failed", "cancelled", "joined"]
"""The ways in which a request for a prefix ends."""


class MovedOffer:
    """One cache for another instance, which a mover sends."""

    def __init__(self, transfers: "EngineTransfers", subject: TransferSubject, manifest: Manifest):
        self.subject, self.manifest = subject, manifest
        self.state: PrefillState = "waiting"
        self._transfers, self._mover = transfers, transfers.mover
        self._is_placed = False

    def start_computing(self) -> None:
        self.state = "computing"
        self._mover.start(self.manifest.transfer_id)

    def put(self, frame: Frame) -> None:
        """Hand on a frame that is computed; only the hidden state's bytes travel with the message."""
        transfer_id, header = self.manifest.transfer_id, frame.header
        if header.kind == Kind.HIDDEN:
            with frame.load(header) as payload:
                self._mover.put_hidden(transfer_id, b"".join(payload))
            return
        part = CopyPart(header.group, header.layer, header.start_token, header.tokens)
        place = None
        if frame.copied_bytes:
            self._transfers.staged.add_frame(transfer_id, part, frame)
        elif not self._is_placed:
            self._is_placed, place = True, frame.place
        self._mover.put(transfer_id, [part], place)

    def finish_computing(self, prefill_seconds: float, *, is_exact: bool = True) -> None:
        self.state = "sending"
        self._mover.finish(self.manifest.transfer_id, prefill_seconds, is_exact=is_exact)

    def fail(self, message: str) -> None:
        """Note that the prefill failed; its connections, or its lease, end it."""
        self._mover.fail(self.manifest.transfer_id, message, at_once=False)


class MovedFetch:
    """One fetch into a sequence's memory, which a mover makes."""

    def __init__(self, transfers: "EngineTransfers", request: RequestCache, place: CachePlace):
        self.request, self.place = request, place
        self.transfer_id = ""  # Empty until it has ended, and was granted.
        self.on_end: Callable[[Fetched | PrfaasError], None] = lambda _result: None
        self._transfers = transfers

    def start(self, on_end: Callable[[Fetched | PrfaasError], None]) -> None:
        self.on_end = on_end
        self._transfers.start_fetch(self)

    def cancel(self) -> None:
        self._transfers.mover.cancel_fetch(self.request.key)


class EngineTransfers:
    """All transfers of an engine. Any thread may call. `say` queues messages to the front, `post` events."""

    def __init__(
        self,
        layout: CacheLayout,
        memory: CacheMemory,
        options: Options,
        say: Callable[[list[ToFront]], None],
        post: Callable[[Event], None],
    ):
        self._layout, self._memory, self._options, self._post = layout, memory, options, post
        self.counters = TransferCounters(lambda transfer: say([transfer]))
        self._copies = StagedCopies(layout) if memory.descriptor is None else None  # A mapped cache needs none.
        self._capacity = options.max_running + options.max_waiting
        self._grants = Grants()
        self._lock = threading.Lock()
        self._handles: dict[str, int] = {}  # Of open offers, by transfer.
        self._fetches: dict[str, MovedFetch] = {}
        self._records: dict[tuple[Direction, int], TransferLog] = {}  # Reported if the mover dies.
        self._client: MoverClient | None = None
        self._on_answer: Callable[[MoverAnswer], None] = lambda _answer: None

    def start(self, on_answer: Callable[[MoverAnswer], None]) -> None:
        """Start the mover, which opens the data port; `on_answer` gets the answers to `ask`. Raises ConfigError."""
        self._on_answer = on_answer
        self._client = MoverClient(
            mover_options(self._options, self._layout, self._memory),
            self._copies,
            self._end_offer,
            self._end_fetch,
            self._answer,
            descriptor=self._memory.descriptor,
        )
        if self._memory.device.type == "cuda":
            pin(self._client.shared)

    @property
    def staged(self) -> StagedCopies:
        if self._copies is None:
            raise InternalError("a part of a mapped cache is to be copied")
        return self._copies

    @property
    def mover(self) -> MoverClient:
        if self._client is None:
            raise InternalError("no mover was started")
        return self._client

    def grant(self, subject: TransferSubject, start_token: int, end_token: int) -> tuple[MovedOffer, PrefillGrant]:
        """Open an offer of the rows from `start_token` up to `end_token`. Raises CapacityError if too many are open."""
        if not self.mover.is_running:
            raise CapacityError("the mover of this instance starts again; try another instance")
        grant = self._grants.make(self._options.data_port, end_token)
        address = Address(grant.transfer_id, grant.epoch)
        manifest = self._layout.manifest(address, start_token, end_token, is_prefix=subject.what == "prefix")
        with self._lock:
            if len(self._handles) >= self._capacity:
                raise too_many(self._capacity)
            self._handles[grant.transfer_id] = subject.handle
            self._records["send", subject.handle] = TransferLog("send", subject, grant.transfer_id)
        offer = MovedOffer(self, subject, manifest)
        self.mover.announce(OfferCache(subject, grant.transfer_id, grant.epoch, grant.token, start_token, end_token))
        return offer, grant

    def cancel(self, transfer_id: str) -> None:
        self.mover.cancel_offer(transfer_id)

    def ask(self, question: Question) -> None:
        self.mover.ask(question)

    def prepare_fetch(
        self, wanted: StartPrefill | StartPrefix, url: str, cluster: str, place: CachePlace
    ) -> MovedFetch:
        """Make a fetch of what is wanted from the instance at `url`, which must be of this cluster."""
        shared = None if place.staging else SharedPlace(place.slot, place.pages)
        return MovedFetch(self, RequestCache(str(wanted.handle), wanted, url, cluster, shared), place)

    def start_fetch(self, fetch: MovedFetch) -> None:
        request = fetch.request
        subject = request.wanted.subject._replace(peer=request.cluster)
        with self._lock:
            self._fetches[request.key] = fetch
            self._records["receive", subject.handle] = TransferLog("receive", subject)
        if fetch.place.staging:
            self.staged.add_place(request.key, fetch.place)
        self.mover.fetch(request)

    def _end_offer(self, transfer_id: str) -> None:
        if self._copies is not None:
            self._copies.forget(transfer_id)
        with self._lock:
            handle = self._handles.pop(transfer_id)
            record = self._records.pop(("send", handle), None)
        # A mover reports a transfer's end before it releases the offer, so a record that is left is of one that died.
        if record is not None and not self.mover.is_running:
            self._lose(record, "the mover ended")
        self._post(OfferEnded(handle))

    def _end_fetch(self, ended: EndedFetch) -> None:
        if self._copies is not None:
            self._copies.forget(ended.key)
        with self._lock:
            fetch = self._fetches.pop(ended.key)
            handle = fetch.request.wanted.handle
            record = self._records.pop(("receive", handle), None)
        fetch.transfer_id = ended.transfer_id
        result: Fetched | PrfaasError
        if ended.fetched is not None:
            result = ended.fetched
        elif ended.is_absent:
            result = AbsentError(ended.reason)
        elif record is not None:  # the mover has not reported its end
            self._lose(record, ended.reason)
            result = PeerError(f"{fetch.request.wanted.subject.what} at {fetch.request.url} failed: {ended.reason}")
        else:
            result = PeerError(ended.reason)
        fetch.on_end(result)

    def _lose(self, record: TransferLog, reason: str) -> None:
        self.counters.count_end(record.end("failed", reason, TransferTotals()))

    def _answer(self, answer: TransferEnded | MoverAnswer) -> None:
        if not isinstance(answer, TransferEnded):
            self._on_answer(answer)
            return
        with self._lock:
            self._records.pop((answer.direction, answer.subject.handle), None)
        self.counters.count_end(answer)


@dataclass(frozen=True)
class Fetcher:
    runner: Runner
    model_name: str
    transfers: EngineTransfers

    def prepare(self, sequence: Sequence, *, is_prefix: bool) -> CacheFetch:
        request = sequence.request
        prompt = {
            "request_id": request.prompt.request_id,
            "model": self.model_name,
            "token_ids": sequence.token_ids[:],
            "start_token": sequence.computed_tokens,
            "cache_salt": request.prompt.cache_salt,
        }
        trace = request.message.trace
        if is_prefix:
            url, cluster = request.prefix_source
            wanted = StartPrefix(request.handle, PrefixRequest(**prompt), trace=trace)
        else:
            generate = request.generate
            url, cluster = generate.prefill_url, generate.prefill_cluster
            body = PrefillRequest(**prompt, prefix_url=generate.prefix_url, prefix_cluster=generate.prefix_cluster)
            wanted = StartPrefill(request.handle, body, trace=trace)
        return self.transfers.prepare_fetch(wanted, url, cluster, self.runner.place(sequence.held))


class _PrefixFetch(NamedTuple):
    """A fetch of a prefix under way: its source (address and cluster), its blocks, and the waiting sequences."""

    source: tuple[str, str]
    blocks: abc.Sequence[BlockHash]
    waiting: list[Sequence]


class RemoteCaches:
    """The engine's fetches from and offers to other instances. `post` may be called from any thread."""

    def __init__(
        self, runner: Runner, cache: HybridCache, offers: GrantCaches, fetcher: Fetcher, post: Callable[[Event], None]
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
                sequence.phase = Phase.JOINING
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
            waiter.phase = Phase.WAITING
            if outcome == "cancelled":
                request.has_joined = False
            elif outcome == "failed" or _are_same(fetch.blocks, _cacheable_blocks(waiter)):
                request.prefix_done = True

    def _adopt_prefix(self, sequence: Sequence, prefix: Fetched) -> None:
        sequence.request.prefix = prefix
        sequence.computed_tokens, sequence.phase, sequence.is_exact = prefix.tokens, Phase.RUNNING, prefix.is_exact
        # The state came along: kept here, the next prompt behind this prefix needs no fetch.
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
