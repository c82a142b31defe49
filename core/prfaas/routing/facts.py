"""The facts that a routing decision depends on, and its results.

Everything here is a frozen value or a read-only view. The gateway gathers the facts of one request and applies the
decision. The same types serve a simulator and the tests. Times are seconds of any one monotonic clock.
"""

from collections.abc import Mapping, Set
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from prfaas.routing.prices import Backlog, Work
from prfaas.wire.control import Bandwidth, Price, ThresholdUpdate
from prfaas.wire.headers import UNKNOWN_PLACE
from prfaas.wire.preferences import NO_PREFERENCES, Preferences, check_known, forbids
from prfaas.wire.profile import Profile
from prfaas.wire.routes import EngineName, Instance, RoutingTable

RouteKind = Literal["offload", "local"]
LegName = Literal["prefill", "decode"]
RouteReason = Literal[
    "AboveThreshold",  # l > t and an offload pool can serve
    "WithinThreshold",  # l <= t
    "Cheaper",  # the prices in force say so, in mode Priced
    "OffloadDisabled",  # l > t, but no link is alive, our certificate has run out, or mode is Disabled
    "NoOffloadCluster",  # l > t, but every cluster is unreachable or its datacenter forbidden
    "NoOffloadInstance",  # l > t, but no instance there is Ready and in use
    "NoHandOff",  # l > t, but the engine cannot hand over the cache of such a request
    "OffloadFailed",  # was offloaded, failed, and falls back
]
RefusalReason = Literal["NoDecodeInstance", "OffloadRejected"]


class RoutingRule(msgspec.Struct, frozen=True, kw_only=True):
    """The threshold in force: what the scheduler pushed last, or what the routing table says by itself."""

    threshold_tokens: int
    bandwidth: Bandwidth
    offload_clusters: frozenset[str]
    """Clusters with a live link; none: nothing is offloaded."""
    prices: tuple[Price, ...] = ()
    """The price of each cluster; empty: the threshold decides."""


CLUSTER_MBPS: Final = 1000.0
"""Assumed between instances of one cluster, where the rate is not measured: the slowest Ethernet of servers. Where it
is faster, some prefixes are computed that would be worth fetching."""


class RoutingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One request and the world at this moment. Mappings without an entry mean zero."""

    now_seconds: float
    request_id: str
    """Spreads equally loaded instances; the same id always takes the same one."""
    total_tokens: int
    rule: RoutingRule
    table: RoutingTable
    cached_tokens: Mapping[str, int] = {}
    """Longest cached prefix of this prompt by cluster."""
    cached_on: Mapping[str, int] | None = None
    """The same by instance; None: not known, and what a cluster has is taken to be at each of its instances."""
    profiles: Mapping[str, Profile] = {}
    """Measured profiles by instance."""
    in_flight: Mapping[str, int] = {}
    """Requests in flight by instance."""
    queued_tokens: Mapping[str, int] = {}
    """Tokens of prompts that an instance still computes for requests placed there."""
    cluster_mbps: float = CLUSTER_MBPS
    """What moves between instances of one cluster."""
    backlog: Backlog | None = None
    """The work that waits at each instance and link, for prices; None: none."""
    ejected_until_seconds: Mapping[str, float] = {}
    """Instances that failed lately, and until when they are left alone."""
    tried: Set[str] = frozenset()
    """Instances on which this very request has failed already."""
    no_hand_off: Set[EngineName] = frozenset()
    """Engines that cannot hand over the cache of such a request: their decode instances prefill it themselves."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Serve the request on `decode`, prefilled by `prefill`; None: the decode instance prefills the prompt itself."""

    kind: RouteKind
    reason: RouteReason
    incremental_tokens: int
    decode: Instance
    prefill: Instance | None
    prefill_tokens: int = 0
    """Tokens of the prompt that are not cached where it is prefilled."""
    computed_tokens: int = 0
    """Of these, the ones behind the prefix that is fetched; all of them without one."""
    prefix: Instance | None = None
    """The instance from which the prefill instance should fetch a longer prefix of the prompt."""
    prefix_tokens: int = 0
    """The length of that prefix, where the instance has a state."""
    work: Work | None = None
    """The work of the prefill for its instance, and with prices for its link; None: no profile is known."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The request cannot be served now; trying again later may help."""

    reason: RefusalReason


Decision = Route | Refusal


def cached_by_cluster(table: RoutingTable, on: Mapping[str, int]) -> dict[str, int]:
    """Return the longest match in each cluster, of the instances that may serve; `on` has them by instance."""
    longest: dict[str, int] = {}
    for one in table.instances:
        if one.state == "Ready" and (tokens := on.get(one.name, 0)):
            longest[one.cluster] = max(tokens, longest.get(one.cluster, 0))
    return longest


def rule_in_force(table: RoutingTable, update: ThresholdUpdate | None) -> RoutingRule:
    """Return the rule that a table and the scheduler's last unexpired update give together.

    Modes Auto and Priced take the scheduler's threshold, never outside the policy's own bounds, and only Priced its
    prices; mode Fixed takes what it knows of the links, so that a dead one is left alone. Without an update nothing is
    known of them, and caches are compared per cluster (Scarce).
    """
    threshold = table.threshold
    clusters = frozenset(cluster.name for cluster in table.clusters)
    if threshold.mode == "Disabled":
        return RoutingRule(threshold_tokens=threshold.tokens, bandwidth="Scarce", offload_clusters=frozenset())
    if update is None:
        return RoutingRule(threshold_tokens=threshold.tokens, bandwidth="Scarce", offload_clusters=clusters)
    bounded = min(max(update.tokens, threshold.min_tokens), threshold.max_tokens)
    return RoutingRule(
        threshold_tokens=threshold.tokens if threshold.mode == "Fixed" else bounded,
        bandwidth=update.bandwidth,
        offload_clusters=clusters & frozenset(update.offload_clusters),
        prices=update.prices if threshold.mode == "Priced" else (),
    )


def narrow(rule: RoutingRule, table: RoutingTable, preferences: Preferences) -> tuple[RoutingRule, RoutingTable]:
    """Return the rule and the table that a request with these preferences is decided by.

    forbid     clusters in such a datacenter, or in an unknown one, get no prompt of this request, beside those that the
               policy forbids
    prefer     its datacenters come before those that the policy prefers, among clusters that may serve
    never      the prompt is prefilled in the hub
    always     the threshold is the lowest that the policy allows, `threshold.min`, and prices do not count

    Preferences widen nothing: a cluster that the policy forbids, a dead link and mode Disabled stay what they are, and
    prompts up to `threshold.min` stay in the hub. So a decision needs no notion of preferences: it gets other facts.
    """
    if preferences == NO_PREFERENCES:
        return rule, table
    forbidden = {one.name for one in table.clusters if forbids(preferences.forbid, one.datacenter)}
    clusters = frozenset[str]() if preferences.offload == "never" else rule.offload_clusters - forbidden
    rule = replace(rule, offload_clusters=clusters)
    if preferences.offload == "always":
        rule = replace(rule, threshold_tokens=min(rule.threshold_tokens, table.threshold.min_tokens), prices=())
    if preferences.prefer:
        table = replace(table, prefer_datacenters=(*preferences.prefer, *table.prefer_datacenters))
    return rule, table


def usable_places(table: RoutingTable, preferences: Preferences) -> list[str]:
    """Return the places of the member clusters whose caches may serve a request: those of the table that neither the
    policy nor the request forbids; none for a request that is never offloaded. The hub's own always may. Where nothing
    is forbidden, UNKNOWN_PLACE is one of them."""
    if preferences.offload == "never":
        return []
    anywhere = [] if table.forbid_datacenters or preferences.forbid else [UNKNOWN_PLACE]
    permitted = (one for one in table.permitted_clusters if not forbids(preferences.forbid, one.datacenter))
    return anywhere + [one.known_by for one in permitted]


def check_places(preferences: Preferences, table: RoutingTable) -> None:
    """Raise RequestError (400) if a request forbids a place where no cluster is and that the policy does not forbid.

    Where no cluster names its place, each is forbidden, and nothing can be sent away by a misspelt name.
    """
    if preferences.forbid and table.known_places:
        check_known(preferences.forbid, [*table.known_places, *table.forbid_datacenters])
