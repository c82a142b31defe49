"""What the gateway knows between requests: the routing table, the scheduler's last word, load and ejections.

One owner, changed on the event loop only. `facts` turns it into the input of a routing decision.
"""

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

from prfaas.errors import InternalError
from prfaas.routing.backlog import Backlog
from prfaas.routing.facts import Facts, Kind, Route, Rule, rule_in_force
from prfaas.routing.lengths import Tally as Lengths
from prfaas.wire.control import Counters, LinkUse, ThresholdUpdate
from prfaas.wire.routes import RoutingTable
from prfaas_gateway.ejections import Ejections
from prfaas_gateway.limits import Limits


class Load:
    """The places that one leg occupies at its instances; each is given back once."""

    def __init__(
        self, in_flight: Tally[str], queued_tokens: Tally[str], backlog: Backlog, route: Route, now_seconds: float
    ):
        self._in_flight = in_flight
        self._queued_tokens = queued_tokens
        self._prefill = (route.prefill or route.decode).name, route.prefill_tokens
        queued_tokens[self._prefill[0]] += route.prefill_tokens
        self._backlog = backlog
        self._held = [route.decode.name] + ([route.prefill.name] if route.prefill else [])
        in_flight.update(self._held)
        if route.work is not None:
            backlog.add(self, self._prefill[0], route.work, now_seconds)

    def prefill_done(self) -> None:
        """The first token exists: the prefill instance is free again."""
        self._computed()
        self._release(self._held[1:])

    def done(self) -> None:
        """The leg is over."""
        self._computed()
        self._release(self._held[:])

    def _computed(self) -> None:
        self._backlog.remove(self)
        name, tokens = self._prefill
        self._queued_tokens[name] -= tokens
        self._prefill = name, 0
        if not self._queued_tokens[name]:
            del self._queued_tokens[name]

    def _release(self, names: list[str]) -> None:
        for name in names:
            self._held.remove(name)
            self._in_flight[name] -= 1
            if not self._in_flight[name]:
                del self._in_flight[name]


class GatewayState:
    """The state of one gateway.

    Args:
        limits: bounds for ejections.
        clock: monotonic seconds.

    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.table: RoutingTable | None = None
        self.ejections = Ejections(limits.eject_seconds, limits.eject_max_seconds)
        self.draining = False
        self._update: ThresholdUpdate | None = None
        self._update_expires = 0.0
        self._in_flight: Tally[str] = Tally()
        self._queued_tokens: Tally[str] = Tally()
        self._backlog = Backlog()
        self._in_flight_decisions: Tally[Kind] = Tally()
        self._decided: Tally[Kind] = Tally()
        self._lengths = Lengths()
        self._failed_offloads = 0

    def set_table(self, table: RoutingTable) -> None:
        """Route by this table from now on."""
        old = {(one.name, one.url) for one in self.table.instances} if self.table else set()
        self.table = table
        self.ejections.keep_only({one.name for one in table.instances if (one.name, one.url) in old})

    def push(self, update: ThresholdUpdate) -> None:
        """Take the scheduler's update until it expires."""
        self._update = update
        self._update_expires = self.clock() + update.expires_seconds

    def rule(self) -> Rule | None:
        """Return the rule in force, or None before the first table."""
        if self.table is None:
            return None
        return rule_in_force(self.table, self._unexpired())

    def _unexpired(self) -> ThresholdUpdate | None:
        return self._update if self.clock() < self._update_expires else None

    def facts(self, request_id: str, total_tokens: int, tried: Set[str]) -> Facts | None:
        """Return the facts of one request at this moment, or None before the first table."""
        rule = self.rule()
        if self.table is None or rule is None:
            return None
        return Facts(
            now_seconds=self.clock(),
            request_id=request_id,
            total_tokens=total_tokens,
            rule=rule,
            table=self.table,
            in_flight=self._in_flight,
            queued_tokens=self._queued_tokens,
            backlog=self._backlog,
            ejected_until_seconds=self.ejections.until_seconds,
            tried=tried,
        )

    @contextmanager
    def counted(self, began: Route) -> Iterator[None]:
        """Count one request, and its length, under the decision that it began with."""
        self._decided[began.kind] += 1
        self._lengths.add(began.incremental_tokens)
        self._in_flight_decisions[began.kind] += 1
        try:
            yield
        finally:
            self._in_flight_decisions[began.kind] -= 1

    @contextmanager
    def occupied(self, route: Route) -> Iterator[Load]:
        """Count one leg at its instances while it lasts."""
        load = Load(self._in_flight, self._queued_tokens, self._backlog, route, self.clock())
        for one in filter(None, (route.decode, route.prefill)):
            self.ejections.starting(one.name, self.clock())
        try:
            yield load
        finally:
            load.done()

    def offload_failed(self) -> None:
        """Count one failed prefill leg of an offload."""
        self._failed_offloads += 1

    @property
    def links(self) -> tuple[LinkUse, ...]:
        """The links as the scheduler saw them last; none when its word has expired."""
        update = self._unexpired()
        return update.links if update else ()

    @property
    def reason(self) -> str:
        """Why the threshold is what it is, in the scheduler's words; empty when it has not said anything lately."""
        update = self._unexpired()
        return update.reason if update else ""

    def load(self, name: str) -> int:
        """Requests in flight at an instance."""
        return self._in_flight.get(name, 0)

    @property
    def has_decode(self) -> bool:
        """Whether the table has a decode instance that should serve, whatever it does just now."""
        return self.table is not None and any(
            one.role == "decode" and one.state == "Ready" for one in self.table.instances
        )

    @property
    def in_flight(self) -> int:
        """Requests being served."""
        return self._in_flight_decisions.total()

    @property
    def counters(self) -> Counters:
        """What the scheduler reads."""
        return Counters(
            offloaded=self._decided["offload"],
            local=self._decided["local"],
            failed_offloads=self._failed_offloads,
            in_flight_offloads=self._in_flight_decisions["offload"],
            in_flight_local=self._in_flight_decisions["local"],
            lengths=self._lengths.counts,
        )

    def check_integrity(self) -> None:
        """Raise InternalError when an idle gateway still occupies an instance."""
        if self.in_flight == 0 and (self._in_flight or self._backlog or self._queued_tokens):
            raise InternalError(f"idle, and yet occupied: {dict(self._in_flight)}, {len(self._backlog)} in line")
