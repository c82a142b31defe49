"""Fetches prompts and cached prefixes from other instances, and offers them cached prefixes of ours.

Another instance sends the cache of a prompt that is prefilled there, all but the last token's. Or it sends a cached
prefix of a prompt whose rest is computed here. Both land in the sequence's own memory. From then on they are as if they
had been cached here. A prefix's state lands in a slot, that of a whole prompt in pages: its slot comes with the first
token, and none is held by what crosses a slow link or waits for a place among those that decode.

A prompt that another instance computes is admitted when that begins: memory that waits for the other's queue would lack
those whose cache has come. A wait that is of no use ends, as if the other began.

A cache is fetched when its prompt is admitted. The fetch may fail at any time, which costs only time: the prompt is
computed. Many prompts behind one system prompt come at once. Only the first one's transfer is used: the others tell
their sources that they want nothing, wait, and find the prefix in the cache. A waiting sequence holds no memory, and
waits no longer than the fetch of the other takes. If that fails, all of them compute. None waits for another cluster
than its own leg names.

A prefix for another instance needs no computation, only a lease on what is cached. It must not disturb the requests
that compute here. So all of them take a quarter of the slots at most, and none that a request here takes next, and no
page that a decoding sequence may need next. They wait for neither: the other instance can compute, too.

The engine's mover moves the bytes, so that they never wait for the interpreter that computes. Offers and fetches look
to the step loop as if they were here. When a mover dies its transfers fail, and another starts.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from prfaas.errors import CapacityError, InternalError, PeerError, PrfaasError, RequestError, UnreachableError
from prfaas.kvindex.blocks import BlockHash
from prfaas.rights import COUNTED_PART
from prfaas.wire.engine import Direction, Failed, Generate, GiveCache, ToFront, TransferEnded, TransferSubject
from prfaas.wire.frames import Address
from prfaas.wire.headers import CODE_OVERLOADED, CODE_PREFIX_NOT_FOUND, UNKNOWN_PLACE, UNREACHABLE
from prfaas.wire.prefill import LegParams, token_digest
from prfaas.wire.transfer import Manifest
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.leases import too_many
from prfaas_transfer.mover.client import MoverClient, Question
from prfaas_transfer.mover.messages import (
    AnnounceCache,
    AwaitCache,
    CopyPart,
    DeclineCache,
    EndedFetch,
    FetchCache,
    Fetched,
    MoverAnswer,
)
from prfaas_transfer.mover.tables import Fetches, Sources
from prfaas_transfer.send import Frame
from prfaas_transfer.transfer_log import TransferCounters, TransferLog, TransferTotals
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.transfer_frames import CachePlace, DeviceMark, block_frames, prefix_frames, state_frames
from prfaas_worker.cache_spec import PagedMemory
from prfaas_worker.engine.sequences import (
    CacheFetch,
    EngineRequest,
    Event,
    FetchEnded,
    OfferedCache,
    OfferEnded,
    Phase,
    Sequence,
    SourceBegun,
    goal_of,
)
from prfaas_worker.engine.shared import copy_in, copy_out, mover_options
from prfaas_worker.engine.steps import StepRunner
from prfaas_worker.options import Options

log = logging.getLogger(__name__)

_PrefixName = tuple[int, tuple[BlockHash, ...], str]
CODE_TRANSFER_OPEN: Final = "transfer_open"
OriginsOf = Callable[[LegParams, Collection[str] | None], frozenset[str]]
"""What a destination's leg and its source's account say of a cache: see `received_origins`."""
Export = Callable[[int, DeviceMark | None], None]
"""Sends a computed layer of a prefill to another instance."""
FetchOutcome = Literal["fetched", "failed", "cancelled", "joined"]
"""The ways in which a request for a prefix ends."""


class MovedOffer:
    """One cache for another instance, which a mover sends. `frames` are those that it may ask to have copied, of a
    cache that is not mapped."""

    def __init__(self, mover: MoverClient, subject: TransferSubject, manifest: Manifest):
        self.subject, self.manifest = subject, manifest
        self.ended = False
        self.frames: dict[CopyPart, Frame] = {}
        self._mover = mover
        self._is_placed = False

    def begin(self) -> None:
        self._mover.put(self.manifest.transfer_id, [])

    def put(self, frame: Frame) -> None:
        """Hand on a frame that is computed."""
        transfer_id, header = self.manifest.transfer_id, frame.header
        part = CopyPart(header.group, header.layer, header.start_token, header.tokens)
        place = None
        if frame.copied_bytes:
            self.frames[part] = frame
        elif not self._is_placed:
            self._is_placed, place = True, frame.place
        self._mover.put(transfer_id, [part], place)

    def find_frame(self, part: CopyPart) -> Frame:
        """Return a frame, or the end of one where its destination has the beginning. Raises PeerError if none is."""
        if (frame := self.frames.get(part)) is not None:
            return frame
        for (group, layer, start_token, tokens), whole in list(self.frames.items()):
            if (group, layer) == part[:2] and start_token < part.start_token < start_token + tokens:
                rest = whole.rest(part.start_token)
                if rest is not None:
                    return rest
        raise PeerError(f"rows of layer {part.layer} from token {part.start_token} were not computed")

    def finish_computing(
        self, prefill_seconds: float, *, is_exact: bool = True, origins: tuple[str, ...] | None = None
    ) -> None:
        self._mover.finish(self.manifest.transfer_id, prefill_seconds, is_exact=is_exact, origins=origins)

    def fail(self, message: str) -> None:
        """Note that the prefill failed; its connections, or its lease, end it."""
        self._mover.fail(self.manifest.transfer_id, message, at_once=False)

    def cancel(self) -> None:
        """End it at once: nobody waits for it. Its memory comes back with its end."""
        self._mover.fail(self.manifest.transfer_id, "its caller left before the prompt was computed")


class MovedFetch:
    """One fetch into a sequence's memory, which a mover makes."""

    def __init__(self, transfers: "EngineTransfers", request: FetchCache, subject: TransferSubject, place: CachePlace):
        self.request, self.subject, self.place = request, subject, place
        self.on_end: Callable[[Fetched | PrfaasError], None] = lambda _result: None
        self.is_refused = False
        self._transfers = transfers

    def start(self, on_end: Callable[[Fetched | PrfaasError], None]) -> None:
        self.on_end = on_end
        self._transfers.start_fetch(self)

    def cancel(self) -> None:
        if not self.is_refused:  # else this is the key of another request's fetch
            self._transfers.mover.cancel_fetch(self.request.key)


class EngineTransfers:
    """All transfers of an engine. Any thread may call. `say` queues messages to the front, `post` events. `pin` gets
    the memory that is shared with the mover, for a device that must know it."""

    def __init__(
        self,
        layout: CacheLayout,
        memory: PagedMemory,
        options: Options,
        say: Callable[[list[ToFront]], None],
        post: Callable[[Event], None],
        pin: Callable[[memoryview], None] | None = None,
    ):
        self._layout, self._memory, self._options, self._post, self._pin = layout, memory, options, post, pin
        self.counters = TransferCounters(lambda transfer: say([transfer]))
        self._capacity = options.slots + options.max_waiting
        self._sources: Sources[MovedOffer] = Sources()
        self._fetches: Fetches[MovedFetch] = Fetches()
        self._lock = threading.Lock()
        # By the key that the mover knows, with what the front knows of them; reported if the mover dies.
        self._records: dict[tuple[Direction, str], tuple[TransferLog, TransferSubject]] = {}
        self._client: MoverClient | None = None
        self._on_answer: Callable[[MoverAnswer], None] = lambda _answer: None

    def start(self, on_answer: Callable[[MoverAnswer], None]) -> None:
        """Start the mover, which opens the data port; `on_answer` gets the answers to `ask`. Raises ConfigError."""
        self._on_answer = on_answer
        self._client = MoverClient(
            mover_options(self._options, self._layout, self._memory),
            self if self._memory.descriptor is None else None,  # A mapped cache needs no copies.
            self._end_offer,
            self._end_fetch,
            self._answer,
            descriptor=self._memory.descriptor,
        )
        if self._pin is not None:
            self._pin(self._client.shared)

    @property
    def mover(self) -> MoverClient:
        if self._client is None:
            raise InternalError("no mover was started")
        return self._client

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish a batch of the cache's events, or of the byte map."""
        self.mover.events.append(topic, payload)

    def announce(self, message: GiveCache) -> MovedOffer:
        """Offer the cache of a prompt to the destination that the gateway sends, or to the buyer who asks. Raises
        CapacityError if too many are open, in all or of the caller, RequestError if this transfer is open already."""
        leg, goal = message.leg, goal_of(message.token_ids, message.leg)
        subject = TransferSubject(message.handle, message.request_id, message.caller, message.trace)
        manifest = self._layout.manifest(Address(leg.transfer_id, leg.epoch), 0, goal)
        offer = MovedOffer(self.mover, subject, manifest)
        self._add_offer(offer)
        digest = token_digest(message.token_ids[:goal])
        named = (leg.transfer_id, leg.epoch, leg.token, message.request_id)
        self.mover.announce(AnnounceCache(*named, goal, digest, trace=message.trace))
        return offer

    def _add_offer(self, offer: MovedOffer) -> None:
        transfer_id, subject = offer.manifest.transfer_id, offer.subject
        if not self.mover.is_running:
            raise CapacityError("the mover of this instance starts again; try another instance")
        with self._lock:
            peers = [one.subject.peer for one in self._sources.caches()]
            if len(peers) >= self._capacity:
                raise too_many(self._capacity)
            part = self._capacity // COUNTED_PART
            if subject.peer and peers.count(subject.peer) >= part:
                raise too_many(part, subject.peer)
            if transfer_id in self._sources:
                text = f"transfer {transfer_id} is open here, for another request: name each transfer once"
                raise RequestError(text, status=409, code=CODE_TRANSFER_OPEN)
            self._sources.add(transfer_id, str(subject.handle), [transfer_id], offer)
            self._records["send", transfer_id] = TransferLog("send", subject, transfer_id), subject

    def ask(self, question: Question) -> None:
        self.mover.ask(question)

    def prepare_leg(
        self, message: Generate | GiveCache, leg: LegParams, start_token: int, place: CachePlace
    ) -> MovedFetch:
        """Make a fetch of a prompt's cache, from `start_token` on, from the source that the gateway named."""
        goal = goal_of(message.token_ids, leg)
        request = FetchCache(
            request_id=message.request_id,
            transfer_id=leg.transfer_id,
            epoch=leg.epoch,
            token=leg.token,
            host=leg.host,
            port=leg.port,
            cluster=leg.cluster,
            start_token=start_token,
            end_token=goal,
            prompt=token_digest(message.token_ids[:goal]),
            place=place.shared,
            trace=message.trace,
        )
        subject = TransferSubject(message.handle, message.request_id, leg.cluster, message.trace)
        return MovedFetch(self, request, subject, place)

    def await_source(self, message: Generate, leg: LegParams, on_begin: Callable[[], None]) -> None:
        """Have `on_begin` called once, from any thread, when the source of a leg begins to compute, or cannot be
        awaited."""
        named, at = (leg.transfer_id, leg.epoch, leg.token), (leg.host, leg.port, leg.cluster)
        self.mover.await_begin(AwaitCache(message.request_id, *named, *at), on_begin)

    def decline(self, message: Generate | GiveCache, leg: LegParams) -> None:
        """Tell the source of a destination's leg that its cache is not wanted."""
        at = (leg.host, leg.port, leg.cluster)
        self.mover.decline(DeclineCache(message.request_id, leg.transfer_id, leg.epoch, leg.token, *at))

    def start_fetch(self, fetch: MovedFetch) -> None:
        key, subject = fetch.request.key, fetch.subject
        with self._lock:
            fetch.is_refused = key in self._fetches
            if not fetch.is_refused:
                self._fetches.add(key, str(subject.handle), [key], fetch)
                self._records["receive", key] = TransferLog("receive", subject, key), subject
        if fetch.is_refused:
            fetch.on_end(PeerError(f"transfer {key} is being fetched here, for another request"))
        else:
            self.mover.fetch(fetch.request)

    # The mover's client calls these.

    def load(self, key: str, part: CopyPart, room: memoryview) -> None:
        with self._sources.copying(key) as offer:
            copy_out(offer.find_frame(part), room)

    def land(self, key: str, part: CopyPart, received: memoryview) -> None:
        with self._fetches.copying(key) as fetch:
            copy_in(self._layout, fetch.place, part, received)

    def _end_offer(self, transfer_id: str) -> None:
        source = self._sources.finish(transfer_id)
        if source is None:
            return
        with self._lock:
            record = self._records.pop(("send", transfer_id), None)
        # A mover reports a transfer's end before it releases the offer, so a record that is left is of one that died.
        if record is not None and not self.mover.is_running:
            self._lose(record[0], "the mover ended")
        source.cache.ended = True  # before the event: the step loop may not know of the offer yet
        self._post(OfferEnded(source.cache.subject.handle))

    def _end_fetch(self, ended: EndedFetch) -> None:
        entry = self._fetches.finish(ended.key)
        if entry is None:
            return
        fetch = entry.cache
        with self._lock:
            record = self._records.pop(("receive", ended.key), None)
        result: Fetched | PrfaasError
        if ended.fetched is not None:
            result = ended.fetched
        elif ended.is_unreachable:
            result = UnreachableError(ended.reason)
        elif record is not None:  # the mover has not reported its end
            self._lose(record[0], ended.reason)
            source = fetch.request
            result = PeerError(f"the fetch from {source.host}:{source.port} failed: {ended.reason}")
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
            found = self._records.pop((answer.direction, answer.transfer_id), None)
        if found is not None:
            subject = found[1]._replace(peer=answer.subject.peer)
            answer = msgspec.structs.replace(answer, subject=subject)
        self.counters.count_end(answer)


@dataclass(frozen=True)
class Fetcher:
    runner: StepRunner
    transfers: EngineTransfers

    def prepare(self, sequence: Sequence) -> CacheFetch:
        message, leg = sequence.request.message, sequence.request.open_leg
        if leg is None:
            raise InternalError(f"{sequence} has nothing to fetch")
        return self.transfers.prepare_leg(message, leg, sequence.computed_tokens, self.runner.place(sequence.held))

    def await_source(self, message: Generate, leg: LegParams, on_begin: Callable[[], None]) -> None:
        self.transfers.await_source(message, leg, on_begin)

    def decline(self, message: Generate | GiveCache, leg: LegParams) -> None:
        self.transfers.decline(message, leg)


class RemoteCaches:
    """The engine's fetches from and offers to other instances. `post` may be called from any thread."""

    def __init__(
        self,
        runner: StepRunner,
        cache: HybridCache,
        fetcher: Fetcher,
        post: Callable[[Event], None],
        origins_of: OriginsOf,
    ):
        self._runner, self._cache, self._origins_of = runner, cache, origins_of
        self._fetcher, self._post = fetcher, post
        self._waiting: dict[_PrefixName, list[Sequence]] = {}  # by the prefix that another sequence fetches
        self.outcomes: Counter[FetchOutcome] = Counter()
        self.prefix_tokens = 0  # Tokens of fetched prefixes.

    def await_source(self, sequence: Sequence) -> None:
        """Let a sequence wait, without memory, until another instance begins to compute its prompt."""
        request, leg = sequence.request, sequence.request.open_leg
        if leg is None:
            raise InternalError(f"{sequence} has nothing to await")
        sequence.phase, handle = Phase.AWAITING, request.handle
        self._fetcher.await_source(request.generate, leg, lambda: self._post(SourceBegun(handle, time.monotonic())))

    def join_fetch(self, sequence: Sequence) -> bool:
        """Let a sequence wait for the prefix that another one fetches, instead of its own; False if none does."""
        leg = sequence.request.open_leg
        waiting = self._waiting.get(_prefix_name(sequence, leg)) if leg is not None and leg.tokens else None
        if waiting is None:
            return False
        self.decline_leg(sequence.request)
        sequence.phase = Phase.JOINING
        waiting.append(sequence)
        self.outcomes["joined"] += 1
        return True

    def decline_leg(self, request: EngineRequest) -> None:
        """Tell the source of a leg that was not fetched, if there is one, that nobody wants its cache."""
        if (leg := request.open_leg) is not None:
            request.leg_done = True
            self._fetcher.decline(request.message, leg)

    def start_fetch(self, sequence: Sequence) -> None:
        """Fetch what another instance may have of an admitted sequence, which is FETCHING until `finish_fetch`."""
        request, leg = sequence.request, sequence.request.open_leg
        if leg is None:
            return
        if leg.tokens:
            self._waiting[_prefix_name(sequence, leg)] = []
        sequence.phase, handle = Phase.FETCHING, request.handle
        request.fetch = self._fetcher.prepare(sequence)
        request.fetch.start(lambda result: self._post(FetchEnded(handle, result, time.monotonic())))

    def finish_fetch(self, sequence: Sequence, result: Fetched | PrfaasError) -> None:
        """Continue after the fetch of a leg's cache."""
        request, leg = sequence.request, sequence.request.open_leg
        if leg is None:
            raise InternalError(f"{sequence} has fetched nothing")
        request.leg_done = True
        if leg.tokens:
            self._note_prefix(sequence, leg, result)
        else:
            request.ran_alone = False
            if isinstance(result, Fetched):  # it was computed for this request
                request.prefill_seconds = result.done.prefill_seconds
            else:
                why = f" {UNREACHABLE}" if isinstance(result, UnreachableError) else ""
                request.cached_tokens, request.lost_transfer = 0, leg.transfer_id + why
        if sequence.phase is Phase.ENDING:
            return
        if isinstance(result, Fetched):
            self._adopt(sequence, leg, result)
        else:
            log.warning("%s is computed here, its cache did not come: %s", request.message.request_id, result)
            sequence.release(self._cache)  # its state may be half written

    def give_prefix(self, sequence: Sequence, slots: int, running: int) -> Failed | None:
        """Give the cache of a sequence's tokens, all of them, to another instance; or return why it cannot be given. A
        given sequence is DELIVERING until its offer ends. So many `slots` may be given, and so many others run."""
        request, handle, tokens = sequence.request, sequence.request.handle, len(sequence.token_ids)
        offer = request.offer
        if offer is None:
            raise InternalError(f"request {handle} asks for no prefix")
        chain, places = sequence.chain.hashes, request.message.places
        if self._cache.cached_tokens(chain, tokens, places) < tokens:
            text = f"no prefix of {tokens} tokens of this prompt is cached here"
            return Failed(handle, 404, CODE_PREFIX_NOT_FOUND, text)
        lease = self._cache.open_prefix(chain, tokens, places) if slots > 0 else None
        if lease is None:
            text = "all sequences of this instance are in use: no prefix can be given now"
            return Failed(handle, 503, CODE_OVERLOADED, text)
        if self._cache.free_pages < running:
            self._cache.close(lease)
            text = "the cache of this instance is in use: no prefix can be given now"
            return Failed(handle, 503, CODE_OVERLOADED, text)
        sequence.lease, sequence.phase, request.cached_tokens = lease, Phase.DELIVERING, tokens
        for frame in prefix_frames(offer.manifest, self._runner.place(lease)):
            offer.put(frame)
        offer.finish_computing(0.0, origins=tuple(sorted(lease.origins)))
        return None

    def _note_prefix(self, sequence: Sequence, leg: LegParams, result: Fetched | PrfaasError) -> None:
        """Count the fetch of a prefix, and let those go on that waited for it."""
        self.outcomes[_outcome(sequence, result)] += 1
        if isinstance(result, Fetched):
            self.prefix_tokens += result.tokens - sequence.computed_tokens
            sequence.request.cached_tokens = result.tokens
        for waiter in self._waiting.pop(_prefix_name(sequence, leg)):
            if waiter.phase is Phase.JOINING:
                waiter.phase = Phase.WAITING

    def _adopt(self, sequence: Sequence, leg: LegParams, cache: Fetched) -> None:
        sequence.request.prefix = cache
        self._cache.receive(sequence.held, self._origins_of(leg, cache.done.origins))
        sequence.computed_tokens, sequence.phase, sequence.is_exact = cache.tokens, Phase.RUNNING, cache.is_exact
        # The state came along: kept here, the next prompt behind this prefix needs no fetch.
        sequence.cuts = (cache.tokens, *(cut for cut in sequence.cuts if cut > cache.tokens))
        sequence.publish(self._cache)


def received_origins(
    own_cluster: str, knows_peers: bool, leg: LegParams, stands_on: Collection[str] | None
) -> frozenset[str]:
    """Return the origins of a cache that the source of a leg gave, by its place; `stands_on` is what it says of others.
    Where no peer proves what it is, whatever is not of the own cluster may be from anywhere."""
    giver = own_cluster if leg.cluster == own_cluster else leg.place or leg.cluster or UNKNOWN_PLACE
    others = {giver, *([UNKNOWN_PLACE] if stands_on is None else stands_on)} - {own_cluster}
    return frozenset(others if knows_peers or not others else [UNKNOWN_PLACE])


def export_of(sequence: Sequence, tokens: int, place: CachePlace) -> Export | None:
    """Return what sends the layers of a sequence's next tokens, as they are computed; None for its own instance's
    prompts. Cached rows before them are sent at once: they are not computed again, but the other instance may lack
    them."""
    request, offer = sequence.request, sequence.request.offer
    if offer is None:
        return None
    span = (sequence.computed_tokens, sequence.computed_tokens + tokens)
    if request.offered_tokens < span[0]:
        mark = place.staging.mark() if place.staging else None
        for layer in range(len(place.memory.geometry.layers)):
            _send_rows(offer, place, layer, (request.offered_tokens, span[0]), mark)
    request.offered_tokens = span[1]
    last = tokens == sequence.remaining_tokens

    def export(layer: int, mark: DeviceMark | None) -> None:
        _send_rows(offer, place, layer, span, mark)
        if last:
            for frame in state_frames(offer.manifest, place, layer, mark):
                offer.put(frame)

    return export


def _send_rows(
    offer: OfferedCache, place: CachePlace, layer: int, span: tuple[int, int], mark: DeviceMark | None
) -> None:
    for frame in block_frames(offer.manifest, place, layer, span, mark):
        offer.put(frame)


def _outcome(sequence: Sequence, result: Fetched | PrfaasError) -> FetchOutcome:
    if sequence.phase is Phase.ENDING:
        return "cancelled"
    return "failed" if isinstance(result, PrfaasError) else "fetched"


def _prefix_name(sequence: Sequence, leg: LegParams) -> _PrefixName:
    """Return what two sequences have in common that want the same: the hash of the prefix's last block, of the same
    cluster. Another one may be forbidden to the second, and would delay it for nothing."""
    return leg.tokens, tuple(sequence.chain.hashes[: leg.tokens // sequence.chain.block_tokens][-1:]), leg.cluster
