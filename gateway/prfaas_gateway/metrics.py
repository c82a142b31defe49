"""What the gateway counts, as Prometheus metrics and as the counters that the scheduler reads.

Outcomes: ok; fallback (the offload failed, prefilled in the hub); resumed (its stream broke, and another worker went on
with it to the end); invalid (a 4xx); rejected (no instance, all of them full, a limit of the client's key, a policy
that rejects failed offloads, or one whose SLO cannot be kept); failed (a 5xx, a timeout, a deadline, or a stream broken
off); aborted (the client left). Decision `none`: ended before one was taken.
"""

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

Outcome = Literal["ok", "fallback", "resumed", "invalid", "rejected", "failed", "aborted"]

SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
TOKEN_BUCKETS = tuple(2**power for power in range(4, 21))


class Metrics:
    """One gateway's metrics in a registry of their own, so that tests run several gateways in a process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "prfaas_gateway_requests", "Finished requests", ["decision", "outcome"], registry=registry
        )
        self.time_to_first_token = Histogram(
            "prfaas_gateway_time_to_first_token_seconds",
            "From the request's last byte to the worker's response headers, which carry the first token",
            ["decision"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Histogram(
            "prfaas_gateway_prompt_tokens",
            "Prompt length as workers report it",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.threshold_tokens = Gauge(
            "prfaas_gateway_threshold_tokens",
            "The threshold in force, in tokens of incremental length",
            registry=registry,
        )
        self.resumes = Counter(
            "prfaas_gateway_resumes", "Times that another worker went on with a broken stream", registry=registry
        )
        self.resumed_tokens = Counter(
            "prfaas_gateway_resumed_tokens", "Tokens of broken streams, computed again to go on", registry=registry
        )
        self.retries_refused = Counter(
            "prfaas_gateway_retries_refused", "Legs not started because the retry budget was used up", registry=registry
        )
        self.slo_refusals = Counter(
            "prfaas_gateway_slo_refusals",
            "Requests not taken because more waited before them than slo.ttftMillis allows",
            registry=registry,
        )
        self.in_flight = Gauge("prfaas_gateway_in_flight", "Requests being served", registry=registry)

    def show(self, threshold_tokens: Callable[[], float], in_flight: Callable[[], float]) -> None:
        """Take both gauges from these functions whenever somebody looks."""
        self.threshold_tokens.set_function(threshold_tokens)
        self.in_flight.set_function(in_flight)
