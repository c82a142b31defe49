"""Decides where one request is prefilled and decoded (section 3.4.3 of the paper, with failures, which it omits).

    l > t    the prompt's incremental length exceeds the threshold: an offload pool prefills it
    l <= t   a local prefill instance does, where one is Ready, or else the decode instance itself

The incremental length counts what no cache holds, and the two states of the link differ in whose cache counts:

    Scarce     l = l_total - l_hub                      a cache in the other cluster would have to cross the link
    Abundant   l = l_total - max(l_hub, l_offload)      it may cross

Draining instances take nothing new. An ejected one is left alone until its time is over, unless it is a request's last
resort. A datacenter that the policy forbids is never used; one that it prefers comes first, in the order given, then
the cluster with the longest cached prefix, then the instance where the request costs least, by load and cache together
(prfaas.routing.affinity). Where prices are in force they take the threshold's place: the request goes where it costs
least, with what waits there (prfaas.routing.prices); where the hub has no prefill instance, its decode instance
prefills. If another instance caches a longer prefix and fetching it is cheaper than computing it, the route names that
instance.
Instances inside TLS and plain ones do not talk to each other, nor do those of two engines or of other draft layers, so
only alike ones are paired. A decision never waits and never fails: that nothing can serve is an answer too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from prfaas.names import HUB
from prfaas.routing.affinity import cheapest, lacking_tokens, prefix_source, spread
from prfaas.routing.drafts import drafts_fit
from prfaas.routing.facts import Decision, LegName, Refusal, Route, RouteReason, RoutingFacts
from prfaas.routing.prices import NOTHING_WAITS, Work, cost_seconds, own_work, work_of
from prfaas.wire.control import Price
from prfaas.wire.preferences import covers
from prfaas.wire.routes import Cluster, EngineName, Instance, OnOffloadFailure, ranks_divide


def decide(facts: RoutingFacts) -> Decision:
    """Decide where a request goes."""
    clusters = _offload_clusters(facts)
    priced = _cheapest(facts, clusters) if facts.rule.prices else None
    return _with_prefix(facts, priced or _by_threshold(facts, clusters))


def _by_threshold(facts: RoutingFacts, clusters: Sequence[Cluster]) -> Decision:
    """Decide by the incremental length only."""
    length_tokens = incremental_tokens(facts, clusters)
    if length_tokens <= facts.rule.threshold_tokens:
        return _local(facts, "WithinThreshold")
    if not facts.rule.offload_clusters:
        return _local(facts, "OffloadDisabled")
    if not clusters:
        return _local(facts, "NoOffloadCluster")
    prefill = cheapest(facts, _offload_instances(facts, clusters))
    decode = _decode_for(facts, prefill)
    if prefill is None or decode is None:
        lacks_hand_off = any(one.engine in facts.no_hand_off for one in _usable(facts, "prefill"))
        return _local(facts, "NoHandOff" if lacks_hand_off else "NoOffloadInstance")
    return Route(
        kind="offload", reason="AboveThreshold", incremental_tokens=length_tokens, decode=decode, prefill=prefill
    )


def _cheapest(facts: RoutingFacts, clusters: Sequence[Cluster]) -> Decision | None:
    """Decide by prices; None where they do not compare both sides, so that the threshold has to."""
    prices = {price.cluster: price for price in facts.rule.prices}
    if HUB not in prices:
        return None
    costs = _costs(facts, prices)
    local = _cheapest_of(facts, costs, [one for one in costs if one.cluster == HUB])
    decode = local if local is not None and local.role == "decode" else _decode_for(facts, local)
    if local is None or decode is None:
        return None
    reachable = {cluster.name for cluster in clusters}
    away = _preferred(facts, clusters, [one for one in costs if one.cluster in reachable])
    there = _cheapest_of(facts, costs, away)
    destination = _decode_for(facts, there)
    # Equal costs stay in the hub: nothing can break on a link that is not used.
    if there is None or destination is None or costs[there] >= costs[local]:
        return _local_route(facts, "Cheaper", decode, local if local is not decode else None)
    return Route(
        kind="offload",
        reason="Cheaper",
        incremental_tokens=incremental_tokens(facts, clusters),
        decode=destination,
        prefill=there,
        work=_work(facts, prices[there.cluster], there),
    )


def _costs(facts: RoutingFacts, prices: Mapping[str, Price]) -> dict[Instance, float]:
    """Return what this request costs at each instance that may prefill it and is of a cluster with a price."""
    backlog = facts.backlog or NOTHING_WAITS
    costs: dict[Instance, float] = {}
    works: dict[tuple[str, int], Work] = {}  # most instances of a cluster lack the same
    for one in _comparable(facts):
        if one.cluster in prices:
            key = one.cluster, lacking_tokens(facts, one)
            work = works[key] = works.get(key) or _work(facts, prices[one.cluster], one)
            costs[one] = cost_seconds(prices[one.cluster], work, one.name, backlog, facts.now_seconds)
    return costs


def _comparable(facts: RoutingFacts) -> list[Instance]:
    prefills = _prefills(facts)
    in_hub = any(one.cluster == HUB for one in prefills)
    return prefills if in_hub else [*prefills, *_usable(facts, "decode")]


def _cheapest_of(
    facts: RoutingFacts, costs: Mapping[Instance, float], instances: Sequence[Instance]
) -> Instance | None:
    """Return the instance where the request costs least; its id decides between equals."""
    least = min((costs[one] for one in instances), default=0.0)
    return spread(facts, [one for one in instances if costs[one] == least])


def _work(facts: RoutingFacts, price: Price, instance: Instance) -> Work:
    # All that the hub lacks crosses, also what the instance has cached and need not compute.
    crossing_tokens = max(0, facts.total_tokens - facts.cached_tokens.get(HUB, 0))
    return work_of(price, lacking_tokens(facts, instance), crossing_tokens)


class Overload(msgspec.Struct, frozen=True, kw_only=True):
    """The refusal of a request that would begin too late: the wait before it, and the promised time.

    `slo.ttftMillis` promises a first token. Where more than that waits before a prefill could begin, at the best of the
    considered instances, no decision keeps the promise, to this request or to those behind it. So it is refused at
    once. Its own prefill does not count: an idle system refuses no request, however long the prompt. Nor does what
    crosses a link: with prices the decision weighs it, without prices it is not known.
    """

    wait_seconds: float
    slo_seconds: float

    @property
    def retry_after_seconds(self) -> float:
        """The time after which the wait is within the promise, if no other request comes."""
        return self.wait_seconds - self.slo_seconds


def find_overload(facts: RoutingFacts, route: Route) -> Overload | None:
    """Return the refusal of a request that `decide` gave this route; None: it can begin in time."""
    slo_millis, backlog = facts.table.ttft_slo_millis, facts.backlog
    if slo_millis is None or backlog is None:
        return None
    waits = [backlog.unanswered_seconds(one.name, facts.now_seconds) for one in find_considered(facts, route)]
    wait_seconds, slo_seconds = min(waits, default=0.0), slo_millis / 1000
    return Overload(wait_seconds=wait_seconds, slo_seconds=slo_seconds) if wait_seconds > slo_seconds else None


def find_considered(facts: RoutingFacts, route: Route) -> list[Instance]:
    """Return the instances among which the one that prefills was chosen, when `decide` took this route."""
    clusters = _offload_clusters(facts)
    if route.reason == "Cheaper":
        known = {price.cluster for price in facts.rule.prices} & {HUB, *(cluster.name for cluster in clusters)}
        return [one for one in _comparable(facts) if one.cluster in known]
    if route.kind == "offload":
        return _offload_instances(facts, clusters)
    return _prefills_beside(facts, route.decode) or _usable(facts, "decode")


def decide_again(facts: RoutingFacts, failed: Route, leg: LegName, on_offload_failure: OnOffloadFailure) -> Decision:
    """Decide where a request goes after one leg of `failed` did; `facts.tried` already names the instance at fault.

    The policy's `on_offload_failure` concerns the prefill leg of an offload only. A request that went local stays
    local, so that a link that fails again and again costs it one attempt; other failures ask for another instance.
    """
    if failed.kind == "local":
        return _with_prefix(facts, _local(facts, failed.reason))
    if leg == "decode":
        return decide(facts)
    if on_offload_failure == "Reject":
        return Refusal(reason="OffloadRejected")
    return _with_prefix(facts, _local(facts, "OffloadFailed"))


def decide_at_last(facts: RoutingFacts, failed: Set[str], choose: Callable[[RoutingFacts], Decision]) -> Decision:
    """Decide where a request goes that `choose` refuses: to an ejected decode instance, which may be back early.

    `failed` are the instances where the request itself failed last. Another one is more likely to live.
    """
    decodes = {one.name for one in facts.table.instances if one.role == "decode"}
    ejected = {name: until for name, until in facts.ejected_until_seconds.items() if name not in decodes}
    readmitted = replace(facts, ejected_until_seconds=ejected)
    elsewhere = choose(replace(readmitted, tried=facts.tried | failed))
    return elsewhere if isinstance(elsewhere, Route) else choose(readmitted)


def incremental_tokens(facts: RoutingFacts, clusters: Iterable[Cluster]) -> int:
    """Return l, the tokens that no usable cache holds; `clusters` are those that may prefill this request."""
    cached_tokens = facts.cached_tokens.get(HUB, 0)
    if facts.rule.bandwidth == "Abundant":
        cached_tokens = max([cached_tokens, *(facts.cached_tokens.get(cluster.name, 0) for cluster in clusters)])
    return max(0, facts.total_tokens - cached_tokens)


def _local(facts: RoutingFacts, reason: RouteReason) -> Decision:
    decode = cheapest(facts, _usable(facts, "decode"))
    if decode is None:
        return Refusal(reason="NoDecodeInstance")
    return _local_route(facts, reason, decode, cheapest(facts, _prefills_beside(facts, decode)))


def _prefills_beside(facts: RoutingFacts, decode: Instance) -> list[Instance]:
    """Return the hub's prefill instances that a decode instance can talk to."""
    return [one for one in _prefills(facts) if one.cluster == HUB and _can_talk(_protocol(one), _protocol(decode))]


def _local_route(facts: RoutingFacts, reason: RouteReason, decode: Instance, prefill: Instance | None) -> Route:
    price = next((one for one in facts.rule.prices if one.cluster == HUB), None)
    return Route(
        kind="local",
        reason=reason,
        incremental_tokens=max(0, facts.total_tokens - facts.cached_tokens.get(HUB, 0)),
        decode=decode,
        prefill=prefill,
        work=_work(facts, price, prefill or decode) if price is not None else None,
    )


def _with_prefix(facts: RoutingFacts, decision: Decision) -> Decision:
    """Add to a route the tokens left to prefill, and the instance to fetch a prefix from."""
    if isinstance(decision, Refusal):
        return decision
    prefiller = decision.prefill or decision.decode
    lacking = lacking_tokens(facts, prefiller)
    route = replace(decision, prefill_tokens=lacking, computed_tokens=lacking)
    if not facts.profiles:
        return route
    fetches = prefiller.record.fetches_prefixes and prefiller.engine not in facts.no_hand_off
    source = _prefix_source(facts, prefiller) if facts.cached_on and fetches else None
    computed = lacking if source is None else lacking_tokens(facts, source)
    if route.work is None:
        route = replace(route, work=own_work(facts.profiles.get(prefiller.name), computed))
    if source is None or facts.cached_on is None:
        return route
    return replace(route, computed_tokens=computed, prefix=source, prefix_tokens=facts.cached_on[source.name])


def _prefix_source(facts: RoutingFacts, prefiller: Instance) -> Instance | None:
    """Return the instance to fetch a longer prefix from; None where that is not cheaper."""
    others = [*_usable(facts, "decode"), *_usable(facts, "prefill")]
    alike = [one for one in others if _protocol(one) == _protocol(prefiller)]
    return prefix_source(facts, prefiller, alike, [cluster.name for cluster in _offload_clusters(facts)])


def _offload_clusters(facts: RoutingFacts) -> list[Cluster]:
    return [
        cluster
        for cluster in facts.table.permitted_clusters
        if cluster.reachable and cluster.name in facts.rule.offload_clusters
    ]


def _preference(facts: RoutingFacts, cluster: Cluster) -> int:
    """Return the place of a cluster's datacenter among those that are preferred; after all of them if it is none."""
    prefer = facts.table.prefer_datacenters
    return next((place for place, name in enumerate(prefer) if covers(name, cluster.datacenter)), len(prefer))


def _preferred(facts: RoutingFacts, clusters: Sequence[Cluster], instances: Sequence[Instance]) -> list[Instance]:
    """Return the instances in the datacenter that the policy likes best of theirs."""
    ranks = {one.name: _preference(facts, one) for one in clusters}
    best = min((ranks[one.cluster] for one in instances), default=0)
    return [one for one in instances if ranks[one.cluster] == best]


def _offload_instances(facts: RoutingFacts, clusters: Sequence[Cluster]) -> list[Instance]:
    """Return the instances of the best clusters that have some."""
    usable = _prefills(facts)

    def rank(cluster: Cluster) -> tuple[int, int]:
        return _preference(facts, cluster), -facts.cached_tokens.get(cluster.name, 0)

    serving = {one.cluster for one in usable}
    candidates = [cluster for cluster in clusters if cluster.name in serving]
    if not candidates:
        return []
    best = min(map(rank, candidates))
    names = {cluster.name for cluster in candidates if rank(cluster) == best}
    return [one for one in usable if one.cluster in names]


def _prefills(facts: RoutingFacts) -> list[Instance]:
    """Return the prefill instances that can hand the prompt's cache to some decode instance."""
    kinds = {_protocol(one) for one in _usable(facts, "decode") if one.engine not in facts.no_hand_off}
    return [one for one in _usable(facts, "prefill") if any(_can_talk(_protocol(one), kind) for kind in kinds)]


def _decode_for(facts: RoutingFacts, prefill: Instance | None) -> Instance | None:
    """Return the cheapest decode instance that can talk to a prefill instance."""
    if prefill is None:
        return None
    kind = _protocol(prefill)
    return cheapest(facts, [one for one in _usable(facts, "decode") if _can_talk(kind, _protocol(one))])


class _Protocol(NamedTuple):
    """What decides if two instances can talk; `ranks` hold a part of a cache each."""

    engine: EngineName
    in_tls: bool
    ranks: int
    draft_layers: str


def _protocol(instance: Instance) -> _Protocol:
    in_tls = instance.url.startswith("https:")
    return _Protocol(instance.engine, in_tls, instance.rank_ports, instance.draft_layers)


def _can_talk(one: _Protocol, other: _Protocol) -> bool:
    """Return whether two instances share engine and use of TLS, their ranks divide, and no draft layers differ."""
    return one == other or (
        one[:2] == other[:2]
        and ranks_divide(one.ranks, other.ranks)
        and drafts_fit(one.draft_layers, other.draft_layers)
    )


def _usable(facts: RoutingFacts, role: str) -> list[Instance]:
    """Return the instances of a role that may take a new request."""
    ejected = facts.ejected_until_seconds
    return [
        one
        for one in facts.table.instances
        if one.role == role
        and one.state == "Ready"
        and one.name not in facts.tried
        and ejected.get(one.name, facts.now_seconds) <= facts.now_seconds
    ]
