"""The scheduler's own metrics. Their label is `member_cluster`, because every target has a label `cluster` already."""

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from prfaas.routing.controller import Step

STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class SchedulerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.threshold_tokens = self._gauge("prfaas_scheduler_threshold_tokens", "Threshold pushed to the gateway")
        self.bandwidth_scarce = self._gauge(
            "prfaas_scheduler_bandwidth_scarce", "1 while bandwidth is Scarce, 0 while Abundant"
        )
        self.metrics_stale = self._gauge(
            "prfaas_scheduler_metrics_stale", "1 while no fresh measurement moves the threshold"
        )
        self.utilisation_percent = self._link_gauge(
            "prfaas_scheduler_link_utilisation_percent", "Utilisation of a live link, of its effective capacity"
        )
        self.effective_mbps = self._link_gauge(
            "prfaas_scheduler_link_effective_mbps", "What a link can carry now, as far as was seen, in Mbit/s"
        )
        self.alive = self._link_gauge("prfaas_scheduler_link_alive", "1 while prompts may be offloaded over a link")
        self.step_seconds = Histogram(
            "prfaas_scheduler_step_seconds",
            "One step: read, measure, decide, push",
            buckets=STEP_BUCKETS,
            registry=self.registry,
        )
        self.query_errors = Counter(
            "prfaas_scheduler_query_errors_total", "Queries to Prometheus that failed", registry=self.registry
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _link_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["member_cluster"], registry=self.registry)

    def show(self, step: Step) -> None:
        """Set the metrics to a step's figures; links that are gone disappear."""
        self.threshold_tokens.set(step.tokens)
        self.bandwidth_scarce.set(step.bandwidth == "Scarce")
        self.metrics_stale.set(step.metrics == "Stale")
        for gauge in (self.utilisation_percent, self.effective_mbps, self.alive):
            gauge.clear()
        for link in step.links:
            self.alive.labels(link.cluster).set(link.state == "Alive")
            self.effective_mbps.labels(link.cluster).set(link.effective_mbps)
            if link.state == "Alive" and link.utilisation_percent is not None and step.metrics != "Stale":
                self.utilisation_percent.labels(link.cluster).set(link.utilisation_percent)

    def application(self) -> web.Application:
        async def expose(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

        application = web.Application()
        application.router.add_get("/metrics", expose)
        return application
