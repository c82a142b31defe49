"""The gateway of a run: its routing table, the requests in flight, and decisions by the live code."""

from collections.abc import Mapping

from msgspec.structs import replace

from prfaas.routing.decide import decide, decide_again
from prfaas.routing.facts import Decision, LegName, Route, RoutingFacts, RoutingRule, cached_by_cluster, rule_in_force
from prfaas.routing.prices import Backlog
from prfaas.simulate.cache import Caches
from prfaas.simulate.events import EventQueue
from prfaas.simulate.request import Request
from prfaas.simulate.scenario import Scenario, instances_of
from prfaas.wire.control import ThresholdUpdate
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Cluster, RoutingTable

EJECT_SECONDS = 5.0
"""Time for which a failed instance gets no request, as after some failures in a row at a gateway."""


def routing_table(scenario: Scenario) -> RoutingTable:
    """Return the table that an operator would render for this scenario."""
    policy = scenario.policy
    return RoutingTable(
        policy="simulated",
        namespace="simulated",
        generation=1,
        model="simulated",
        on_offload_failure=policy.on_offload_failure,
        threshold=policy.threshold,
        watermarks=policy.watermarks,
        short_interval_seconds=policy.short_interval_seconds,
        stale_after_seconds=policy.stale_after_seconds,
        clusters=tuple(
            Cluster(name=link.name, capacity_mbps=max(1, round(link.capacity_mbps)), utilisation_query="")
            for link in scenario.system.links
        ),
        instances=tuple(instances_of(scenario)),
    )


class Gateway:
    """Gathers the facts of each decision."""

    def __init__(
        self,
        events: EventQueue,
        table: RoutingTable,
        caches: Caches,
        profiles: Mapping[str, Profile],
        cluster_mbps: float,
    ):
        self._events = events
        self._caches = caches
        self._profiles = profiles
        self._cluster_mbps = cluster_mbps
        self.table = table
        self._all = table.instances
        self.rule: RoutingRule = rule_in_force(table, None)
        self.on: dict[str, dict[Request, None]] = {one.name: {} for one in table.instances}
        """Requests in flight by instance, in the order in which they came."""
        self._in_flight = dict.fromkeys(self.on, 0)
        self._queued_tokens = dict.fromkeys(self.on, 0)
        self._backlog = Backlog()
        self._ejected_until_seconds: dict[str, float] = {}

    def update(self, update: ThresholdUpdate) -> None:
        self.rule = rule_in_force(self.table, update)

    def divide(self, pool: str, prefilling: int) -> None:
        """Let so many of a hub pool's instances prefill, with as few changes of role as possible."""
        mine = [one for one in self.table.instances if one.pool == pool]
        ordered = sorted(mine, key=lambda one: one.role != "prefill")
        prefills = {one.name for one in ordered[:prefilling]}
        self.table = replace(
            self.table,
            instances=tuple(
                replace(one, role="prefill" if one.name in prefills else "decode") if one.pool == pool else one
                for one in self.table.instances
            ),
        )

    def scale(self, pool: str, count: int) -> None:
        """Route to so many of a pool's instances, the first ones. What runs on the others ends there."""
        mine = [one.name for one in self._all if one.pool == pool]
        there = {one.name: one for one in self.table.instances if one.name not in mine[count:]}
        there |= {one.name: one for one in self._all if one.name in mine[:count] and one.name not in there}
        self.table = replace(self.table, instances=tuple(there[one.name] for one in self._all if one.name in there))

    def decide(self, request: Request) -> Decision:
        return decide(self._facts(request))

    def decide_again(self, request: Request, failed: Route, leg: LegName) -> Decision:
        """Note that a leg failed, and decide where the request goes next."""
        at_fault = failed.prefill if leg == "prefill" and failed.prefill else failed.decode
        request.tried.add(at_fault.name)
        self._ejected_until_seconds[at_fault.name] = self._events.now + EJECT_SECONDS
        return decide_again(self._facts(request), failed, leg, self.table.on_offload_failure)

    def enter(self, route: Route, request: Request) -> None:
        for one in filter(None, (route.decode, route.prefill)):
            self.on[one.name][request] = None
            self._in_flight[one.name] += 1
        prefiller = (route.prefill or route.decode).name
        self._queued_tokens[prefiller] += route.prefill_tokens
        request.queued_tokens = route.prefill_tokens
        if route.work is not None:
            self._backlog.add(request, prefiller, route.work, self._events.now)

    def leave(self, name: str, request: Request) -> None:
        if request in self.on[name]:
            del self.on[name][request]
            self._in_flight[name] -= 1

    def prefilled(self, route: Route, request: Request) -> None:
        """Note that the hub has a request's cache, or that its route is over."""
        self._backlog.remove(request, self._events.now if route.prefill is None else None)
        self._queued_tokens[(route.prefill or route.decode).name] -= request.queued_tokens
        request.queued_tokens = 0
        if route.prefill is not None:
            self.leave(route.prefill.name, request)

    def _facts(self, request: Request) -> RoutingFacts:
        found = self._caches.found(request)  # names no instance without a match, as in a gateway
        return RoutingFacts(
            now_seconds=self._events.now,
            request_id=str(request.index),
            total_tokens=request.total_tokens,
            rule=self.rule,
            table=self.table,
            cached_tokens=cached_by_cluster(self.table, found) if found else {},
            cached_on=found or None,
            profiles=self._profiles,
            cluster_mbps=self._cluster_mbps,
            in_flight=self._in_flight,
            queued_tokens=self._queued_tokens,
            backlog=self._backlog,
            ejected_until_seconds=self._ejected_until_seconds,
            tried=request.tried,
        )
