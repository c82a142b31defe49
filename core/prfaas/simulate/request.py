"""A request: its arrival, and its state while it is served."""

from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class Request:
    """One request in flight. Plain slots: there are millions of them."""

    index: int
    arrival: Arrival
    began: Route | None = None
    """The first route; what the request counts as never changes."""
    route: Route | None = None
    run: int = 0
    """Counts its routes, so that what an abandoned one still had scheduled is known by it."""
    attempts: int = 0
    tried: set[str] = field(default_factory=set[str])
    generated_tokens: int = 0
    first_token_seconds: float | None = None
    prefill_seconds: float = 0.0
    """Of the steps that computed more than one token of its prompt, on its present route."""
    prefill_ended_seconds: float | None = None
    """When the last one did."""
    fetch: PrefixFetch | None = None
    """The prefix that its prefill instance fetches first, on its present route."""
    queued_tokens: int = 0
    """Tokens that its gateway counts as still to be prefilled."""
    computed_tokens: int = 0
    """Tokens that its route prefills, beside those that a cache held."""
    crossing_token_bytes: float = 0.0
    """Bytes of its cache that cross a link for each computed token."""
    state_bytes: float = 0.0
    """Bytes that follow the last chunk."""
    prefilled: bool = False
    """True when its prefill instance has computed all of it."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt, with those generated before an instance died."""
        return self.arrival.input_tokens + self.generated_tokens

    @property
    def output_left_tokens(self) -> int:
        return self.arrival.output_tokens - self.generated_tokens
