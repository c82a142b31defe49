"""Who prefills a prompt, and lacks of its beginning what another instance has, takes it from there where that pays.

As workers do it: the decode instance lends what it has where `routing.lending` says so, by what the link carries; else
whom the gateway named in its route is asked. Inside a cluster that takes as long as the decision took it to, and loads
nobody; between clusters bytes cross the link among others.
"""

from prfaas.names import HUB
from prfaas.routing.affinity import CLUSTER_MBPS
from prfaas.routing.facts import Route
from prfaas.routing.lending import LendingFacts, borrowing_seconds, decide_lending
from prfaas.simulate.cache import Caches
from prfaas.simulate.links import SharedLink
from prfaas.simulate.request import Loan, Request
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Instance


class Lending:
    """Arranges loans.

    Args:
        caches: what instances have.
        links: between clusters.
        profiles: by instance.

    """

    def __init__(self, caches: Caches, links: dict[str, SharedLink], profiles: dict[str, Profile]):
        self._caches = caches
        self._links = links
        self._profiles = profiles

    def loan(self, request: Request, route: Route) -> Loan | None:
        """Return what a route's prefill borrows; None: nothing."""
        to = route.prefill or route.decode
        if route.prefill is not None:
            facts = self._facts(request, to, route.decode)
            if decide_lending(facts).borrow:
                return self._over(to, route.decode, facts)
        if route.prefix is not None:
            facts = self._facts(request, to, route.prefix)
            if facts.lend_tokens > facts.cached_tokens:
                return self._over(to, route.prefix, facts)
        return None

    def _facts(self, request: Request, to: Instance, source: Instance) -> LendingFacts:
        link = self._between(to, source)
        return LendingFacts(
            prompt_tokens=request.total_tokens,
            cached_tokens=self._caches.match(to.name, request),
            lend_tokens=self._caches.match(source.name, request),
            profile=self._profiles[to.name],
            link_mbps=CLUSTER_MBPS if link is None else link.mbps,
            round_trip_seconds=0.0 if link is None else link.round_trip_seconds,
        )

    def _over(self, to: Instance, source: Instance, facts: LendingFacts) -> Loan:
        link, profile = self._between(to, source), facts.profile
        if link is None:
            return Loan(facts.lend_tokens, borrowing_seconds(facts, CLUSTER_MBPS), "", 0.0)
        nbytes = profile.state_bytes + profile.token_bytes * (facts.lend_tokens - facts.cached_tokens)
        return Loan(facts.lend_tokens, 0.0, source.cluster if to.cluster == HUB else to.cluster, float(nbytes))

    def _between(self, one: Instance, other: Instance) -> SharedLink | None:
        """Return the link that joins two instances; None inside a cluster. One of two clusters is the hub."""
        if one.cluster == other.cluster:
            return None
        return self._links[other.cluster if one.cluster == HUB else one.cluster]
