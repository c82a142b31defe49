"""The gateway's state between requests: routing table, scheduler's last update, load, and instances to avoid.

It has one owner and changes only on the event loop. `GatewayState.facts` makes a decision's input of it and a request.
"""

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec.structs import replace

from prfaas.errors import CapacityError, InternalError
from prfaas.routing.affinity import cheapest_rank
from prfaas.routing.facts import (
    Route,
    RouteKind,
    RoutingFacts,
    RoutingRule,
    cached_by_cluster,
    narrow,
    rule_in_force,
    usable_places,
)
from prfaas.routing.lengths import LengthTally as Lengths
from prfaas.routing.lengths import PrefillTally
from prfaas.routing.prices import Backlog
from prfaas.routing.quarantine import Quarantine
from prfaas.util import RateBucket, backoff_seconds
from prfaas.wire.control import Counters, LinkReport, ThresholdUpdate
from prfaas.wire.preferences import NO_PREFERENCES, Preferences
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Instance, RoutingTable, measured_as, rank_name, takes_rank
from prfaas_gateway.limits import Limits
from prfaas_gateway.openai import SaturatedError
from prfaas_gateway.request import GatewayRequest, PromptFacts

RETRIES_PER_REQUEST: Final = 0.2
RETRIES_PER_SECOND: Final = 10.0
SAVED_RETRIES: Final = 1000.0
FULL_SECONDS: Final = 0.5
"""For how long a refusal counts."""


class GatewayState:
    """The state of one gateway."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.table: RoutingTable | None = None
        self._places: tuple[str, ...] = ()
        self.reads_whole_bodies = False
        """Whether the table has an engine that clients could steer by fields of a body."""
        self.salt_objects: Set[str] = frozenset()
        """The objects of a body where engines of the table look for a salt first."""
        self.unsalted_apis: Set[str] = frozenset()
        """Paths of the APIs whose requests get no salt, and so are not handed off."""
        self.needs_place_salt = False
        """Whether the table has an engine that does not know whose bytes it has cached."""
        self.ejections = Ejections(limits.eject_seconds, limits.eject_max_seconds)
        self.saturation = Saturation()
        self.retry_budget = RetryBudget(clock())
        self.quarantine = Quarantine()
        self.draining = False
        self.is_alone: Callable[[], bool] = lambda: False
        """Whether our certificate has run out, so that no other cluster takes our requests."""
        self._update: ThresholdUpdate | None = None
        self._update_expires = 0.0
        self._learned: dict[str, Profile] = {}
        """Profiles by instance, as pools say or the scheduler measured; an instance's own answer comes first."""
        self._in_flight: Tally[str] = Tally()
        self._queued_tokens: Tally[str] = Tally()
        self._backlog = Backlog()
        self.in_flight = 0
        """Requests being served."""
        self._decided: Tally[RouteKind] = Tally()
        self._lengths = Lengths()
        self._tokens = PrefillTally()
        self._failed_offloads = 0

    def set_table(self, table: RoutingTable) -> None:
        old = {(one.name, one.url) for one in self.table.instances} if self.table else set()
        self.table = table
        self._places = tuple(usable_places(table, NO_PREFERENCES))
        self.reads_whole_bodies = any(one.record.needs_every_field for one in table.instances)
        self.salt_objects = {one.record.salt_object for one in table.instances} - {""}
        self.unsalted_apis = {path for one in table.instances for path in one.record.unsalted_apis}
        self.needs_place_salt = any(one.record.needs_place_salt for one in table.instances)
        # At another address a name is another pod.
        self.ejections.keep_only({one.name for one in table.instances if (one.name, one.url) in old})
        self._learn()

    def places(self, preferences: Preferences) -> tuple[str, ...]:
        """Return the usable places of a request: those of all requests, unless its preferences narrow them."""
        if self.table is None or not (preferences.forbid or preferences.offload == "never"):
            return self._places
        return tuple(usable_places(self.table, preferences))

    def place_of(self, cluster: str) -> str:
        """Return what the cached bytes of a cluster are known by."""
        return self.table.place_of(cluster) if self.table else cluster

    def push(self, update: ThresholdUpdate) -> None:
        """Use the scheduler's update until it expires."""
        self._update = update
        self._update_expires = self.clock() + update.expires_seconds
        self._learn()

    def _learn(self) -> None:
        if self.table is None:
            return
        # The later one counts: what was measured, before what a pool's spec says.
        found = (*self.table.profiles, *(self._update.profiles if self._update else ()))
        known = {(one.cluster, one.pool): one.profile for one in found if one.profile.samples}
        self._learned = {
            one.name: known[key] for one in self.table.instances if (key := measured_as(self.table, one)) in known
        }

    def rule(self) -> RoutingRule | None:
        """Return the routing rule in force, or None before the first table."""
        if self.table is None:
            return None
        rule = rule_in_force(self.table, self._unexpired())
        return replace(rule, offload_clusters=frozenset()) if self.is_alone() else rule

    def _unexpired(self) -> ThresholdUpdate | None:
        return self._update if self.clock() < self._update_expires else None

    def facts(self, request: GatewayRequest, prompt: PromptFacts, tried: Set[str]) -> RoutingFacts:
        """Return the facts for a routing decision, after the request's preferences and without full instances.

        Raises CapacityError without a routing table, or if every living decode instance is full.
        """
        rule = self.rule()
        if self.table is None or rule is None:
            raise CapacityError("the gateway has no routing table yet; is the operator running?")
        now_seconds = self.clock()
        full = self.saturation.full(self._in_flight, now_seconds)
        if full:
            self._check_room(full, now_seconds)
        rule, table = narrow(rule, self.table, request.preferences)
        rule = self._within_places(rule, table, request)
        return RoutingFacts(
            now_seconds=now_seconds,
            request_id=request.request_id,
            total_tokens=prompt.total_tokens,
            rule=rule,
            table=table,
            cached_tokens=cached_by_cluster(table, prompt.cached_on) if prompt.cached_on else {},
            cached_on=prompt.cached_on or None,
            profiles={**self._learned, **prompt.profiles} if self._learned else prompt.profiles,
            in_flight=self._in_flight,
            queued_tokens=self._queued_tokens,
            backlog=self._backlog,
            ejected_until_seconds=self.ejections.until_seconds,
            # A decision passes over a full instance as over one that was tried.
            tried=tried | full if full else tried,
            no_hand_off=prompt.no_hand_off,
        )

    def _within_places(self, rule: RoutingRule, table: RoutingTable, request: GatewayRequest) -> RoutingRule:
        """Return the rule for the places that a request had when it was read: what a cluster gave it that was admitted
        later would be found under a salt that excludes that cluster."""
        places = set(request.places) if request.has_place_salt or not self.needs_place_salt else set[str]()
        clusters = rule.offload_clusters & {one.name for one in table.clusters if one.known_by in places}
        return rule if clusters == rule.offload_clusters else replace(rule, offload_clusters=clusters)

    def _check_room(self, full: Set[str], now_seconds: float) -> None:
        """Raise SaturatedError if every living decode instance is full."""
        ejected = self.ejections.until_seconds
        living = {one.name for one in self.decode_instances() if ejected.get(one.name, now_seconds) <= now_seconds}
        if living and full >= living:
            raise SaturatedError(f"all {len(living)} decode instances are full; try again in a moment")

    @contextmanager
    def counted(self, began: Route, *, prefills: bool = True) -> Iterator[None]:
        """Count one request; if the model runs for it, also its length under its first decision."""
        if prefills:
            self._decided[began.kind] += 1
            self._lengths.add(began.incremental_tokens)
            self._tokens.add(began.kind, began.incremental_tokens, began.computed_tokens)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    @contextmanager
    def occupied(
        self, route: Route, cached_on_ranks: Mapping[str, tuple[int, ...]] = MappingProxyType({}), request_id: str = ""
    ) -> Iterator["LegLoad"]:
        """Choose the ranks of a leg's instances, and count the leg there while the block runs."""
        ranks = self._choose_ranks(route, cached_on_ranks, request_id)
        load = LegLoad(self._in_flight, self._queued_tokens, self._backlog, (route, ranks), self.clock)
        for one in filter(None, (route.decode, route.prefill)):
            self.ejections.starting(one.name, self.clock())
        try:
            yield load
        finally:
            load.done()

    def _choose_ranks(
        self, route: Route, cached_on_ranks: Mapping[str, tuple[int, ...]], request_id: str
    ) -> dict[str, int]:
        """Return the cheapest data-parallel rank of each instance of a route that takes one; of an instance that gives
        a prefix, the rank that has most of it."""
        chosen: dict[str, int] = {}
        for one in filter(takes_rank, filter(None, (route.decode, route.prefill))):
            ranks = [rank_name(one.name, rank) for rank in range(one.ranks)]
            cached_tokens = cached_on_ranks.get(one.name, (0,) * one.ranks)
            queued_tokens = [self._queued_tokens[rank] for rank in ranks]
            decoding = [self._in_flight[rank] for rank in ranks]
            chosen[one.name] = cheapest_rank(request_id, cached_tokens, queued_tokens, decoding)
        if route.prefix is not None and takes_rank(route.prefix):
            cached_tokens = cached_on_ranks.get(route.prefix.name, (0,))
            # Also where it decodes on: another of its ranks would compute the prefix, to give it.
            chosen[route.prefix.name] = cached_tokens.index(max(cached_tokens))
        return chosen

    def offload_failed(self) -> None:
        self._failed_offloads += 1

    @property
    def links(self) -> tuple[LinkReport, ...]:
        """The scheduler's last view of the links; none after it expired."""
        update = self._unexpired()
        return update.links if update else ()

    @property
    def reason(self) -> str:
        """The scheduler's reason for the threshold; empty after it expired."""
        update = self._unexpired()
        return update.reason if update else ""

    @property
    def rejects_failed_offloads(self) -> bool:
        return self.table is not None and self.table.on_offload_failure == "Reject"

    def load(self, name: str) -> int:
        return self._in_flight.get(name, 0)

    def is_ejected(self, name: str) -> bool:
        now_seconds = self.clock()
        return self.ejections.until_seconds.get(name, now_seconds) > now_seconds

    def decode_instances(self) -> list[Instance]:
        """Return the table's decode instances, with ejected and full ones."""
        instances = self.table.instances if self.table else ()
        return [one for one in instances if one.role == "decode" and one.state == "Ready"]

    @property
    def counters(self) -> Counters:
        return Counters(
            offloaded=self._decided["offload"],
            local=self._decided["local"],
            failed_offloads=self._failed_offloads,
            lengths=self._lengths.counts,
            offloaded_tokens=self._tokens.of("offload"),
            local_tokens=self._tokens.of("local"),
        )

    def check_integrity(self) -> None:
        """Raise InternalError when an idle gateway still occupies an instance."""
        if self.in_flight == 0 and (self._in_flight or self._backlog or self._queued_tokens):
            raise InternalError(f"idle, but still occupied: {dict(self._in_flight)}, {len(self._backlog)} in the queue")


class LegLoad:
    """The places that one leg occupies at its instances and their ranks; each is released once."""

    def __init__(
        self,
        in_flight: Tally[str],
        queued_tokens: Tally[str],
        backlog: Backlog,
        placed: tuple[Route, Mapping[str, int]],
        clock: Callable[[], float],
    ):
        route, self.ranks = placed
        self._clock = clock
        self._in_flight = in_flight
        self._queued_tokens = queued_tokens
        self._backlog = backlog
        decode = _with_rank(route.decode.name, self.ranks)
        self._filling = _with_rank(route.prefill.name, self.ranks) if route.prefill else []
        self._held = [*decode, *self._filling]
        in_flight.update(self._held)
        self._is_local = route.prefill is None
        self._queued = self._filling or decode, route.prefill_tokens
        for name in self._queued[0]:
            queued_tokens[name] += route.prefill_tokens
        if route.work is not None:
            backlog.add(self, (route.prefill or route.decode).name, route.work, clock())

    def prefill_done(self, *, streams: bool) -> None:
        """Release the prefill instance: the first token exists. In a stream it came just now, and without a prefill
        instance straight from who computed it."""
        self._computed(is_news=streams and self._is_local)
        self._release(self._filling[:])

    def done(self) -> None:
        self._computed(is_news=False)
        # A copy, since `_release` takes from the list.
        self._release(self._held[:])

    def _computed(self, *, is_news: bool) -> None:
        self._backlog.remove(self, self._clock() if is_news else None)
        names, tokens = self._queued
        self._queued = [], 0
        for name in names:
            self._queued_tokens[name] -= tokens
            if not self._queued_tokens[name]:
                del self._queued_tokens[name]

    def _release(self, names: list[str]) -> None:
        for name in names:
            self._held.remove(name)
            self._in_flight[name] -= 1
            if not self._in_flight[name]:
                del self._in_flight[name]
        self._filling = []


def _with_rank(instance: str, ranks: Mapping[str, int]) -> list[str]:
    """Return the names under which an instance's load counts."""
    return [instance, rank_name(instance, ranks[instance])] if instance in ranks else [instance]


@dataclass(slots=True)
class _Failing:
    failures: int = 0
    probing: bool = False


class Ejections:
    """Instances that failed lately, and the end of each ejection.

    The gateway sees a dead instance before the next routing table, and the operator may be down. An ejection ends
    half-open: the first request afterwards tries the instance while others avoid it. Success readmits the instance;
    failure doubles the ejection. A last resort comes before the end, and changes the ejection by success alone.
    """

    def __init__(self, first_seconds: float, max_seconds: float):
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._failing: dict[str, _Failing] = {}
        self._until_seconds: dict[str, float] = {}

    @property
    def until_seconds(self) -> Mapping[str, float]:
        """End of every ejection by instance; a live view."""
        return self._until_seconds

    def starting(self, name: str, now_seconds: float) -> None:
        """Record a request to an instance. After an ended ejection, others avoid the instance until its result."""
        failing = self._failing.get(name)
        if failing is not None and self._until_seconds[name] <= now_seconds:
            failing.probing = True
            self._until_seconds[name] = now_seconds + self._first_seconds

    def failed(self, name: str, now_seconds: float) -> None:
        """Record a failed request. Of many parallel failures only the first counts."""
        failing = self._failing.setdefault(name, _Failing())
        if self._until_seconds.get(name, now_seconds) > now_seconds and not failing.probing:
            return
        failing.failures += 1
        failing.probing = False
        length_seconds = backoff_seconds(failing.failures, self._first_seconds, self._max_seconds, jitter=False)
        self._until_seconds[name] = now_seconds + length_seconds

    def succeeded(self, name: str) -> None:
        if self._failing.pop(name, None) is not None:
            del self._until_seconds[name]

    def keep_only(self, names: Set[str]) -> None:
        """Forget all other instances: a pod that returns under its name starts afresh."""
        for name in self._failing.keys() - names:
            self.succeeded(name)


class _Full(NamedTuple):
    in_flight: int
    until_seconds: float


class Saturation:
    """Decode instances that are full, by their refusals (503) and the gateway's own requests there.

    At a refusal the gateway learns how many of its requests the instance takes. It sends no more until one of them
    ends, or a moment has passed: other gateways may take the places. While every instance is full, the gateway refuses
    requests at once without asking workers.
    """

    def __init__(self) -> None:
        self._full: dict[str, _Full] = {}

    def refused(self, name: str, in_flight: int, now_seconds: float) -> None:
        """Record that an instance refused a request while `in_flight` of ours ran there."""
        self._full[name] = _Full(in_flight, now_seconds + FULL_SECONDS)

    def full(self, in_flight: Mapping[str, int], now_seconds: float) -> Set[str]:
        """Return the full instances; forget expired refusals."""
        if not self._full:
            return frozenset()
        self._full = {name: full for name, full in self._full.items() if now_seconds < full.until_seconds}
        return {name for name, full in self._full.items() if in_flight.get(name, 0) >= full.in_flight}


class RetryBudget:
    """Bounds retries over all requests, so that a collapse does not multiply the load.

    Every request adds a fifth of a retry, and time adds a few, so that an idle gateway can retry too. The saved retries
    cover the death of an instance with many streams. Later failures cost a fifth more work at most.
    """

    def __init__(self, now_seconds: float):
        self._bucket = RateBucket(RETRIES_PER_SECOND, SAVED_RETRIES, now_seconds)

    def request_came(self, now_seconds: float) -> None:
        self._bucket.take(-RETRIES_PER_REQUEST, now_seconds)

    def take(self, now_seconds: float) -> bool:
        if self._bucket.level(now_seconds) < 1:
            return False
        self._bucket.take(1, now_seconds)
        return True
