"""One step an interval: read table and counters from the gateway, measure, decide, push the threshold, keep a report.

Everything around it may be missing: a gateway that has not started, a Prometheus that is down or talks nonsense. A
round that cannot be done is left out and the next one comes on time; what the controller knows survives the gap. The
decision itself is prfaas.routing.controller's.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import aiohttp
import msgspec

from prfaas.errors import PeerError, PrfaasError
from prfaas.routing import controller
from prfaas.routing.controller import Config, Facts, LinkFacts, State, Step
from prfaas.wire.control import Counters, ThresholdUpdate
from prfaas.wire.routes import RoutingTable
from prfaas_scheduler import status
from prfaas_scheduler.gateway import Gateway
from prfaas_scheduler.measure import NOTHING, Measured, measure
from prfaas_scheduler.metrics import Metrics
from prfaas_scheduler.prometheus import Prometheus
from prfaas_scheduler.trouble import Trouble

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
OFFLOADED_WINDOW_SECONDS = 60.0
MAX_QUERY_SECONDS = 5.0


class CounterHistory:
    """What the gateway counted over the last minute."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, Counters]] = deque()

    def add(self, now_seconds: float, counters: Counters) -> None:
        """Take in a new count; a gateway that restarted begins anew."""
        if self._counts and counters.offloaded < self._counts[-1][1].offloaded:
            self._counts.clear()
        self._counts.append((now_seconds, counters))
        while self._counts[0][0] < now_seconds - OFFLOADED_WINDOW_SECONDS:
            self._counts.popleft()

    def offloaded_percent(self) -> int | None:
        """Return the share of offloaded requests; None without any."""
        return status.offloaded_percent(self._counts[0][1], self._counts[-1][1]) if self._counts else None

    def offloads_since(self, at_seconds: float) -> int | None:
        """Return how many prompts were offloaded after the last count before `at_seconds`; None without two counts."""
        if len(self._counts) < 2:
            return None
        earlier = [counters for at, counters in self._counts if at <= at_seconds]
        first = earlier[-1] if earlier else self._counts[0][1]
        return self._counts[-1][1].offloaded - first.offloaded


class Known(NamedTuple):
    """What the controller knows, and the policy's part that it was learned under."""

    config: Config
    state: State


class Loop:
    """The short timescale of one policy.

    Args:
        gateway: of this pod.
        http: client session for Prometheus.
        metrics: our own.
        clock: monotonic seconds.

    """

    def __init__(
        self,
        gateway: Gateway,
        http: aiohttp.ClientSession,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._gateway = gateway
        self._http = http
        self._metrics = metrics
        self._clock = clock
        self._trouble = Trouble()
        self._history = CounterHistory()
        self._known: Known | None = None
        self.report: status.Report | None = None
        """What the policy's status should say; None before the first step."""

    async def run(self) -> None:
        """Step until cancelled."""
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
            self._trouble.failed("the gateway's control socket", error)
            return RETRY_SECONDS
        self._trouble.worked("the gateway's control socket")
        return interval_seconds

    async def _round(self) -> float:
        table = permitted(await self._gateway.table())
        self._history.add(self._clock(), await self._gateway.counters())
        measured = await self._measure(table)
        step = self._step(table, measured)
        await self._gateway.put_threshold(update_of(table, step))
        self._metrics.show(step)
        self.report = status.report(table, step, measured.errors, self._history.offloaded_percent(), self.report)
        return float(table.short_interval_seconds)

    async def _measure(self, table: RoutingTable) -> Measured:
        if not table.prometheus_url:
            return NOTHING
        # No longer than an interval: a table that says a cluster is gone must not wait for a slow Prometheus.
        timeout_seconds = min(float(table.short_interval_seconds), MAX_QUERY_SECONDS)
        prometheus = Prometheus(self._http, table.prometheus_url, timeout_seconds)
        measured = await measure(prometheus, table, config_of(table).window_seconds)
        self._complain(measured.errors)
        return measured

    def _complain(self, errors: tuple[PrfaasError, ...]) -> None:
        self._metrics.query_errors.inc(len(errors))
        if errors:
            self._trouble.failed("measuring", errors[0])
        else:
            self._trouble.worked("measuring")

    def _step(self, table: RoutingTable, measured: Measured) -> Step:
        config = config_of(table)
        known = self._known
        if known is None or known.config.threshold != config.threshold:  # a changed policy starts from its own tokens
            known = Known(config, controller.initial_state(config))
        now_seconds = self._clock()
        facts = Facts(
            now_seconds=now_seconds,
            links=links_of(table, measured),
            hub_measured=measured.hub_measured,
            recent_offloads=self._history.offloads_since(now_seconds - config.window_seconds),
        )
        step = controller.step(config, known.state, facts)
        if self.report is None or self.report.figures["thresholdTokens"] != step.tokens:
            log.info("threshold %d tokens, bandwidth %s: %s", step.tokens, step.bandwidth, step.reason)
        self._known = Known(config, step.state)
        return step


def permitted(table: RoutingTable) -> RoutingTable:
    """Return the table without clusters whose datacenter is forbidden: a link that is never used must not move t."""
    clusters = tuple(one for one in table.clusters if one.datacenter not in table.forbid_datacenters)
    return msgspec.structs.replace(table, clusters=clusters)


def config_of(table: RoutingTable) -> Config:
    """Return the controller's part of a table."""
    return Config(threshold=table.threshold, watermarks=table.watermarks, stale_after_seconds=table.stale_after_seconds)


def links_of(table: RoutingTable, measured: Measured) -> tuple[LinkFacts, ...]:
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


def update_of(table: RoutingTable, step: Step) -> ThresholdUpdate:
    """Return what the gateway shall do until it hears again, or has heard nothing for as long as metrics may be old."""
    return ThresholdUpdate(
        tokens=step.tokens,
        bandwidth=step.bandwidth,
        offload_clusters=step.offload_clusters,
        expires_seconds=max(table.stale_after_seconds, 3 * table.short_interval_seconds),
        reason=step.reason,
    )
