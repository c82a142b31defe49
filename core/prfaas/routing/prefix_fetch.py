"""Decides whether an instance fetches a prefix from another instance, and from which.

The instance that prefills has h tokens of a prompt cached; another one has n > h. With a prompt of t tokens, a link of
r bits a second and a round trip of RTT between the two,

    fetching    ROUND_TRIPS * RTT + 8 * (state_bytes + token_bytes * (n - h)) / r
    computing   T(t - h behind h) - T(t - n behind n)         what a prefill takes, less what is left of it

Fetching also takes bandwidth from others and can fail, and a prefill beside others is slower than T says. So it must
save a share of the time, `MARGIN`. Where the prefill is not measured yet, the prefix is computed.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from prfaas.capacity.profile import prefill_seconds
from prfaas.names import HUB
from prfaas.routing.affinity import cached_tokens, cheapest
from prfaas.routing.facts import Facts
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Instance

CLUSTER_MBPS: Final = 1000.0
"""What instances of one cluster are thought to be joined by at least, since nobody measures it: the slowest Ethernet
that servers have. A faster one makes prefixes worth fetching that are computed for it."""
MARGIN: Final = 0.3
"""Share of the computing time that fetching must save."""
ROUND_TRIPS: Final = 3
"""Until what was asked for flows at the link's rate: the question, and the beginning of a connection that slept."""


class PrefixFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, what is cached of it at both ends, and what either way costs."""

    prompt_tokens: int
    cached_tokens: int
    """Cached with a state at their end at the instance that prefills."""
    source_tokens: int
    """Likewise, at the source."""
    profile: Profile
    """Of the instance that prefills."""
    link_mbps: float
    round_trip_seconds: float


def pays(facts: PrefixFacts) -> bool:
    """Return whether fetching saves a good share of the time."""
    if facts.source_tokens <= facts.cached_tokens or not (math.isfinite(facts.link_mbps) and facts.link_mbps > 0):
        return False
    return fetching_seconds(facts) < (1 - MARGIN) * computing_seconds(facts)


def computing_seconds(facts: PrefixFacts) -> float:
    """Return how much longer a prefill takes without the tokens at the source; 0 where nothing was measured."""
    whole = prefill_seconds(facts.profile, facts.prompt_tokens - facts.cached_tokens, facts.cached_tokens)
    rest = prefill_seconds(facts.profile, facts.prompt_tokens - facts.source_tokens, facts.source_tokens)
    return whole - rest


def fetched_bytes(facts: PrefixFacts) -> int:
    """Return the rows and states that cross."""
    return facts.profile.state_bytes + facts.profile.token_bytes * (facts.source_tokens - facts.cached_tokens)


def fetching_seconds(facts: PrefixFacts) -> float:
    """Return how long the fetch takes."""
    return ROUND_TRIPS * facts.round_trip_seconds + 8 * fetched_bytes(facts) / (facts.link_mbps * 1e6)


def prefix_source(
    facts: Facts, prefiller: Instance, candidates: Sequence[Instance], clusters: Sequence[str]
) -> Instance | None:
    """Return the instance that `prefiller` should fetch more of the prompt's prefix from; None where that pays nowhere.

    `candidates` can be talked to. Those of the same cluster count. Where bandwidth is abundant, those of `clusters`
    count for an instance of the hub: the hub reaches them, and they do not reach the hub.
    """
    profile = facts.profiles.get(prefiller.name)
    if profile is None or not facts.cached_on:
        return None
    have_tokens = cached_tokens(facts, prefiller)
    near = [one for one in candidates if _reaches(facts, prefiller, one, clusters)]
    best = max((cached_tokens(facts, one) for one in near), default=0)
    if best <= have_tokens:
        return None
    source = cheapest(facts, [one for one in near if cached_tokens(facts, one) == best])
    if source is None:
        return None
    link_mbps, round_trip_seconds = _link(facts, prefiller, source)
    found = PrefixFacts(
        prompt_tokens=facts.total_tokens,
        cached_tokens=have_tokens,
        source_tokens=best,
        profile=profile,
        link_mbps=link_mbps,
        round_trip_seconds=round_trip_seconds,
    )
    return source if pays(found) else None


def _reaches(facts: Facts, prefiller: Instance, source: Instance, clusters: Sequence[str]) -> bool:
    if source.name == prefiller.name:
        return False
    if source.cluster == prefiller.cluster:
        return True
    return facts.rule.bandwidth == "Abundant" and prefiller.cluster == HUB and source.cluster in clusters


def _link(facts: Facts, prefiller: Instance, source: Instance) -> tuple[float, float]:
    """Return the Mbit/s and the round trip between two instances."""
    if source.cluster == prefiller.cluster:
        return CLUSTER_MBPS, 0.0
    priced = next((one.link_mbps for one in facts.rule.prices if one.cluster == source.cluster), None)
    cluster = next(one for one in facts.table.clusters if one.name == source.cluster)
    return priced or float(cluster.capacity_mbps), cluster.round_trip_millis / 1000
