"""Takes every request from its first decision to its one end.

    decide -> [round trip, fetch of a longer prefix] -> prefill in steps, chunks on the link -> cache whole in the hub
    -> slot at the decode instance, with the first token -> last token

A leg that fails goes through `routing.decide_again`, with what was generated so far as part of the prompt, as the
gateway resumes. A request's `run` counts its routes, so that events of an abandoned route are recognised.

Inside a cluster a prefilled cache reaches the decode instance in no time. Instances compute by the worker's schedule,
and a link is shared equally. A prefix fetch inside a cluster takes as long as the decision estimated, and loads no
resource. Between clusters its bytes cross the link among others.
"""

from collections.abc import Iterable
from typing import NamedTuple

from prfaas.names import HUB
from prfaas.routing.affinity import PrefixFacts, fetched_bytes, fetching_seconds
from prfaas.routing.facts import Decision, LegName, Refusal, Route
from prfaas.routing.lengths import LengthTally as Lengths
from prfaas.routing.lengths import PrefillTally
from prfaas.schedule import RUNNING
from prfaas.simulate.cache import Caches
from prfaas.simulate.events import EventQueue
from prfaas.simulate.gateway import Gateway, routing_table
from prfaas.simulate.instance import InstanceKind, Notices, SimulatedInstance
from prfaas.simulate.link import SharedLink
from prfaas.simulate.outcome import Outcome, Tally
from prfaas.simulate.request import Arrival, PrefixFetch, Request
from prfaas.simulate.scenario import LinkShape, Scenario
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Instance, RoutingTable


class _Attempt(NamedTuple):
    """A request on one of its routes; over when the request's `run` has moved on."""

    request: Request
    run: int
    leg: LegName = "prefill"


class RequestProcess:
    """All requests of a run, with the gateway, instances, caches and links that serve them."""

    def __init__(self, scenario: Scenario, tally: Tally):
        self.scenario = scenario
        self.tally = tally
        self.events = EventQueue()
        table, by_pool = routing_table(scenario), scenario.profiles
        self._profiles = {one.name: by_pool[one.pool] for one in table.instances}
        self.caches = Caches(scenario, table.instances, self._profiles)
        self.gateway = Gateway(self.events, table, self.caches, self._profiles, scenario.cluster_mbps)
        self.links = {
            link.name: SharedLink(
                self.events,
                link.capacity_mbps,
                scenario.conditions.get(link.name, LinkShape()).round_trip_seconds,
                self._crossed,
            )
            for link in scenario.system.links
        }
        kinds = self._kinds()
        notices = Notices(
            first=self._first, last=self._last, chunk=self._hand_over_chunk, prefilled=self._hand_over_rest
        )
        self.instances = {
            one.name: SimulatedInstance(self.events, kinds[one.pool], one.role, notices) for one in table.instances
        }
        self.all_instances = table.instances
        """Also those that have not started yet, or have gone."""
        self.hub = {one.name for one in table.instances if one.cluster == HUB}
        for pool in scenario.system.offload:
            self.gateway.scale(pool.name, pool.instances)
        self.dead: set[str] = set()
        self.offloads = 0
        """Routes so far that were offloads."""
        self.lengths = Lengths()
        """Counts first decisions by incremental length, as a gateway does."""
        self.tokens = PrefillTally()
        """Of the same prompts."""

    @property
    def table(self) -> RoutingTable:
        return self.gateway.table

    def _kinds(self) -> dict[str, InstanceKind]:
        """Return what the instances of each pool are. Those of an offload pool never decode."""
        system, profiles, tokens = self.scenario.system, self.scenario.profiles, self.scenario.step_tokens
        hub = {
            pool.name: InstanceKind.of(profiles[pool.name], pool.max_batch, pool.step_seconds, tokens)
            for pool in system.hub
        }
        return hub | {
            pool.name: InstanceKind.of(profiles[pool.name], RUNNING, 0.0, tokens, hands_over=True)
            for pool in system.offload
        }

    def start(self, arrival: Arrival) -> None:
        request = Request(self.tally.arrived, arrival)
        self.tally.arrive(request)
        decision = self.gateway.decide(request)
        if isinstance(decision, Route):
            request.began = decision
            self.lengths.add(decision.incremental_tokens)
            self.tokens.add(decision.kind, decision.incremental_tokens, decision.computed_tokens)
        self._follow(request, decision)

    def divide(self, pool: str, prefilling: int) -> None:
        """Convert a hub pool's instances until so many of them prefill."""
        self.gateway.divide(pool, prefilling)
        for one in self.table.instances:
            self.instances[one.name].set_role(one.role)

    def scale(self, pool: str, count: int) -> None:
        """Have so many instances of an offload pool. One that starts has nothing cached."""
        before = {one.name for one in self.table.instances}
        self.gateway.scale(pool, count)
        for one in self.table.instances:
            if one.name not in before:
                self.caches.clear(one.name)

    def living(self) -> Iterable[Instance]:
        return (one for one in self.table.instances if one.name not in self.dead)

    def fail_later(self, request: Request, leg: LegName) -> None:
        """Have the request's present route fail, by this leg, as soon as that is noticed."""
        self.events.after(self.scenario.detection_seconds, self._fail, _Attempt(request, request.run, leg))

    def fail_later_if_stalled(self, request: Request) -> None:
        """Have a request's use of a link fail, if the link still carries nothing when that is noticed."""
        self.events.after(self.scenario.detection_seconds, self._fail_if_stalled, _Attempt(request, request.run))

    def withdraw(self, request: Request) -> None:
        """Stop all work for a request, and keep the generated tokens. It stays in flight on its instances."""
        route = request.route
        if route is None:
            return
        request.generated_tokens += self.instances[route.decode.name].withdraw(request)
        if route.prefill is not None:
            self.instances[route.prefill.name].withdraw(request)
        if route.kind == "offload":
            self._link(route).to_hub.remove(request)
        if request.fetch is not None and request.fetch.link:
            self.links[request.fetch.link].to_hub.remove(request)

    # A route, and its end.

    def _follow(self, request: Request, decision: Decision) -> None:
        if isinstance(decision, Refusal) or request.attempts == self.scenario.attempts:
            self._end(request, "refused")
            return
        request.attempts += 1
        request.run += 1
        request.route, request.fetch = decision, None
        request.prefilled = False
        request.prefill_seconds, request.prefill_ended_seconds = 0.0, None
        self.gateway.enter(decision, request)
        if decision.decode.name in self.dead:
            self.fail_later(request, "decode")
        elif decision.prefill is not None and decision.prefill.name in self.dead:
            self.fail_later(request, "prefill")
        else:
            self._begin(request, decision)

    def _fail(self, attempt: _Attempt) -> None:
        request, run, leg = attempt
        route = request.route
        if request.run != run or route is None:
            return
        if leg == "prefill" and route.prefill and request not in self.gateway.on[route.prefill.name]:
            return  # its cache had left already
        self.withdraw(request)
        self._release(request, route)
        self._follow(request, self.gateway.decide_again(request, route, leg))

    def _fail_if_stalled(self, attempt: _Attempt) -> None:
        request, route = attempt.request, attempt.request.route
        if request.run != attempt.run or route is None:
            return
        if route.kind == "offload" and self._link(route).down:
            self._fail(attempt)
        elif request.fetch is not None and request.fetch.link and self.links[request.fetch.link].down:
            self._do_without(request, route, self.links[request.fetch.link])

    def _do_without(self, request: Request, route: Route, link: SharedLink) -> None:
        """Begin a local prefill without the prefix, which does not arrive."""
        if request in link.to_hub:
            link.to_hub.remove(request)
            request.fetch = None
            self._plan_prefill(request, _prefiller(route))
            self._submit(request)

    def _end(self, request: Request, outcome: Outcome) -> None:
        if request.route is not None:
            self._release(request, request.route)
        request.run += 1
        self.tally.end(request, outcome, self.events.now)

    def _release(self, request: Request, route: Route) -> None:
        self.gateway.leave(route.decode.name, request)
        self.gateway.prefilled(route, request)
        request.route = None

    # Prefill and transfer.

    def _begin(self, request: Request, route: Route) -> None:
        prefiller = _prefiller(route)
        request.fetch = self._plan_fetch(request, route)
        self._plan_prefill(request, prefiller)
        attempt = _Attempt(request, request.run)
        if route.kind == "local":
            self._fetch(attempt)
            return
        self.offloads += 1
        link = self._link(route)
        if link.down:
            self.fail_later_if_stalled(request)
        self._plan_transfer(request, self._profiles[prefiller.name], self.caches.match(route.decode.name, request))
        self.events.after(link.round_trip_seconds, self._fetch, attempt)

    def _fetch(self, attempt: _Attempt) -> None:
        """Bring the prefix that a route names to the instance that prefills, and have it prefill."""
        request, fetch = attempt.request, attempt.request.fetch
        if not self._is_current(attempt):
            return
        if fetch is None:
            self._submit(request)
        elif fetch.link:
            self.links[fetch.link].to_hub.add(request, fetch.nbytes)
            if self.links[fetch.link].down:
                self.fail_later_if_stalled(request)
        else:
            self.events.after(fetch.seconds, self._fetched, attempt)

    def _fetched(self, attempt: _Attempt) -> None:
        if self._is_current(attempt):
            self._submit(attempt.request)

    def _is_current(self, attempt: _Attempt) -> bool:
        """Return True while the request is on that route and its prefill instance lives."""
        route = attempt.request.route
        return attempt.request.run == attempt.run and route is not None and _prefiller(route).name not in self.dead

    def _submit(self, request: Request) -> None:
        route = request.route
        if route is None:
            return
        self.tally.computed_tokens += request.computed_tokens
        answer_tokens = request.output_left_tokens if route.prefill is None else 0
        self.instances[_prefiller(route).name].serve(
            request, request.total_tokens - request.computed_tokens, request.computed_tokens, answer_tokens
        )

    def _plan_fetch(self, request: Request, route: Route) -> PrefixFetch | None:
        """Return the fetch that precedes a route's prefill, from the instance that the gateway named; None: none."""
        to, source = _prefiller(route), route.prefix
        if source is None:
            return None
        cluster = source.cluster if to.cluster == HUB else to.cluster
        link = self.links[cluster] if source.cluster != to.cluster else None
        facts = PrefixFacts(
            prompt_tokens=request.total_tokens,
            cached_tokens=self.caches.match(to.name, request),
            source_tokens=self.caches.match(source.name, request),
            profile=self._profiles[to.name],
            link_mbps=self.scenario.cluster_mbps if link is None else link.mbps,
            round_trip_seconds=0.0 if link is None else link.round_trip_seconds,
        )
        if facts.source_tokens <= facts.cached_tokens:
            return None
        if link is None:
            return PrefixFetch(facts.source_tokens, fetching_seconds(facts), "", 0.0)
        return PrefixFetch(facts.source_tokens, 0.0, cluster, float(fetched_bytes(facts)))

    def _plan_prefill(self, request: Request, one: Instance) -> None:
        cached_tokens = self.caches.match(one.name, request) if request.fetch is None else request.fetch.tokens
        request.computed_tokens = request.total_tokens - cached_tokens

    def _plan_transfer(self, request: Request, profile: Profile, cached_tokens: int) -> None:
        """Share what the decode instance lacks among the computed tokens; the linear state crosses whole, and last."""
        crossing_bytes = profile.token_bytes * (request.total_tokens - cached_tokens)
        request.crossing_token_bytes = crossing_bytes / request.computed_tokens
        request.state_bytes = profile.state_bytes

    def _hand_over_chunk(self, request: Request, tokens: int) -> None:
        if request.route is not None:
            self._link(request.route).to_hub.add(request, request.crossing_token_bytes * tokens)

    def _hand_over_rest(self, request: Request) -> None:
        request.prefill_ended_seconds = self.events.now
        route = request.route
        if route is None:
            return
        if route.kind == "local":
            self._in_hub(request)
            return
        request.prefilled = True
        self.caches.insert(_prefiller(route).name, request)
        self._link(route).to_hub.add(request, request.state_bytes)

    def _crossed(self, request: Request) -> None:
        route = request.route
        if route is None:
            return
        if route.kind == "local":  # its prefix
            self._submit(request)
        elif request.prefilled:
            half_seconds = self._link(route).round_trip_seconds / 2
            self.events.after(half_seconds, self._landed, _Attempt(request, request.run))

    def _landed(self, attempt: _Attempt) -> None:
        if attempt.request.run == attempt.run:
            self._in_hub(attempt.request)

    # Decode.

    def _in_hub(self, request: Request) -> None:
        """Decode a request that another instance prefilled."""
        route = request.route
        if route is None:
            return
        self.instances[_prefiller(route).name].withdraw(request)  # its slot
        self._note_cache(request, route)
        if route.decode.name not in self.dead:  # else it is about to be noticed
            self.instances[route.decode.name].answer(request, request.total_tokens - 1, request.output_left_tokens)

    def _note_cache(self, request: Request, route: Route) -> None:
        for one in {route.decode.name, _prefiller(route).name} & self.hub:
            self.caches.insert(one, request)
        self.gateway.prefilled(route, request)

    def _first(self, request: Request) -> None:
        if request.first_token_seconds is None:
            request.first_token_seconds = self.events.now
        if request.route is not None and request.route.prefill is None:
            request.prefill_ended_seconds = self.events.now
            self._note_cache(request, request.route)

    def _last(self, request: Request) -> None:
        self._end(request, "completed")

    def _link(self, route: Route) -> SharedLink:
        return self.links[_prefiller(route).cluster]


def _prefiller(route: Route) -> Instance:
    return route.prefill or route.decode
