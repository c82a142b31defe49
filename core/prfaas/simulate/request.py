"""A request: its arrival, and its state while it is served."""

from collections.abc import Sequence
from typing import NamedTuple

from prfaas.routing.facts import Route


class Arrival(NamedTuple):
    """One request of a trace or a generator.

    `blocks` name the prompt's blocks of the trace's own size, the last one perhaps not full. Equal names mean equal
    prompts up to the end of that block. Without any, the prompt shares nothing with others.
    """

    at_seconds: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()


class PrefixFetch(NamedTuple):
    """A cached prefix that is brought to the instance that prefills, before the prefill begins."""

    tokens: int
    """Of the prompt's beginning, there when it has come."""
    seconds: float
    """Duration inside a cluster; 0 over a link, where it depends on other transfers."""
    link: str
    """The link that it crosses; empty: none, inside a cluster."""
    nbytes: float


class Request:
    """One request in flight. Plain slots: there are millions of them."""

    __slots__ = (
        "arrival",
        "attempts",
        "began",
        "chunk_bytes",
        "chunk_ends",
        "computed_tokens",
        "fetch",
        "first_token_seconds",
        "generated_tokens",
        "index",
        "last_bytes",
        "prefill_seconds",
        "prefilled",
        "queued_tokens",
        "route",
        "run",
        "tried",
    )

    def __init__(self, index: int, arrival: Arrival):
        self.index = index
        self.arrival = arrival
        self.began: Route | None = None
        """The first route; what the request counts as never changes."""
        self.route: Route | None = None
        self.run = 0
        """Counts its routes, so that what an abandoned one still had scheduled is known by it."""
        self.attempts = 0
        self.tried: set[str] = set()
        self.generated_tokens = 0
        self.first_token_seconds: float | None = None
        self.fetch: PrefixFetch | None = None
        """The prefix that its prefill instance fetches first, on its present route."""
        self.queued_tokens = 0
        """Tokens that its gateway counts as still to be prefilled."""
        self.prefill_seconds = 0.0
        self.computed_tokens = 0
        """Tokens that its route prefills, beside those that a cache held."""
        self.chunk_ends: Sequence[float] = ()
        self.chunk_bytes = 0.0
        """Bytes of its cache that each chunk but the last hands to the link."""
        self.last_bytes = 0.0
        """Bytes that follow the last chunk, with the linear state."""
        self.prefilled = False
        """True when its prefill instance has computed all of it."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt, with those generated before an instance died."""
        return self.arrival.input_tokens + self.generated_tokens

    @property
    def output_left_tokens(self) -> int:
        return self.arrival.output_tokens - self.generated_tokens
