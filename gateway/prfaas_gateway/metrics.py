"""The gateway's Prometheus metrics.

Outcomes: ok. fallback: the offload failed, prefilled in the hub. resumed: the stream broke, and another worker finished
it. invalid: a 4xx. rejected: no instance, all of them full, a limit of the client's key, a policy that rejects failed
offloads, or an SLO that cannot be met. failed: a 5xx, a timeout, a deadline, or a broken stream. aborted: the client
left. Decision `none`: the request ended before a decision.
"""

from functools import partial
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

RequestOutcome = Literal["ok", "fallback", "resumed", "invalid", "rejected", "failed", "aborted"]

SECONDS_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
TOKEN_BUCKETS: Final = tuple(2**power for power in range(4, 21))


class GatewayMetrics:
    """One gateway's metrics in a registry of their own, so that tests can run several gateways in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.kv = PrefixIndexMetrics(self.registry)
        ProcessCollector(registry=self.registry)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("prfaas_gateway_requests", "Finished requests", ["decision", "outcome"])
        self.time_to_first_token = histogram(
            "prfaas_gateway_time_to_first_token_seconds",
            "From the request's last byte to the worker's response headers, which carry the first token",
            ["decision"],
            buckets=SECONDS_BUCKETS,
        )
        self.prompt_tokens = histogram(
            "prfaas_gateway_prompt_tokens", "Prompt length as workers report it", buckets=TOKEN_BUCKETS
        )
        self.threshold_tokens = gauge(
            "prfaas_gateway_threshold_tokens", "The threshold in force, in tokens of incremental length"
        )
        self.resumes = counter("prfaas_gateway_resumes", "Broken streams that another worker resumed")
        self.resumed_tokens = counter(
            "prfaas_gateway_resumed_tokens", "Tokens of broken streams that another worker computed again"
        )
        self.retries_refused = counter(
            "prfaas_gateway_retries_refused", "Legs not started because the retry budget was empty"
        )
        self.slo_refusals = counter(
            "prfaas_gateway_slo_refusals", "Requests rejected because the prefill queue exceeded slo.ttftMillis"
        )
        self.in_flight = gauge("prfaas_gateway_in_flight", "Requests being served")


class PrefixIndexMetrics:
    """Metrics of the prefix index and its event streams. No label names an instance: there may be many."""

    def __init__(self, registry: CollectorRegistry):
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.batches = counter("prfaas_gateway_kv_batches", "Batches of cache events applied")
        self.snapshots = counter("prfaas_gateway_kv_snapshots", "Snapshots of instances' caches")
        self.gaps = counter("prfaas_gateway_kv_gaps", "Gaps in event streams; each was followed by a resync")
        self.matched_tokens = counter(
            "prfaas_gateway_kv_matched_tokens", "Estimated prompt tokens in the prefix cache of the prefill instance"
        )
        self.tokenized = counter(
            "prfaas_gateway_kv_tokenized",
            "Long texts to match by token ids: kept ones, asked of an engine, those of a beginning, late, or none",
            ["answer"],
        )
        self.prefixes = counter("prfaas_gateway_kv_prefixes", "Requests with another instance as source of a prefix")
        self.blocks = gauge("prfaas_gateway_kv_blocks", "Token blocks in the prefix index")
        self.byte_blocks = gauge("prfaas_gateway_kv_byte_blocks", "Byte blocks that are mapped to token blocks")
        self.refused_blocks = gauge(
            "prfaas_gateway_kv_refused_blocks",
            "Blocks left out: beyond an instance's share, or with unknown blocks before them",
        )
        self.instances = gauge(
            "prfaas_gateway_kv_instances",
            "Instances by their event streams: followed, silent (they publish nothing), lost (unreachable)",
            ["state"],
        )
