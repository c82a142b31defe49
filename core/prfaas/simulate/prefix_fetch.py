"""Fetches the prefix that a prefill lacks from the instance that the gateway named in the route.

Inside a cluster a fetch takes as long as the decision took it to, and loads nobody. Between clusters its bytes cross
the link among others.
"""

from prfaas.names import HUB
from prfaas.routing.facts import Route
from prfaas.routing.prefix_fetch import CLUSTER_MBPS, PrefixFacts, fetched_bytes, fetching_seconds
from prfaas.simulate.cache import Caches
from prfaas.simulate.links import SharedLink
from prfaas.simulate.request import PrefixFetch, Request
from prfaas.wire.profile import Profile


class PrefixFetches:
    """Plans fetches.

    Args:
        caches: what instances have.
        links: between clusters.
        profiles: by instance.

    """

    def __init__(self, caches: Caches, links: dict[str, SharedLink], profiles: dict[str, Profile]):
        self._caches = caches
        self._links = links
        self._profiles = profiles

    def plan(self, request: Request, route: Route) -> PrefixFetch | None:
        """Return what a route's prefill fetches first; None: nothing."""
        to, source = route.prefill or route.decode, route.prefix
        if source is None:
            return None
        cluster = source.cluster if to.cluster == HUB else to.cluster
        link = self._links[cluster] if source.cluster != to.cluster else None
        facts = PrefixFacts(
            prompt_tokens=request.total_tokens,
            cached_tokens=self._caches.match(to.name, request),
            source_tokens=self._caches.match(source.name, request),
            profile=self._profiles[to.name],
            link_mbps=CLUSTER_MBPS if link is None else link.mbps,
            round_trip_seconds=0.0 if link is None else link.round_trip_seconds,
        )
        if facts.source_tokens <= facts.cached_tokens:
            return None
        if link is None:
            return PrefixFetch(facts.source_tokens, fetching_seconds(facts), "", 0.0)
        return PrefixFetch(facts.source_tokens, 0.0, cluster, float(fetched_bytes(facts)))
