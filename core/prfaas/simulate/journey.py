"""The way of every request from its first decision to its one end.

    decide -> [round trip, fetch of a longer prefix] -> queue -> prefill, chunks on the link -> cache whole in the hub
    -> queue for the batch -> first token -> last token

A leg that fails goes through `routing.decide_again`, with what was generated so far as part of the prompt, as the
gateway resumes. What an abandoned route still had scheduled is told by the request's `run`, which counts its routes.

Inside a cluster caches move in no time. A prefill is first come, first served; a link and a batch are shared equally.
"""

from collections.abc import Iterable
from typing import NamedTuple

from prfaas.capacity.profile import prefill_seconds
from prfaas.names import HUB
from prfaas.routing.facts import Decision, Leg, Refusal, Route
from prfaas.routing.lending import LendingFacts, decide_lending
from prfaas.routing.lengths import Tally as Lengths
from prfaas.simulate.cache import PrefixCache
from prfaas.simulate.events import Events
from prfaas.simulate.gateway import Gateway, routing_table
from prfaas.simulate.instances import DecodeServer, PrefillServer
from prfaas.simulate.links import SharedLink
from prfaas.simulate.outcome import Outcome, Tally
from prfaas.simulate.request import Arrival, Request
from prfaas.simulate.scenario import Conditions, Scenario
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Instance


class Attempt(NamedTuple):
    """A request on one of its routes; over when the request's `run` has moved on."""

    request: Request
    run: int
    leg: Leg = "prefill"


class Journeys:
    """All requests on their way, and what they meet there.

    Args:
        scenario: validated.
        tally: told of every arrival and end.

    """

    def __init__(self, scenario: Scenario, tally: Tally):
        self.scenario = scenario
        self.tally = tally
        self.events = Events()
        self.table = routing_table(scenario)
        self.caches = _caches(scenario)
        self.gateway = Gateway(self.events, self.table, self.caches)
        self.links = {
            link.name: SharedLink(
                self.events,
                link.capacity_mbps,
                scenario.conditions.get(link.name, Conditions()).round_trip_seconds,
                self._crossed,
                self._submit,
            )
            for link in scenario.system.links
        }
        self.prefills: dict[str, PrefillServer] = {}
        self.decodes: dict[str, DecodeServer] = {}
        self.dead: set[str] = set()
        self.offloads = 0
        """Routes so far that were offloads."""
        self.lengths = Lengths()
        """Counts first decisions by incremental length, as a gateway does."""
        self._profiles: dict[str, Profile] = {}
        for one in self.table.instances:
            self._furnish(one)

    def start(self, arrival: Arrival) -> None:
        """Let a request arrive."""
        request = Request(self.tally.arrived, arrival)
        self.tally.arrive(request)
        decision = self.gateway.decide(request)
        if isinstance(decision, Route):
            request.began = decision
            self.lengths.add(decision.incremental_tokens)
        self._follow(request, decision)

    def living(self) -> Iterable[Instance]:
        """Return the instances that are not dead."""
        return (one for one in self.table.instances if one.name not in self.dead)

    def doom(self, request: Request, leg: Leg) -> None:
        """Have the request's present route fail, by this leg, as soon as that is noticed."""
        self.events.after(self.scenario.detection_seconds, self._fail, Attempt(request, request.run, leg))

    def doom_if_stalled(self, request: Request) -> None:
        """Have an offload fail if its link still carries nothing by then."""
        self.events.after(self.scenario.detection_seconds, self._fail_if_stalled, Attempt(request, request.run))

    def withdraw(self, request: Request) -> None:
        """Stop whatever is done for a request, and keep what was generated. It stays in flight on its instances."""
        route = request.route
        if route is None:
            return
        request.generated_tokens += self.decodes[route.decode.name].withdraw(request)
        if route.prefill is not None:
            self.prefills[route.prefill.name].withdraw(request)
        if route.kind == "offload":
            link = self._link(route)
            link.to_hub.remove(request)
            link.from_hub.remove(request)

    def _furnish(self, one: Instance) -> None:
        system = self.scenario.system
        offload = {pool.name: pool for pool in system.offload}
        if one.pool in offload:
            self._profiles[one.name] = offload[one.pool].profile
            self.prefills[one.name] = PrefillServer(self.events, self._hand_over_chunk, self._hand_over_rest)
            return
        pool = next(pool for pool in system.hub if pool.name == one.pool)
        self._profiles[one.name] = pool.profile
        if one.role == "prefill":
            self.prefills[one.name] = PrefillServer(self.events, _nothing, self._in_hub)
        else:
            self.decodes[one.name] = DecodeServer(self.events, pool, self._first, self._last, self._in_hub)

    # A route, and its end.

    def _follow(self, request: Request, decision: Decision) -> None:
        if isinstance(decision, Refusal) or request.attempts == self.scenario.attempts:
            self._end(request, "refused")
            return
        request.attempts += 1
        request.run += 1
        request.route = decision
        request.prefilled = False
        self.gateway.enter(decision, request)
        if decision.decode.name in self.dead:
            self.doom(request, "decode")
        elif decision.prefill is not None and decision.prefill.name in self.dead:
            self.doom(request, "prefill")
        elif decision.kind == "offload":
            self._offload(request, decision)
        else:
            self._plan_prefill(request, decision.prefill or decision.decode, self._match(HUB, request))
            self._submit(request)

    def _fail(self, attempt: Attempt) -> None:
        request, run, leg = attempt
        route = request.route
        if request.run != run or route is None:
            return
        if leg == "prefill" and route.prefill and request not in self.gateway.on[route.prefill.name]:
            return  # its cache had left already
        self.withdraw(request)
        self._release(request, route)
        self._follow(request, self.gateway.decide_again(request, route, leg))

    def _fail_if_stalled(self, attempt: Attempt) -> None:
        route = attempt.request.route
        if route is not None and route.kind == "offload" and self._link(route).down:
            self._fail(attempt)

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

    def _offload(self, request: Request, route: Route) -> None:
        self.offloads += 1
        link, one = self._link(route), _prefiller(route)
        if link.down:
            self.doom_if_stalled(request)
        in_hub, there = self._match(HUB, request), self._match(one.cluster, request)
        fetched = in_hub if self._borrows(request, one, there, in_hub) else 0
        self._plan_prefill(request, one, max(there, fetched))
        self._plan_transfer(request, self._profiles[one.name], in_hub)
        request.fetched_tokens = fetched
        self.events.after(link.round_trip_seconds, self._connected, Attempt(request, request.run))

    def _borrows(self, request: Request, one: Instance, there: int, in_hub: int) -> bool:
        """Tell whether a worker takes from the hub what it lacks of a prefix, as it decides itself."""
        link = self.links[one.cluster]
        facts = LendingFacts(
            prompt_tokens=request.total_tokens,
            cached_tokens=there,
            lend_tokens=in_hub,
            profile=self._profiles[one.name],
            link_mbps=link.mbps,
            round_trip_seconds=link.round_trip_seconds,
        )
        return decide_lending(facts).borrow

    def _connected(self, attempt: Attempt) -> None:
        request, route = attempt.request, attempt.request.route
        if request.run != attempt.run or route is None or _prefiller(route).name in self.dead:
            return
        if request.fetched_tokens > 0:
            profile = self._profiles[_prefiller(route).name]
            borrowed_tokens = request.fetched_tokens - self._match(_prefiller(route).cluster, request)
            fetched_bytes = profile.state_bytes + profile.token_bytes * max(0, borrowed_tokens)
            self._link(route).from_hub.add(request, fetched_bytes)
        else:
            self._submit(request)

    def _submit(self, request: Request) -> None:
        route = request.route
        if route is None:
            return
        self.tally.computed_tokens += request.computed_tokens
        if route.prefill is None:
            self.decodes[route.decode.name].prefill(request)
        else:
            self.prefills[route.prefill.name].submit(request)

    def _plan_prefill(self, request: Request, one: Instance, cached_tokens: int) -> None:
        profile = self._profiles[one.name]
        request.computed_tokens = request.total_tokens - cached_tokens
        request.prefill_seconds = prefill_seconds(profile, request.computed_tokens, cached_tokens)
        request.chunk_ends = ()
        chunk_tokens = self.scenario.chunk_tokens
        if one.cluster != HUB and request.computed_tokens > chunk_tokens:
            request.chunk_ends = [
                prefill_seconds(profile, end, cached_tokens) / request.prefill_seconds
                for end in range(chunk_tokens, request.computed_tokens, chunk_tokens)
            ]

    def _plan_transfer(self, request: Request, profile: Profile, in_hub_tokens: int) -> None:
        """Share what the hub lacks among the chunks; the linear state crosses whole, and last."""
        crossing_bytes = profile.token_bytes * (request.total_tokens - in_hub_tokens)
        request.chunk_bytes = crossing_bytes / (len(request.chunk_ends) + 1)
        request.last_bytes = request.chunk_bytes + profile.state_bytes

    def _hand_over_chunk(self, request: Request) -> None:
        if request.route is not None:
            self._link(request.route).to_hub.add(request, request.chunk_bytes)

    def _hand_over_rest(self, request: Request) -> None:
        route = request.route
        if route is not None:
            request.prefilled = True
            self._remember(_prefiller(route).cluster, request)
            self._link(route).to_hub.add(request, request.last_bytes)

    def _crossed(self, request: Request) -> None:
        if request.prefilled and request.route is not None:
            half_seconds = self._link(request.route).round_trip_seconds / 2
            self.events.after(half_seconds, self._landed, Attempt(request, request.run))

    def _landed(self, attempt: Attempt) -> None:
        if attempt.request.run == attempt.run:
            self._in_hub(attempt.request)

    # Decode.

    def _in_hub(self, request: Request) -> None:
        route = request.route
        if route is None:
            return
        self._remember(HUB, request)
        self.gateway.prefilled(route, request)
        if route.decode.name not in self.dead:  # else it is about to be noticed
            self.decodes[route.decode.name].submit(request)

    def _first(self, request: Request) -> None:
        if request.first_token_seconds is None:
            request.first_token_seconds = self.events.now

    def _last(self, request: Request) -> None:
        self._end(request, "completed")

    # Small questions.

    def _link(self, route: Route) -> SharedLink:
        return self.links[_prefiller(route).cluster]

    def _match(self, cluster: str, request: Request) -> int:
        cache = self.caches.get(cluster)
        return cache.match(request.arrival.blocks, request.total_tokens) if cache and request.arrival.blocks else 0

    def _remember(self, cluster: str, request: Request) -> None:
        if cluster in self.caches and request.arrival.blocks:
            self.caches[cluster].insert(request.arrival.blocks, request.arrival.input_tokens)


def _caches(scenario: Scenario) -> dict[str, PrefixCache]:
    """Return the caches of the clusters that have memory for one."""
    profiles = {HUB: scenario.system.hub[0].profile, **{pool.link: pool.profile for pool in scenario.system.offload}}
    return {
        cluster: PrefixCache(
            size_bytes, scenario.block_tokens, profiles[cluster].token_bytes, profiles[cluster].state_bytes
        )
        for cluster, size_bytes in scenario.cache_bytes.items()
        if size_bytes > 0 and cluster in profiles
    }


def _prefiller(route: Route) -> Instance:
    return route.prefill or route.decode


def _nothing(_: Request) -> None:
    """Local prefills hand over nothing before their end."""
