"""Where one request is prefilled and decoded (section 3.4.3 of the paper, and what it leaves open: failures).

    l > t    the prompt's incremental length exceeds the threshold: an offload pool prefills it
    l <= t   a local prefill instance does, where one is Ready, or else the decode instance itself

The incremental length counts what no cache holds, and the two states of the link differ in whose cache counts:

    Scarce     l = l_total - l_hub                      a cache in the other cluster would have to cross the link
    Abundant   l = l_total - max(l_hub, l_offload)      it may cross

Draining instances take nothing new, and an ejected one is left alone until its time is over. A datacenter that the
policy forbids is never used; one that it prefers comes first, in the order given, then the cluster with the longest
cached prefix, then the least loaded instance. A decision never waits and never fails: that nothing can serve is an
answer too.
"""

import zlib
from collections.abc import Iterable, Sequence

from prfaas.names import HUB
from prfaas.routing.facts import Decision, Facts, Leg, Refusal, Route, RouteReason
from prfaas.wire.routes import Cluster, Instance, OnOffloadFailure


def decide(facts: Facts) -> Decision:
    """Decide where a request goes."""
    clusters = _offload_clusters(facts)
    length_tokens = incremental_tokens(facts, clusters)
    if length_tokens <= facts.rule.threshold_tokens:
        return _local(facts, "WithinThreshold")
    if not facts.rule.offload_clusters:
        return _local(facts, "OffloadDisabled")
    if not clusters:
        return _local(facts, "NoOffloadCluster")
    prefill = _offload_instance(facts, clusters)
    if prefill is None:
        return _local(facts, "NoOffloadInstance")
    decode = _least_loaded(facts, _usable(facts, "decode"))
    if decode is None:
        return Refusal(reason="NoDecodeInstance")
    return Route(
        kind="offload", reason="AboveThreshold", incremental_tokens=length_tokens, decode=decode, prefill=prefill
    )


def decide_again(facts: Facts, failed: Route, leg: Leg, on_offload_failure: OnOffloadFailure) -> Decision:
    """Decide where a request goes after one leg of `failed` did; `facts.tried` already names the instance at fault.

    The policy's `on_offload_failure` speaks of the prefill leg of an offload alone. A request that went local stays
    local, so that a link that fails again and again costs it one attempt; every other failure asks for another
    instance.
    """
    if failed.kind == "local":
        return _local(facts, failed.reason)
    if leg == "decode":
        return decide(facts)
    if on_offload_failure == "Reject":
        return Refusal(reason="OffloadRejected")
    return _local(facts, "OffloadFailed")


def incremental_tokens(facts: Facts, clusters: Iterable[Cluster]) -> int:
    """Return l, the tokens that no usable cache holds; `clusters` are those that may prefill this request."""
    cached_tokens = facts.cached_tokens.get(HUB, 0)
    if facts.rule.bandwidth == "Abundant":
        cached_tokens = max([cached_tokens, *(facts.cached_tokens.get(cluster.name, 0) for cluster in clusters)])
    return max(0, facts.total_tokens - cached_tokens)


def _local(facts: Facts, reason: RouteReason) -> Decision:
    """Prefill in the hub."""
    decode = _least_loaded(facts, _usable(facts, "decode"))
    if decode is None:
        return Refusal(reason="NoDecodeInstance")
    prefill = _least_loaded(facts, [one for one in _usable(facts, "prefill") if one.cluster == HUB])
    length_tokens = max(0, facts.total_tokens - facts.cached_tokens.get(HUB, 0))
    return Route(kind="local", reason=reason, incremental_tokens=length_tokens, decode=decode, prefill=prefill)


def _offload_clusters(facts: Facts) -> list[Cluster]:
    """Return the clusters that may prefill this request."""
    return [
        cluster
        for cluster in facts.table.clusters
        if cluster.reachable
        and cluster.name in facts.rule.offload_clusters
        and cluster.datacenter not in facts.table.forbid_datacenters
    ]


def _offload_instance(facts: Facts, clusters: Sequence[Cluster]) -> Instance | None:
    """Return the least loaded instance of the best cluster that has one."""
    usable = _usable(facts, "prefill")
    prefer = facts.table.prefer_datacenters

    def rank(cluster: Cluster) -> tuple[int, int]:
        preference = prefer.index(cluster.datacenter) if cluster.datacenter in prefer else len(prefer)
        return preference, -facts.cached_tokens.get(cluster.name, 0)

    serving = {one.cluster for one in usable}
    candidates = [cluster for cluster in clusters if cluster.name in serving]
    if not candidates:
        return None
    best = min(map(rank, candidates))
    names = {cluster.name for cluster in candidates if rank(cluster) == best}
    return _least_loaded(facts, [one for one in usable if one.cluster in names])


def _usable(facts: Facts, role: str) -> list[Instance]:
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


def _least_loaded(facts: Facts, instances: Sequence[Instance]) -> Instance | None:
    """Return the instance with the fewest requests in flight; the request's id decides between equals.

    Taking the first by name would send every request of an idle moment, from every gateway, to one instance.
    """
    if not instances:
        return None
    fewest = min(facts.in_flight.get(one.name, 0) for one in instances)
    equals = [one for one in instances if facts.in_flight.get(one.name, 0) == fewest]
    return min(equals, key=lambda one: (zlib.crc32(f"{facts.request_id}/{one.name}".encode()), one.name))
