"""The engine's requests, their sequences with phases and samplers, and the events that other threads report."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sized
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from prfaas.errors import InternalError, PrfaasError, RequestError
from prfaas.kvindex.blocks import BlockChain
from prfaas.rights import COUNTED_PART
from prfaas.schedule import RunningSequence, ScheduleFacts, WaitingSequence, most_further_slots
from prfaas.wire.engine import Cancel, Generate, GiveCache, ResetCache, Sampling, SetRole
from prfaas.wire.prefill import LegParams
from prfaas.wire.trace import Moment, Stamps, first_token_moments
from prfaas.wire.transfer import Manifest
from prfaas_transfer.mover.messages import Fetched
from prfaas_transfer.send import Frame
from prfaas_worker.cache.blocks import Lease
from prfaas_worker.cache.cache import HybridCache


def goal_of(token_ids: Sized, leg: LegParams | None = None) -> int:
    """Return the tokens of a prompt whose cache crosses: those of the prefix that the gateway named, or all but the
    last. A destination then has one token to compute, like any sequence that decodes, and draws from logits of its own.
    Of a prefix that leaves no token nothing crosses."""
    most = max(0, len(token_ids) - 1)
    if leg is None or not leg.tokens:
        return most
    return leg.tokens if leg.tokens <= most else 0


class OfferedCache(Protocol):
    """One cache for another instance: the loop puts in what it computes."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def ended(self) -> bool:
        """Whether nothing reads the cache any more."""
        ...

    def begin(self) -> None:
        """Note that its prompt begins to be computed: a destination that awaits this takes memory for it."""
        ...

    def put(self, frame: Frame) -> None: ...

    def finish_computing(
        self, prefill_seconds: float, *, is_exact: bool = True, origins: tuple[str, ...] | None = None
    ) -> None:
        """Note that every frame was put; not `is_exact` if it was computed on a cache that passed a lossy codec.
        `origins` are the other clusters whose bytes it stands on; None: nobody knows."""
        ...

    def fail(self, message: str) -> None:
        """Note that the prefill failed; its connections, or its lease, end it."""
        ...

    def cancel(self) -> None:
        """End it at once: nobody waits for it."""
        ...


class CacheFetch(Protocol):
    """A fetch of another instance's cache. `on_end(result or error)` is called once, from any thread; then nothing of
    the fetch touches its memory."""

    def start(self, on_end: Callable[[Fetched | PrfaasError], None]) -> None: ...

    def cancel(self) -> None:
        """End the fetch at once; its end is reported all the same."""
        ...


class Outputs(NamedTuple):
    """A model's outputs: the logits' width, and the tokens that end an answer."""

    vocab_size: int
    eos_ids: tuple[int, ...]


class Sampler:
    """The state of one choice's answer, whose tokens `check_tokens` has checked: a function of (request, choice, tokens
    generated). Made anew from these, here or on another instance, it continues as the old one would have. It holds no
    cache, so a preempted request keeps its sampler. `counts` are the answer's tokens, if biases or penalties count."""

    __slots__ = ("choice", "counts", "ends", "greedy", "hold_back", "logprobs", "position", "prompt", "sampling")

    def __init__(self, generate: Generate, choice: int, outputs: Outputs, generated: Collection[int] = ()):
        sampling = generate.sampling
        self.sampling = sampling
        self.greedy = sampling.temperature == 0 or sampling.top_k == 1
        self.logprobs = generate.logprobs
        eos_ids = () if generate.ignore_eos else outputs.eos_ids
        self.ends = frozenset(eos_ids) | frozenset(generate.stop_token_ids)
        self.hold_back = generate.min_tokens - len(generated) if self.ends else 0
        self.counts = Counter(generated) if _needs_edits(sampling) else None
        self.prompt = frozenset(generate.token_ids if sampling.repetition_penalty != 1 else ())
        self.choice = choice
        self.position = len(generate.token_ids) + len(generated)

    def accept(self, token: int) -> None:
        """Advance over a drawn token."""
        self.position += 1
        self.hold_back -= 1
        if self.counts is not None:
            self.counts[token] += 1


def _needs_edits(sampling: Sampling) -> bool:
    penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    return bool(sampling.logit_bias) or penalties != (1.0, 0.0, 0.0)


def check_tokens(generate: Generate, vocab_size: int) -> None:
    """Raise RequestError if a request names a token that the model does not have."""
    for name, tokens in (
        ("logit_bias", [token for token, _ in generate.sampling.logit_bias]),
        ("stop_token_ids", generate.stop_token_ids),
    ):
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise RequestError(f"{name}: token {wrong[0]} is none of the model's {vocab_size}", param=name)


class Phase(Enum):
    """The phase of a sequence.

    AWAITING, WAITING and JOINING hold no memory. AWAITING waits until another instance begins to compute its prompt;
    JOINING waits for a prefix that another sequence fetches. FETCHING waits for another instance's cache. RUNNING
    computes, or will as soon as there is a slot for a cache that has come. DELIVERING waits until another instance has
    ours. ENDING waits for a transfer's thread to release the memory.
    """

    AWAITING = "awaiting"
    WAITING = "waiting"
    JOINING = "joining"
    FETCHING = "fetching"
    RUNNING = "running"
    DELIVERING = "delivering"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, and the tokens that one choice of a request has drawn.

    The first `computed_tokens` of `token_ids` are in the cache. Once all are, the next token is drawn. So a decoding
    sequence has one token left to compute, and a preempted one has them all. Another can take its memory at any time. A
    chunk must end at each length in `cuts`, because the state there is to be kept. If not `is_exact`, the rows passed a
    lossy codec and must not enter the prefix cache.
    """

    request: "EngineRequest"
    index: int
    token_ids: list[int]
    chain: BlockChain
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    computed_tokens: int = 0
    cuts: tuple[int, ...] = ()
    is_exact: bool = True
    sampler: Sampler | None = None
    continues: bool = False  # It had a place for its answer in the last step.

    def __str__(self) -> str:
        return f"choice {self.index} of request {self.request.handle}"

    @property
    def held(self) -> Lease:
        if self.lease is None:
            raise InternalError(f"{self} holds no memory while {self.phase.value}")
        return self.lease

    @property
    def ready_sampler(self) -> Sampler:
        """The sampler of a sequence with a computed prompt; preemption keeps it."""
        if self.sampler is None:
            raise InternalError(f"{self} draws before its prompt is computed")
        return self.sampler

    @property
    def remaining_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids) - self.request.prompt_tokens

    @property
    def most_cached_tokens(self) -> int:
        """The tokens that may come from the cache. The last one is computed in any case: the next one is drawn from its
        output. What is fetched of a whole prompt has one row at least.
        """
        leg = self.request.open_leg
        return len(self.token_ids) - 1 if leg is None or leg.tokens else goal_of(self.request.message.token_ids) - 1

    @property
    def computes(self) -> bool:
        """True if it has memory for a prompt that is computed here, or for its answer."""
        return self.phase in (Phase.RUNNING, Phase.FETCHING) and self.request.computes_prompt

    def has_nearly_all(self, cache: HybridCache) -> bool:
        """Return whether less than a block of its leg's cache is missing here. Then it is not fetched."""
        request = self.request
        if request.open_leg is None:
            return False
        cached_tokens = cache.cached_tokens(self.chain.hashes, len(self.token_ids) - 1, request.message.places)
        goal = goal_of(request.message.token_ids, request.open_leg)
        return cached_tokens > 0 and goal - cached_tokens < self.chain.block_tokens

    def comes_whole(self, cache: HybridCache) -> bool:
        """Return whether all of its cache but the last token's comes from another instance, with its state."""
        return self.request.is_remote and not self.has_nearly_all(cache)

    def next_tokens(self, tokens: int) -> list[int]:
        return self.token_ids[self.computed_tokens : self.computed_tokens + tokens]

    def publish(self, cache: HybridCache) -> None:
        """Publish the complete blocks in the prefix cache, and keep the state where a checkpoint is due."""
        if not self.is_exact:
            return
        blocks, rest = divmod(self.computed_tokens, self.chain.block_tokens)
        decoding = self.computed_tokens > self.request.prompt_tokens
        if decoding:
            if rest:
                return
            self.chain.extend(self.token_ids[self.chain.tokens : self.computed_tokens])
        cache.publish(self.held, self.chain, blocks)
        if rest == 0 and (decoding or self.computed_tokens in self.cuts):
            cache.checkpoint(self.held, self.chain, blocks, rolling=decoding)

    def release(self, cache: HybridCache) -> None:
        """Release the memory and wait to be computed again; published blocks may still be cached then."""
        cache.close(self.held)
        self.lease, self.computed_tokens, self.phase, self.continues = None, 0, Phase.WAITING, False


class StoredPrompt(NamedTuple):
    """The cache of a computed prompt, for choices that found no slot."""

    lease: Lease
    tokens: int
    is_exact: bool


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One call of the front: a generation, or a prefill or cached prefix for another instance, with its offer. It has
    one sequence until the prompt is computed, then one for each choice that has not ended. While some of these have no
    memory, its prompt may be `stored`."""

    message: Generate | GiveCache
    offer: OfferedCache | None = None
    offered_tokens: int = 0  # Tokens whose rows were put into the offer.
    sequences: list[Sequence] = field(default_factory=list)
    fetch: CacheFetch | None = None
    started: bool = False  # The front has its answer, or its first token.
    begun: bool = False  # Some of its prompt is computed, or will be when the step under way ends.
    arrived: float = field(default_factory=time.monotonic)
    queue_seconds: float | None = None
    prefill_seconds: float = 0.0
    ran_alone: bool = True  # True if no other work shared the steps of its prompt: its time is a prefill's cost.
    cached_tokens: int = 0
    leg_done: bool = False  # True if the cache of its leg was fetched, will not come, or is not wanted.
    lost_transfer: str = ""  # The header LOST_TRANSFER of its answer.
    prefix: Fetched | None = None
    fetched_at: float | None = None  # When the fetch of its leg ended, well or not.
    stored: StoredPrompt | None = None
    handle: int = field(init=False)
    prompt_tokens: int = field(init=False)
    queued_at: float = field(init=False)  # When it might have memory: at its arrival, or when its source began.

    def __post_init__(self) -> None:
        self.handle, self.queued_at = self.message.handle, self.arrived
        self.prompt_tokens = len(self.message.token_ids)

    @property
    def caller(self) -> str:
        """The buyer who has its prompt prefilled; empty for all others."""
        return self.message.caller if isinstance(self.message, GiveCache) else ""

    @property
    def is_generation(self) -> bool:
        return isinstance(self.message, Generate)

    @property
    def generate(self) -> Generate:
        if not isinstance(self.message, Generate):
            raise InternalError(f"request {self.handle} is for another instance: it generates nothing")
        return self.message

    @property
    def is_remote(self) -> bool:
        """True if another instance prefills its prompt, which is not here yet."""
        return self.is_generation and (leg := self.open_leg) is not None and not leg.tokens

    @property
    def computes_prompt(self) -> bool:
        """True if its prompt is computed here, perhaps behind a prefix that is fetched. False if its cache comes, has
        come, or is here: then hardly anything is computed, unless it is preempted."""
        leg = self.message.leg
        return not self.is_generation or leg is None or leg.tokens > 0 or bool(self.lost_transfer)

    @property
    def open_leg(self) -> LegParams | None:
        """The leg of a destination whose cache was not fetched yet; None if there is nothing to fetch."""
        if self.leg_done:
            return None
        # What is computed here ends with the last token, or for another instance with the last but one.
        leg, most = self.message.leg, self.prompt_tokens - 1
        wanted = most if leg is None else leg.tokens or most
        if isinstance(self.message, GiveCache):
            leg, most = self.message.leg.prefix, most - 1
            wanted = 0 if leg is None else leg.tokens
        return leg if leg is not None and 0 < wanted <= most else None

    def moments(self, step_began: float) -> tuple[Moment, ...]:
        """Return the moments of the first token, whose prompt is computed now, in the step that began then."""
        fetched, leg = self.prefix, self.message.leg
        source_computed = first_byte = None
        if fetched is not None and self.fetched_at is not None:
            first_byte = self.fetched_at - fetched.transfer_seconds
            if fetched.done.computed_seconds is not None:
                source_computed = first_byte + fetched.done.computed_seconds - fetched.done.first_byte_seconds
        return first_token_moments(
            Stamps(
                admitted=self.queued_at + (self.queue_seconds or 0.0),
                prefill_seconds=self.prefill_seconds,
                computed=time.monotonic(),
                step_began=step_began,
                fetched=self.fetched_at,
                first_byte=first_byte,
                source_computed=source_computed,
                is_remote=fetched is not None and leg is not None and not leg.tokens,
            )
        )

    @property
    def is_owed_answer(self) -> bool:
        """True if the front waits for the end of a prefill for another instance."""
        return isinstance(self.message, GiveCache) and not self.started

    @property
    def gives_prefix(self) -> bool:
        """True if it gives another instance what is cached."""
        return isinstance(self.message, GiveCache) and self.message.leg.tokens > 0

    @property
    def choices(self) -> int:
        """Choices that have not ended."""
        return self.message.choices if isinstance(self.message, Generate) and not self.started else len(self.sequences)

    @property
    def with_memory(self) -> int:
        """Sequences that have memory."""
        return sum(sequence.lease is not None for sequence in self.sequences)

    @property
    def waits(self) -> bool:
        """True while it waits for the engine, or its source's: a generation without memory, of which a choice may have
        some; a prefill for another instance, with memory or without, until some of it is computed. One that fetches
        waits for a link."""
        if self.is_generation:
            return not self.with_memory
        phase = self.sequences[0].phase
        return phase in (Phase.WAITING, Phase.JOINING) or (phase is Phase.RUNNING and not self.begun)

    def drop_stored(self, cache: HybridCache) -> None:
        """Release the stored prompt, if there is one: choices that wait compute theirs again."""
        if self.stored is not None:
            cache.close(self.stored.lease)
            self.stored = None

    def drop_unneeded(self, cache: HybridCache) -> None:
        """Release the stored prompt if no choice waits for it."""
        if all(sequence.phase is not Phase.WAITING for sequence in self.sequences):
            self.drop_stored(cache)


class Requests(dict[int, EngineRequest]):
    """All requests by handle, in order of arrival. At most `max_running` of their sequences decode at once."""

    def __init__(self, max_running: int):
        super().__init__()
        self._max_running = max_running

    def sequences(self) -> Iterator[Sequence]:
        return (sequence for request in self.values() for sequence in request.sequences)

    def counts(self) -> Counter[tuple[bool, bool]]:
        """Count requests by (for another instance, waits)."""
        return Counter((not request.is_generation, request.waits) for request in self.values())

    def has_too_many(self, most_waiting: int, slots: int) -> bool:
        """Return whether as many generations wait for memory as may. Those that await their source wait for none yet;
        they and the others are no more than may wait or have a slot."""
        without = self.counts()[False, True]
        awaiting = sum(one.phase is Phase.AWAITING for one in self.sequences())
        return without - awaiting >= most_waiting or without >= most_waiting + slots

    def facts(self, cache: HybridCache) -> ScheduleFacts[Sequence]:
        running = [_running(one, cache) for one in self.sequences() if one.phase is Phase.RUNNING]
        return ScheduleFacts(
            waiting=self._waiting(cache),
            running=running,
            free_slots=cache.free_slots,
            free_pages=cache.free_pages,
            further_slots=self.further_slots() if cache.free_slots else 0,
            most_decodes=self._max_running,
        )

    def further_slots(self) -> int:
        """Return how many more slots further choices of requests may take."""
        taken = sum(max(0, request.with_memory - 1) for request in self.values())
        return min(most_further_slots(self._max_running) - taken, self._max_running - self._computing)

    @property
    def _without_slot(self) -> int:
        """Caches that come, or have come and wait for a slot."""
        return sum(one.lease is not None and not one.lease.has_slot for one in self.sequences())

    @property
    def _computing(self) -> int:
        return sum(sequence.computes for sequence in self.sequences())

    def slots_to_give(self, cache: HybridCache) -> int:
        """Return how many more slots prefixes for other instances may have: a quarter of all together, and none that
        the request of a caller takes next. They may be kept for as long as a destination's queue is."""
        further = sum(request.choices - request.with_memory for request in self.values() if request.with_memory)
        given = [one for request in self.values() if request.gives_prefix for one in request.sequences]
        waiting = sum(one not in given for one, _ in self._admissible(cache))
        waiting += min(self._without_slot, self._max_running)
        free_slots = cache.free_slots - waiting - max(0, min(further, self.further_slots()))
        return min(free_slots, max(1, cache.num_slots // 4) - sum(one.lease is not None for one in given))

    def drop_stored(self, cache: HybridCache) -> bool:
        """Release every stored prompt; False if there was none."""
        storing = [request for request in self.values() if request.stored is not None]
        for request in storing:
            request.drop_stored(cache)
        return bool(storing)

    def _waiting(self, cache: HybridCache) -> Iterator[WaitingSequence[Sequence]]:
        """Yield what waits and may have memory; not what needs a slot once those before have all: a look into the cache
        for each would make every step longer."""
        free_slots = cache.free_slots
        for sequence, further in self._admissible(cache):
            comes = sequence.comes_whole(cache)
            if comes or free_slots > 0:
                free_slots -= not comes
                yield WaitingSequence(sequence, _pages_wanted(sequence, cache, comes=comes), further, comes)

    def _admissible(self, cache: HybridCache) -> Iterator[tuple[Sequence, bool]]:
        """Yield what waits and may have memory, and whether it is a further choice. A buyer's prefills keep theirs
        until they are fetched: where one more would exceed its part of slots or pages, others pass. It may have one in
        any case. As many prompts are computed here as decode at once: the other slots are for caches that leave or have
        come. As many caches as there are slots lie in pages alone, or all pages would belong to those that wait."""
        slots, pages = Counter[str](), Counter[str]()
        for one in self.sequences():
            if one.lease is not None:
                slots[one.request.caller] += 1
                pages[one.request.caller] += len(one.lease.pages)
        computing, further_slots, without_slot = self._computing, self.further_slots(), self._without_slot
        for request in self.values():
            caller, further = request.caller, request.with_memory > 0
            for sequence in request.sequences:
                if sequence.phase is not Phase.WAITING:
                    continue
                # What may not be admitted takes nobody's place: neither a choice beyond its part, nor a buyer's prompt.
                if (further and further_slots <= 0) or (request.computes_prompt and computing >= self._max_running):
                    continue
                if request.is_remote and without_slot >= cache.num_slots:
                    continue
                if caller:
                    wanted = cache.pages_for(len(sequence.token_ids))
                    most_slots, most_pages = cache.num_slots // COUNTED_PART, cache.num_pages // COUNTED_PART
                    if slots[caller] and (slots[caller] >= most_slots or pages[caller] + wanted > most_pages):
                        continue
                    slots[caller] += 1
                    pages[caller] += wanted
                computing += request.computes_prompt
                without_slot += request.is_remote
                further_slots -= further
                yield sequence, further
                further = True


def _pages_wanted(sequence: Sequence, cache: HybridCache, *, comes: bool) -> int:
    """Return the free pages that a sequence takes when it is admitted. Others may hold its prompt's first pages."""
    tokens, stored = len(sequence.token_ids), sequence.request.stored
    if stored is not None:
        return cache.pages_for(tokens) - stored.tokens // sequence.chain.block_tokens
    most, places = sequence.most_cached_tokens, sequence.request.message.places
    return cache.free_pages_for(sequence.chain.hashes, tokens, most, comes=comes, places=places)


def _running(sequence: Sequence, cache: HybridCache) -> RunningSequence[Sequence]:
    lease, computed, total = sequence.held, sequence.computed_tokens, len(sequence.token_ids)
    cut = next((cut for cut in sequence.cuts if cut > computed), total)
    short = computed >= cache.capacity_tokens(lease)
    pinned = sequence.request.offer is not None  # its frames are views of its pages
    return RunningSequence(
        sequence,
        total - computed,
        cut - computed,
        len(lease.all_pages),
        short,
        decodes=computed + 1 == total and not pinned,
        pinned=pinned,
        continues=sequence.continues,
        lacks_slot=not lease.has_slot,
    )


class PrefillOffered(NamedTuple):
    message: GiveCache
    offer: OfferedCache


class OfferEnded(NamedTuple):
    """An offer was delivered, cancelled, or expired, and no thread sends from its memory."""

    handle: int


class SourceBegun(NamedTuple):
    """The source of a request's cache begins to compute it, or cannot be awaited; `at` is that moment, by the monotonic
    clock."""

    handle: int
    at: float


class FetchEnded(NamedTuple):
    """A fetch ended, and its thread no longer writes to its memory; `at` is that moment, by the monotonic clock."""

    handle: int
    result: Fetched | PrfaasError
    at: float


Event = Generate | Cancel | ResetCache | SetRole | PrefillOffered | OfferEnded | SourceBegun | FetchEnded
