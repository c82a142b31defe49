"""The requests that the engine knows, each with all that it holds: the only owner of sequences and their caches."""

from dataclasses import dataclass, field
from enum import Enum

import torch

from prfaas.errors import InternalError
from prfaas.wire.engine import Generate
from prfaas_worker.engine.schedule import Facts, Prefilling, Waiting
from prfaas_worker.models.base import SequenceCache
from prfaas_worker.transfer.fetch import Fetch
from prfaas_worker.transfer.offers import Offer


class Phase(Enum):
    """Where a request stands. FETCHING waits for another instance's prefill, DELIVERING for another to take ours."""

    WAITING = "waiting"
    FETCHING = "fetching"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DELIVERING = "delivering"


@dataclass(slots=True)
class Choice:
    """One continuation: its cache, the last drawn token (which is not in the cache yet), and how many were drawn."""

    index: int
    cache: SequenceCache
    last_token: int = -1
    generated: int = 0


@dataclass(slots=True)
class Request:
    """One call of the front: a generation, or with an offer a prefill for another instance."""

    handle: int
    token_ids: list[int]
    generate: Generate | None = None
    offer: Offer | None = None
    phase: Phase = Phase.WAITING
    cache: SequenceCache | None = None
    fetch: Fetch | None = None
    prefill_seconds: float = 0.0
    choices: list[Choice] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Sequences it needs."""
        return self.generate.choices if self.generate else 1

    @property
    def generation(self) -> Generate:
        """What was asked of a request that is no prefill for another instance."""
        if self.generate is None:
            raise InternalError(f"request {self.handle} is a prefill for another instance: it generates nothing")
        return self.generate

    @property
    def admitted_cache(self) -> SequenceCache:
        """The cache of a request that is admitted and does not decode yet."""
        if self.cache is None:
            raise InternalError(f"request {self.handle} has no cache while {self.phase.value}")
        return self.cache

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens that are not in its cache yet."""
        return len(self.token_ids) - (self.cache.length if self.cache else 0)

    def chunk(self, tokens: int) -> torch.Tensor:
        """Return the next prompt tokens, int64 [tokens]."""
        start = self.cache.length if self.cache else 0
        return torch.tensor(self.token_ids[start : start + tokens], dtype=torch.int64)


class Requests:
    """All requests in order of arrival."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Request] = {}

    def __getitem__(self, handle: int) -> Request:
        return self._by_handle[handle]

    def get(self, handle: int) -> Request | None:
        """Return a request that may have ended."""
        return self._by_handle.get(handle)

    def add(self, request: Request) -> None:
        """Take a request in, behind all others."""
        self._by_handle[request.handle] = request

    def remove(self, handle: int) -> Request | None:
        """Drop a request and with it all that it holds."""
        return self._by_handle.pop(handle, None)

    def in_phase(self, *phases: Phase, offered: bool | None = None) -> list[Request]:
        """Return requests in these phases; `offered` keeps prefills for others (True) or generations (False)."""
        return [
            request
            for request in self._by_handle.values()
            if request.phase in phases and (offered is None or (request.offer is not None) == offered)
        ]

    def facts(self) -> Facts:
        """Return what the schedule decides on."""
        everyone = self._by_handle.values()
        return Facts(
            waiting=tuple(Waiting(r.handle, r.width) for r in everyone if r.phase is Phase.WAITING),
            prefilling=tuple(Prefilling(r.handle, r.remaining_tokens) for r in everyone if r.phase is Phase.PREFILLING),
            decoding=tuple(r.handle for r in everyone if r.phase is Phase.DECODING),
            held=sum(r.width for r in everyone if r.phase is not Phase.WAITING),
        )
