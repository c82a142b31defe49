"""GET /metrics: the engine's figures and the front's time to first token, in the Prometheus text format.

No cluster or pool labels: Prometheus adds them from the pod.
"""

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas.wire.engine import Stats

GAUGES: Final = {
    "prfaas_requests_running": ("requests_running", "Requests that hold memory: fetching, prefilling or decoding."),
    "prfaas_requests_waiting": ("requests_waiting", "Requests that wait for room."),
    "prfaas_prefills_running": ("prefills_running", "Prefills for other instances, computing or being sent."),
    "prfaas_prefills_waiting": ("prefills_waiting", "Prefills for other instances that wait for room."),
    "prfaas_transfer_unsent_bytes": ("unsent_bytes", "Cache bytes that wait to be sent over data connections."),
}
COUNTERS: Final = {
    "prfaas_transfer_sent_bytes": ("sent_bytes", "Bytes written to data connections."),
    "prfaas_transfer_received_bytes": ("received_bytes", "Bytes read from data connections."),
    "prfaas_transfer_backlogged_bytes": ("backlogged_bytes", "Bytes delivered while data waited to be sent."),
    "prfaas_transfer_backlogged_seconds": ("backlogged_seconds", "Time during which data waited to be sent."),
    "prfaas_prompt_tokens": ("prompt_tokens", "Prompt tokens prefilled here."),
    "prfaas_generation_tokens": ("generation_tokens", "Tokens generated here."),
}
TTFT_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)


class _EngineCollector(Collector):
    """Presents one `Stats` as metric families."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

    def collect(self) -> Iterable[Metric]:
        if self.stats is None:
            return
        for name, (field, text) in GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(self.stats, field))
        for name, (field, text) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(self.stats, field))
        transfers = CounterMetricFamily(
            "prfaas_transfers", "Cache transfers that ended.", labels=["direction", "outcome"]
        )
        for direction, outcome, count in self.stats.transfers:
            transfers.add_metric([direction, outcome], count)
        yield transfers


class Metrics:
    """Everything this worker measures."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._first_token = Histogram(
            "prfaas_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=TTFT_BUCKETS,
            registry=self._registry,
        )

    def first_token(self, seconds: float) -> None:
        """Note one request's time to first token."""
        self._first_token.observe(seconds)

    def render(self, stats: Stats | None) -> bytes:
        """Return the text format; without stats, before the engine is ready, only the front's own metrics."""
        self._engine.stats = stats
        return generate_latest(self._registry)
