"""Uses what instances have cached: which of several instances serves a request, and which one it fetches a prefix from.

An instance is chosen by its cache and its load in one unit, tokens:

    cost = tokens that the instance has still to compute for others
         + tokens of this prompt that are not cached there
         + ANSWER_TOKENS for every request that it decodes

The first two are to be computed before this prompt's first token, on an instance as fast as the others. The least is
the earliest. The third has the same unit. A decoded token takes at least the computing of a prefilled one, through the
same weights. So much is still to be computed for requests under way, as a mean. What is to come slows them and this
one. Equals are decided by the number of requests, then by the request's id.

Nothing has to be tuned. A prefix of n tokens draws requests to the instance that has it until n tokens more wait there
than elsewhere. The next request goes elsewhere, computes or fetches the prefix, and so makes a second instance that has
it. So hot prefixes spread over as many instances as their load needs, and rare ones stay where they are.

A prefix is fetched where that is quicker than computing it. The instance that prefills has h tokens of a prompt cached;
another one has n > h. With a prompt of t tokens, a link of r bits a second and a round trip of RTT between the two,

    fetching    ROUND_TRIPS * RTT + 8 * (state_bytes + token_bytes * (n - h)) / r
    computing   T(t - h behind h) - T(t - n behind n)         what a prefill takes, less what is left of it

Fetching also takes bandwidth from others and can fail, and a prefill beside others is slower than T says. So it must
save a share of the time, `MARGIN`. Where the prefill is not measured yet, the prefix is computed.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import xxhash

from prfaas.capacity.profile import prefill_seconds
from prfaas.names import HUB
from prfaas.routing.facts import RoutingFacts
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Instance

ANSWER_TOKENS: Final = 343
"""Mean length of an answer in the published conversation trace (Mooncake), of which the gateway cannot know its own."""
MARGIN: Final = 0.3
"""Share of the computing time that fetching must save."""
ROUND_TRIPS: Final = 3
"""Round trips until data flows at the link's rate: the request, and the slow start of an idle connection."""


def cached_tokens(facts: RoutingFacts, instance: Instance) -> int:
    """Return the tokens of the prompt that are cached at an instance; where only clusters are known, in its cluster."""
    if facts.cached_on is None:
        return facts.cached_tokens.get(instance.cluster, 0)
    return min(facts.cached_on.get(instance.name, 0), facts.total_tokens)


def lacking_tokens(facts: RoutingFacts, instance: Instance) -> int:
    """Return the tokens of the prompt that are not cached at an instance."""
    return max(0, facts.total_tokens - cached_tokens(facts, instance))


def cost_tokens(facts: RoutingFacts, instance: Instance) -> int:
    decoding = facts.in_flight.get(instance.name, 0) if instance.role == "decode" else 0
    queued = facts.queued_tokens.get(instance.name, 0)
    # Where only clusters are known, their order is decided before this, and inside of one all lack the same.
    lacking = lacking_tokens(facts, instance) if facts.cached_on is not None else 0
    return queued + lacking + ANSWER_TOKENS * decoding


def cheapest(facts: RoutingFacts, instances: Sequence[Instance]) -> Instance | None:
    if len(instances) < 2:
        return instances[0] if instances else None
    costs = [(cost_tokens(facts, one), facts.in_flight.get(one.name, 0)) for one in instances]
    least = min(costs)
    return spread(facts, [one for one, cost in zip(instances, costs, strict=True) if cost == least])


def cheapest_rank(
    request_id: str, cached_tokens: Sequence[int], queued_tokens: Sequence[int], decoding: Sequence[int]
) -> int:
    """Return the data-parallel rank of the lowest cost inside an instance; equals are decided as of instances."""

    def cost(rank: int) -> tuple[int, int, int]:
        lot = xxhash.xxh3_64_intdigest(f"{request_id}/{rank}".encode())
        return queued_tokens[rank] - cached_tokens[rank] + ANSWER_TOKENS * decoding[rank], decoding[rank], lot

    return min(range(len(cached_tokens)), key=cost)


def spread(facts: RoutingFacts, equals: Sequence[Instance]) -> Instance | None:
    """Return one of equals by the request's id.

    Taking the first by name would send every request of an idle moment, from every gateway, to one instance. A checksum
    would not do: CRC-32 is linear, so between some names the same one nearly always wins.
    """
    if len(equals) < 2:  # there is no choice
        return equals[0] if equals else None
    return min(equals, key=lambda one: (xxhash.xxh3_64_intdigest(f"{facts.request_id}/{one.name}".encode()), one.name))


class PrefixFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, its cached tokens at both ends, and the facts that give the cost of either way."""

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
    """Return True when fetching saves at least `MARGIN` of the computing time."""
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
    """Return the duration of the fetch."""
    return ROUND_TRIPS * facts.round_trip_seconds + 8 * fetched_bytes(facts) / (facts.link_mbps * 1e6)


def prefix_source(
    facts: RoutingFacts, prefiller: Instance, candidates: Sequence[Instance], clusters: Sequence[str]
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


def _reaches(facts: RoutingFacts, prefiller: Instance, source: Instance, clusters: Sequence[str]) -> bool:
    if source.name == prefiller.name:
        return False
    if source.cluster == prefiller.cluster:
        return True
    return facts.rule.bandwidth == "Abundant" and prefiller.cluster == HUB and source.cluster in clusters


def _link(facts: RoutingFacts, prefiller: Instance, source: Instance) -> tuple[float, float]:
    """Return the Mbit/s and the round trip between two instances."""
    if source.cluster == prefiller.cluster:
        return facts.cluster_mbps, 0.0
    priced = next((one.link_mbps for one in facts.rule.prices if one.cluster == source.cluster), None)
    cluster = next(one for one in facts.table.clusters if one.name == source.cluster)
    return priced or float(cluster.capacity_mbps), cluster.round_trip_millis / 1000
