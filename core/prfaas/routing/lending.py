"""Does borrowing pay? A prefill instance has less of a prompt cached than the instance that asks for its prefill.

The asking one could send what it has over the same connection first: rows of tokens h (cached here) up to n (cached
there), and the states after n. With a prompt of t tokens, a link of r bits a second and a round trip of RTT,

    borrowing   ROUND_TRIPS * RTT + 8 * (state_bytes + token_bytes * (n - h)) / r
    computing   T(t - h behind h) - T(t - n behind n)         what a prefill takes, less what is left of it

Borrowing also takes bandwidth from others and can fail, and a prefill beside others is slower than T says; so it has to
save a share of the time, `MARGIN`. Where the link or the prefill is not measured yet, it is computed: that is measured
then, and never wrong by more than there is to compute.
"""

import math
from typing import Final

import msgspec

from prfaas.capacity.profile import prefill_seconds
from prfaas.wire.profile import Profile

MARGIN: Final = 0.3
"""Share of the computing time that borrowing must save."""
ROUND_TRIPS: Final = 3
"""Until what was asked for flows at the link's rate: the question, and the beginning of a connection that slept."""


class LendingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, what is cached of it at both ends, and what either way costs."""

    prompt_tokens: int
    cached_tokens: int
    """With a state at their end, here."""
    lend_tokens: int
    """Likewise, at the instance that asks."""
    profile: Profile
    """Of this instance: what a prefill takes, bytes a token and of the states."""
    link_mbps: float | None
    """What the link between the two delivered last; None when that is not known."""
    round_trip_seconds: float


class Lending(msgspec.Struct, frozen=True):
    """Whether to borrow, and why."""

    borrow: bool
    reason: str


def decide_lending(facts: LendingFacts) -> Lending:
    """Decide for one prompt."""
    tokens = facts.lend_tokens - facts.cached_tokens
    if tokens <= 0:
        return Lending(False, f"{facts.cached_tokens} tokens are cached here, {facts.lend_tokens} there")
    if facts.link_mbps is None or not (math.isfinite(facts.link_mbps) and facts.link_mbps > 0):
        return Lending(False, "the link is not measured yet")
    computing, borrowing = computing_seconds(facts), borrowing_seconds(facts, facts.link_mbps)
    said = f"{tokens} tokens: {borrowing:.3f} s to borrow at {facts.link_mbps:.0f} Mbit/s, {computing:.3f} s to compute"
    return Lending(borrowing < (1 - MARGIN) * computing, said)


def computing_seconds(facts: LendingFacts) -> float:
    """Return what a prefill takes longer without the tokens that could be borrowed; 0 where nothing was measured."""
    whole = prefill_seconds(facts.profile, facts.prompt_tokens - facts.cached_tokens, facts.cached_tokens)
    rest = prefill_seconds(facts.profile, facts.prompt_tokens - facts.lend_tokens, facts.lend_tokens)
    return whole - rest


def borrowing_seconds(facts: LendingFacts, link_mbps: float) -> float:
    """Return what it takes to bring them over a link of this rate."""
    profile = facts.profile
    nbytes = profile.state_bytes + profile.token_bytes * (facts.lend_tokens - facts.cached_tokens)
    return ROUND_TRIPS * facts.round_trip_seconds + 8 * nbytes / (link_mbps * 1e6)
