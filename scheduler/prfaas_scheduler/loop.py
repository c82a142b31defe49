"""Runs one step an interval: read the gateway's table and counters, measure, decide, push the threshold, report.

The gateway may not have started, and Prometheus may be down or answer nonsense. A round that fails is left out and the
next one comes on time; the controller's state survives the gap. The decision itself is made by
prfaas.routing.controller, in the instances' own time (prfaas_scheduler.slow_time).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import aiohttp
import msgspec

from prfaas.conditions import rfc3339
from prfaas.errors import PeerError, PrfaasError
from prfaas.routing import controller
from prfaas.routing.balance import Offered
from prfaas.routing.controller import Config, ControllerFacts, State, Step, config_of
from prfaas.routing.feedforward import PoolFacts
from prfaas.routing.lengths import BINS, demand_of
from prfaas.routing.links import LinkFacts
from prfaas.util import LogOnce
from prfaas.wire.control import ThresholdUpdate
from prfaas.wire.profile import PoolProfile
from prfaas.wire.routes import RoutingTable, measured_as
from prfaas_scheduler import observe, status
from prfaas_scheduler.conditions import CACHES_FIT, LOOP_MEASURED, LoopCondition, caches_fit
from prfaas_scheduler.gateway import GatewayClient
from prfaas_scheduler.measure import NOTHING, Measurements, measure
from prfaas_scheduler.metrics import SchedulerMetrics
from prfaas_scheduler.profiles import LearnedProfiles
from prfaas_scheduler.prometheus import Prometheus
from prfaas_scheduler.slow_time import own_measurements, own_table, step_by_clock, whole_seconds

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
MAX_QUERY_SECONDS = 5.0


class LearnedState(NamedTuple):
    """The controller's state, and the configuration that it was learned under."""

    config: Config
    state: State


class Loop:
    """The short timescale of one policy; `http` is the session for Prometheus, of whose bounds `bounds_part` holds."""

    def __init__(
        self,
        gateway: GatewayClient,
        http: aiohttp.ClientSession,
        metrics: SchedulerMetrics,
        clock: Callable[[], float] = time.monotonic,
        bounds_part: float = 1.0,
    ):
        self._gateway = gateway
        self._http = http
        self._metrics = metrics
        self._clock = clock
        self._bounds_part = bounds_part
        self._failures = LogOnce(log)
        self._profiles = LearnedProfiles()
        self._observed: Mapping[str, Any] | None = None
        self._begin(1.0)
        self.report: status.Report | None = None
        """What the policy's status should say, None before the first step."""

    def _begin(self, stretch: float) -> None:
        """Know nothing yet of instances that live so many times slower than the clock."""
        self._stretch = stretch
        self._condition = LoopCondition()
        self._history = observe.CounterHistory()
        self._known: LearnedState | None = None
        self._observe_at = float("-inf")

    def _now(self) -> float:
        """Return the time in the instances' seconds."""
        return self._clock() / self._stretch

    async def run(self) -> None:
        while True:
            started = self._clock()
            interval_seconds = await self.once()
            await asyncio.sleep(max(0.0, started + interval_seconds - self._clock()))

    async def once(self) -> float:
        """Do one round and return the interval in seconds; a round that fails is logged and tried again soon."""
        try:
            with self._metrics.step_seconds.time():
                interval_seconds = await self._round()
        except PeerError as error:
            what = "the gateway's control socket"
            self._failures.failed(what, f"{what} failed: {error}", reason=type(error))
            return RETRY_SECONDS
        self._failures.worked("the gateway's control socket")
        return interval_seconds

    async def _round(self) -> float:
        table = permitted(await self._gateway.table())
        if table.stretch != self._stretch:
            self._begin(table.stretch)
        self._history.add(self._now(), await self._gateway.counters())
        measured = await self._measure(table)
        measured = measured._replace(profiles=self._profiles.profiles(table, measured))
        own_step = self._step(own_table(table), own_measurements(measured, table.stretch))
        step = step_by_clock(own_step, table.stretch)
        await self._gateway.put_threshold(update_of(table, step, measured))
        self._metrics.show(step)
        if self._now() >= self._observe_at:
            self._observed = await self._observe(table, measured, step) or self._observed
        offloaded = self._history.offloaded_percent()
        report = status.report_of(table, step, measured.errors, offloaded, self.report, self._observed)
        before = self.report.conditions.get(CACHES_FIT) if self.report else None
        own = {
            LOOP_MEASURED: self._condition.state(self._now(), table, measured),
            CACHES_FIT: caches_fit(table, measured, before),
        }
        self.report = report._replace(conditions={**report.conditions, **own})
        return table.short_interval_seconds * table.stretch

    async def _measure(self, table: RoutingTable) -> Measurements:
        if not table.prometheus_url:
            return NOTHING
        window_seconds = whole_seconds(config_of(table).window_seconds, table.stretch)
        measured = await measure(self._prometheus(table), table, window_seconds)
        self._complain(measured.errors)
        return measured

    def _prometheus(self, table: RoutingTable) -> Prometheus:
        # No longer than an interval: a table that says a cluster is gone must not wait for a slow Prometheus.
        timeout_seconds = min(table.short_interval_seconds * table.stretch, MAX_QUERY_SECONDS)
        return Prometheus(self._http, table.prometheus_url, timeout_seconds, self._bounds_part)

    async def _observe(self, table: RoutingTable, measured: Measurements, step: Step) -> Mapping[str, Any] | None:
        """Return a new summary for the long loop; None where nothing new is known well enough."""
        arrivals = self._history.mean_arrivals_per_second()
        query = observe.query_of(table)
        if not table.prometheus_url or measured.errors or step.metrics == "Stale" or arrivals is None or not query:
            return None
        try:
            figures = await self._prometheus(table).vector(query)
        except PrfaasError as error:
            self._complain((error,))
            return None
        self._observe_at = self._now() + observe.OBSERVE_SECONDS
        profiles = {key: measured.profiles[key] for key in self._profiles.measured}
        seen = observe.SummaryInputs(self._history.lengths(), arrivals / table.stretch, step.links, profiles)
        return observe.summarise(seen, figures, rfc3339(datetime.now(UTC)))

    def _complain(self, errors: tuple[PrfaasError, ...]) -> None:
        self._metrics.query_errors.inc(len(errors))
        if errors:
            self._failures.failed("measuring", f"measuring failed: {errors[0]}", reason=type(errors[0]))
        else:
            self._failures.worked("measuring")

    def _step(self, table: RoutingTable, measured: Measurements) -> Step:
        config = config_of(table)
        known = self._known
        if known is None or known.config.threshold != config.threshold:  # a changed policy starts from its own tokens
            known = LearnedState(config, controller.initial_state(config))
        now_seconds = self._now()
        facts = ControllerFacts(
            now_seconds=now_seconds,
            links=links_of(table, measured),
            hub_measured=measured.hub_measured,
            recent_offloads=self._history.offloads_since(now_seconds - config.window_seconds),
            offered=offered_of(table, measured, self._history),
            recent_prompts=sum(lengths) if (lengths := self._history.lengths()) else None,
        )
        step = controller.step(config, known.state, facts)
        if self.report is None or self.report.figures["thresholdTokens"] != step.tokens:
            log.info("threshold %d tokens, bandwidth %s: %s", step.tokens, step.bandwidth, step.reason)
        self._known = LearnedState(config, step.state)
        return step


def permitted(table: RoutingTable) -> RoutingTable:
    """Return the table without clusters that no prompt may go to: a link that is never used must not move t."""
    return msgspec.structs.replace(table, clusters=table.permitted_clusters)


def links_of(table: RoutingTable, measured: Measurements) -> tuple[LinkFacts, ...]:
    """Return what table and measurements say of every link."""
    ready = [instance.cluster for instance in table.instances if instance.state == "Ready"]
    return tuple(
        LinkFacts(
            cluster=cluster.name,
            capacity_mbps=cluster.capacity_mbps,
            reachable=cluster.reachable,
            ready_instances=ready.count(cluster.name),
            sample=measured.samples.get(cluster.name),
        )
        for cluster in table.clusters
    )


def offered_of(table: RoutingTable, measured: Measurements, history: observe.CounterHistory) -> Offered | None:
    """Return what comes and what the pools can do about it; None while lengths or profiles are not known.

    Pools and links serve the requests of all gateways, so their rate is taken from our own gateway's share of them.
    """
    counts = history.lengths()
    demand = demand_of(BINS, counts) if counts and measured.profiles else None
    if demand is None:
        return None
    own_per_second = history.arrivals_per_second()
    return Offered(
        demand=demand,
        arrivals_per_second=None if own_per_second is None else own_per_second * table.gateways,
        pools=pools_of(table, measured, history.work),
        local_waiting_prefills=measured.local_waiting_prefills,
    )


def pools_of(table: RoutingTable, measured: Measurements, work_of: Callable[[str], float]) -> tuple[PoolFacts, ...]:
    """Return every prefill pool that was measured; `work_of` says what a cluster computes of each counted token."""
    ready = Counter(
        measured_as(table, one) for one in table.instances if one.role == "prefill" and one.state == "Ready"
    )
    return tuple(
        PoolFacts(cluster=cluster, ready_instances=ready[cluster, pool], profile=profile, work=work_of(cluster))
        for (cluster, pool), profile in measured.profiles.items()
        if ready[cluster, pool]
    )


def update_of(table: RoutingTable, step: Step, measured: Measurements) -> ThresholdUpdate:
    """Return the update for the gateway, which expires when metrics of that age would be stale."""
    # At least three rounds, so that one or two that fail do not end a threshold that still holds.
    expires_seconds = max(table.stale_after_seconds, 3 * table.short_interval_seconds)
    update = step.update(whole_seconds(expires_seconds, table.stretch))
    profiles = tuple(
        PoolProfile(cluster=cluster, pool=pool, profile=profile)
        for (cluster, pool), profile in sorted(measured.profiles.items())
    )
    return msgspec.structs.replace(update, profiles=profiles)
