"""The engine's bookkeeping: requests, their sequences, and where each of them stands."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from prfaas.errors import InternalError
from prfaas.kvindex.blocks import BlockChain
from prfaas.wire.engine import Generate, StartPrefill, StartPrefix
from prfaas.wire.prefill import PrefillRequest, PrefixRequest
from prfaas.wire.trace import TraceContext
from prfaas_worker.cache.blocks import Lease
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.engine.events import Part
from prfaas_worker.engine.grammar import Compiled
from prfaas_worker.engine.sampling import Sampler
from prfaas_worker.engine.schedule import Facts, Running, Waiting
from prfaas_worker.transfer.fetch import Fetched, RemoteFetch
from prfaas_worker.transfer.offers import Offer


class Phase(Enum):
    """Where a sequence stands.

    PREPARING waits for what other threads make ready; it and WAITING hold nothing. FETCHING waits for what another
    instance sends, DELIVERING for another to take ours, ENDING only for a transfer's thread to let go of memory.
    """

    PREPARING = "preparing"
    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    DELIVERING = "delivering"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens: a prompt, then what one choice of a request has drawn.

    The first `computed_tokens` of `token_ids` stand in the cache. Once all do, the next token is drawn; so a sequence
    that decodes has one token left to compute, and one that was preempted has them all. `cuts` are lengths at which a
    chunk must end, because the state there is to be kept. What `is_exact` no more stands on rows that came through a
    lossy codec: nobody else may find it.
    """

    request: "Request"
    index: int
    token_ids: list[int]
    chain: BlockChain
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    computed_tokens: int = 0
    cuts: tuple[int, ...] = ()
    is_exact: bool = True
    sampler: Sampler | None = None

    def __str__(self) -> str:
        return f"choice {self.index} of request {self.request.handle}"

    @property
    def held(self) -> Lease:
        """The memory of a sequence that is past WAITING."""
        if self.lease is None:
            raise InternalError(f"{self} holds no memory while {self.phase.value}")
        return self.lease

    @property
    def voice(self) -> Sampler:
        """What draws for a sequence whose prompt is computed; it stays when the memory goes."""
        if self.sampler is None:
            raise InternalError(f"{self} draws before its prompt is computed")
        return self.sampler

    @property
    def remaining_tokens(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def generated_tokens(self) -> int:
        """Tokens drawn so far."""
        return len(self.token_ids) - self.request.prompt_tokens

    def next_tokens(self, tokens: int) -> list[int]:
        """The next tokens to compute."""
        return self.token_ids[self.computed_tokens : self.computed_tokens + tokens]


@dataclass(slots=True, eq=False)
class Request:
    """One call of the front: a generation, or what another instance asked for and takes by an offer.

    Until the prompt is computed it has one sequence, after that one for each choice that has not ended.
    """

    handle: int
    prompt_tokens: int
    generate: Generate | None = None
    asked: StartPrefill | StartPrefix | None = None
    offer: Offer | None = None
    sequences: list[Sequence] = field(default_factory=list)
    fetch: RemoteFetch | None = None
    awaits: set[Part] = field(default_factory=set)
    grammar: Compiled | None = None
    started: bool = False
    arrived: float = field(default_factory=time.monotonic)
    queue_seconds: float | None = None
    prefill_seconds: float = 0.0
    alone: bool = True
    """Nothing else was computed beside its prompt: its time says what a prefill costs."""
    cached_tokens: int = 0
    prefix_url: str = ""
    """Whom to ask for a longer prefix than is cached, as long as that may be done."""
    prefix_cluster: str = ""
    """The cluster that it must be of, empty for any."""
    has_joined: bool = False
    """It waited for another's fetch of a prefix already."""
    prefix: Fetched | None = None
    """What came of it."""

    @property
    def is_remote(self) -> bool:
        """Its prompt is prefilled elsewhere, and is not here yet."""
        return self.generate is not None and bool(self.generate.prefill_url) and not self.started

    @property
    def slots(self) -> int:
        """State slots that a first admission must leave room for."""
        return self.generate.choices if self.generate and not self.started else 1

    @property
    def prompt(self) -> Generate | PrefillRequest | PrefixRequest:
        """The prompt that was asked for: by a client, or by another instance."""
        if self.asked is not None:
            return self.asked.request
        return self.generation

    @property
    def trace(self) -> TraceContext:
        """The trace that the request is part of."""
        return self.asked.trace if self.asked is not None else self.generation.trace

    @property
    def generation(self) -> Generate:
        """What was asked of a request that is no prefill for another instance."""
        if self.generate is None:
            raise InternalError(f"request {self.handle} is a prefill for another instance: it generates nothing")
        return self.generate


class Requests:
    """All requests in order of arrival."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Request] = {}

    def __iter__(self) -> Iterator[Sequence]:
        """Every sequence, in order of its request's arrival."""
        for request in self._by_handle.values():
            yield from request.sequences

    def get(self, handle: int) -> Request | None:
        """Return a request that may have ended."""
        return self._by_handle.get(handle)

    def add(self, request: Request) -> None:
        """Take a request in, behind all others."""
        self._by_handle[request.handle] = request

    def remove(self, handle: int) -> None:
        """Forget a request; who forgets it has given its memory back."""
        self._by_handle.pop(handle, None)

    def counts(self) -> Counter[tuple[bool, bool]]:
        """Count requests by (for another instance, it waits); choices that wait again do not count apart."""
        return Counter(
            (request.generate is None, request.sequences[0].lease is None) for request in self._by_handle.values()
        )

    def facts(self, cache: HybridCache) -> "Facts[Sequence]":
        """Return what the schedule decides on."""
        waiting: list[Waiting[Sequence]] = []
        running: list[Running[Sequence]] = []
        free_slots = cache.free_slots
        for sequence in self:
            phase = sequence.phase
            if phase is Phase.WAITING:
                if len(waiting) < cache.free_slots:  # more cannot be admitted
                    pages = cache.pages_for(len(sequence.token_ids))
                    waiting.append(Waiting(sequence, sequence.request.slots, pages))
            elif phase is not Phase.PREPARING:
                free_slots -= sequence.request.slots - 1  # its other choices come when its prompt is computed
                if phase is Phase.RUNNING:
                    running.append(_running(sequence, cache))
        return Facts(waiting, running, free_slots, cache.free_pages)


def _running(sequence: Sequence, cache: HybridCache) -> Running[Sequence]:
    lease, request = sequence.held, sequence.request
    computed, total = sequence.computed_tokens, len(sequence.token_ids)
    cut = next((cut for cut in sequence.cuts if cut > computed), total) if sequence.cuts else total
    short = computed >= cache.capacity_tokens(lease)
    decodes = computed + 1 == total and request.offer is None
    pinned = request.offer is not None  # its frames are views of its pages
    return Running(sequence, total - computed, cut - computed, len(lease.pages), short, decodes, pinned)
