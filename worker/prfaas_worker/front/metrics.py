"""GET /metrics: what this worker does, in the Prometheus text format, under our names and under vLLM's.

vLLM's names, with its labels and buckets, let its dashboards and other routers read our workers. Figures of the engine
come from its `Stats` at each scrape, latencies from `latencies.py`. No cluster or pool labels: Prometheus adds them
from the pod.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.kvindex.blocks import BLOCK_TOKENS
from prfaas.wire.engine import Measured, Stats, ToEngine, ToFront, TransferEnded
from prfaas.wire.profile import Profile
from prfaas.wire.stats import CacheStats
from prfaas_worker.credentials import Credentials
from prfaas_worker.front.latencies import Histogram, Latencies
from prfaas_worker.front.transfers import Transfers

Described = Mapping[str, tuple[str, str]]

GAUGES: Final[Described] = {
    "prfaas_requests_running": ("requests_running", "Requests that hold memory: fetching, prefilling or decoding."),
    "prfaas_requests_waiting": ("requests_waiting", "Requests that wait for room."),
    "prfaas_prefills_running": ("prefills_running", "Prefills for other instances, computing or being sent."),
    "prfaas_prefills_waiting": ("prefills_waiting", "Prefills for other instances that wait for room."),
    "prfaas_transfer_memory_bytes": ("memory_bytes", "Memory that transfers hold beside the cache."),
    "prfaas_transfer_memory_limit_bytes": ("memory_limit_bytes", "Most that they may hold."),
}
COUNTERS: Final[Described] = {
    "prfaas_transfer_sent_bytes": ("sent_bytes", "Bytes written to data connections."),
    "prfaas_transfer_received_bytes": ("received_bytes", "Bytes read from data connections."),
    "prfaas_prompt_tokens": ("prompt_tokens", "Prompt tokens prefilled here."),
    "prfaas_generation_tokens": ("generation_tokens", "Tokens generated here."),
    "prfaas_decode_steps": ("decode_steps", "Steps in which nothing but decodes was computed."),
    "prfaas_decode_seconds": ("decode_seconds", "What these steps took."),
    "prfaas_prefix_fetched_tokens": ("prefix_tokens", "Tokens of cached prefixes that other instances gave."),
    "prfaas_preemptions": ("preemptions", "Running requests that had to give up their memory and begin again."),
}
LINK_GAUGES: Final[Described] = {
    "prfaas_link_connections": ("connections", "Data connections to a peer cluster that transfer."),
    "prfaas_link_rtt_seconds": ("rtt_seconds", "Round trip, as a mean over connections: twice the least is a queue."),
    "prfaas_link_min_rtt_seconds": ("min_rtt_seconds", "The least round trip of the last minutes: the empty link's."),
    "prfaas_link_delivery_rate_bytes_per_second": (
        "delivery_rate_bytes_per_second",
        "Rate of delivery as the kernel estimates it, summed over connections.",
    ),
    "prfaas_link_unsent_bytes": ("unsent_bytes", "Bytes that wait to be sent."),
}
LINK_COUNTERS: Final[Described] = {
    "prfaas_link_sent_bytes": ("sent_bytes", "Bytes that the peer acknowledged, TLS included."),
    "prfaas_link_received_bytes": ("received_bytes", "Bytes that came from the peer, TLS included."),
    "prfaas_link_retransmits": ("retransmits", "Segments sent again: a sign of congestion under CUBIC, not under BBR."),
    "prfaas_link_busy_seconds": ("busy_seconds", "Time with data under way, summed over connections."),
    "prfaas_link_rwnd_limited_seconds": ("rwnd_limited_seconds", "Of this, held up by the peer's receive window."),
    "prfaas_link_sndbuf_limited_seconds": ("sndbuf_limited_seconds", "Of this, held up by our own send buffer."),
    "prfaas_link_backlogged_bytes": ("backlogged_bytes", "Bytes delivered while data waited to be sent."),
    "prfaas_link_backlogged_seconds": ("backlogged_seconds", "Time during which data waited to be sent."),
}
CACHE_GAUGES: Final[Described] = {
    "prfaas_cache_page_bytes": ("page_bytes", "Size of a page of the cache."),
    "prfaas_cache_pages": ("total_pages", "Pages of the cache on the device."),
    "prfaas_cache_used_pages": ("used_pages", "Pages that requests hold."),
    "prfaas_cache_cached_pages": ("cached_pages", "Pages that only the prefix cache holds, and gives up when asked."),
    "prfaas_cache_disk_paused": ("disk_paused", "1 while the disk tier takes no entries, as it could not be written."),
}
CACHE_COUNTERS: Final[Described] = {
    "prfaas_prefix_cache_query_tokens": ("query_tokens", "Prompt tokens looked up in the prefix cache."),
    "prfaas_prefix_cache_hit_tokens": ("hit_tokens", "Of these, found with a state at their end."),
    "prfaas_prefix_cache_stateless_tokens": (
        "stateless_tokens",
        "Of these, further ones that had attention rows but no state there: computed again.",
    ),
    "prfaas_prefix_cache_evicted_pages": ("evicted_pages", "Pages of cached prefixes given up for others."),
    "prfaas_prefix_cache_corrupt_entries": ("corrupt_entries", "Entries dropped because their digest was wrong."),
    "prfaas_prefix_cache_disk_failures": ("disk_failures", "Entries that the disk tier could not write or read."),
}
TIERS: Final = ("host", "disk")
VLLM_GAUGES: Final[Described] = {
    "vllm:num_requests_running": ("requests_running", "Requests in model execution batches."),
    "vllm:num_requests_waiting": ("requests_waiting", "Requests waiting to be processed."),
}
VLLM_COUNTERS: Final[Described] = {
    "vllm:generation_tokens": ("generation_tokens", "Generation tokens processed."),
    "vllm:num_preemptions": ("preemptions", "Preemptions of running requests."),
}
PROFILE_TOKENS: Final = (256, 1024, 4096, 16384, 65536)
"""Lengths at which the profile's curves are shown."""


class _Labelled:
    """Makes metric families of plain values, all with the same labels."""

    def __init__(self, **labels: str):
        self._names = list(labels)
        self._values = list(labels.values())

    def gauge(self, name: str, text: str, value: float, **more: str) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._names, *more])
        family.add_metric([*self._values, *more.values()], value)
        return family

    def counter(self, name: str, text: str, values: Mapping[str, float] | float, label: str = "") -> Metric:
        """One value, or one for each value of a further label."""
        family = CounterMetricFamily(name, text, labels=[*self._names, *([label] if label else [])])
        for extra, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            family.add_metric([*self._values, *([extra] if label else [])], value)
        return family

    def histogram(self, name: str, text: str, parts: Mapping[str, Histogram] | Histogram, label: str = "") -> Metric:
        """Likewise, of histograms."""
        family = HistogramMetricFamily(name, text, labels=[*self._names, *([label] if label else [])])
        for extra, part in parts.items() if isinstance(parts, Mapping) else [("", parts)]:
            family.add_metric([*self._values, *([extra] if label else [])], _cumulated(part), part.total)
        return family

    def fields(self, source: object, gauges: Described, counters: Described) -> Iterator[Metric]:
        """Families of a struct's fields."""
        for name, (field, text) in gauges.items():
            yield self.gauge(name, text, getattr(source, field))
        for name, (field, text) in counters.items():
            yield self.counter(name, text, getattr(source, field))


def _cumulated(histogram: Histogram) -> list[tuple[str, float]]:
    buckets, count = [], 0
    for bound, more in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        count += more
        buckets.append((floatToGoString(bound), count))
    return buckets


class Metrics(Collector):
    """Everything this worker measures. Listens to the engine."""

    def __init__(self, model_name: str, max_running: int = 0):
        self._max_running = max_running
        self.latencies = Latencies()
        self.transfers = Transfers()
        self.profile: Profile | None = None
        """What prefills cost here, as the engine said last."""
        self.credentials: Credentials | None = None
        """Whose end is told, where there are any."""
        self._stats: Stats | None = None
        self._ours = _Labelled()
        self._vllms = _Labelled(model_name=model_name, engine="0")
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def sent(self, message: ToEngine) -> None:
        """Take note of what goes to the engine."""
        self.latencies.sent(message)

    def heard(self, message: ToFront) -> None:
        """Take note of what the engine says."""
        if isinstance(message, Measured):
            self.profile = message.profile
        elif isinstance(message, TransferEnded):
            self.transfers.ended(message)
        else:
            self.latencies.heard(message)

    def first_token(self, seconds: float) -> None:
        """Note one request's time to first token, from its arrival here."""
        self.latencies.first_token.observe(seconds)

    def render(self, stats: Stats | None) -> bytes:
        """Return the text format; without stats, before the engine is ready, only the front's own metrics."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield every family, for `generate_latest`."""
        yield from self._of_requests()
        yield from self._of_transfers()
        if self.credentials is not None:
            yield self._ours.gauge(
                "prfaas_certificate_expires_timestamp_seconds",
                "When the certificate that new connections show ends, in Unix time.",
                self.credentials.expires_unix_seconds,
            )
        if self._stats is not None:
            yield from self._of_engine(self._stats)
            yield from self._of_links(self._stats)
            yield from self._of_cache(self._stats.cache)
            yield from self._as_vllm(self._stats)
        if self.profile is not None:
            yield from self._of_profile(self.profile)

    def _of_requests(self) -> Iterator[Metric]:
        ours, took = self._ours, self.latencies
        yield ours.histogram(
            "prfaas_time_to_first_token_seconds", "From the request's arrival to its first token.", took.first_token
        )
        yield ours.histogram(
            "prfaas_time_to_first_token_part_seconds",
            "What the time to the first token consists of: waiting, computing where the prompt was prefilled, and "
            "receiving its cache, which overlaps with computing.",
            {"queue": took.queue, "prefill": took.prefill, "transfer": took.transfer},
            "part",
        )

    def _of_transfers(self) -> Iterator[Metric]:
        ours, told = self._ours, self.transfers
        text = "From the first cache byte of a delivered transfer to its end."
        yield ours.histogram("prfaas_transfer_seconds", text, told.seconds, "direction")
        text = "Payload of delivered transfers as it travelled."
        yield ours.histogram("prfaas_transfer_bytes", text, told.payload_bytes, "direction")
        text = "Connections that broke during transfers; another took over while patience lasted."
        yield ours.counter("prfaas_transfer_breaks", text, told.breaks, "direction")

    def _of_engine(self, stats: Stats) -> Iterator[Metric]:
        yield from self._ours.fields(stats, GAUGES, COUNTERS)
        text = "Most requests that may hold memory together."
        yield self._ours.gauge("prfaas_requests_running_limit", text, self._max_running)
        transfers = CounterMetricFamily(
            "prfaas_transfers", "Cache transfers that ended.", labels=["direction", "outcome"]
        )
        for direction, outcome, count in stats.transfers:
            transfers.add_metric([direction, outcome], count)
        yield transfers
        yield self._ours.counter(
            "prfaas_prefix_fetches",
            "Prefixes wanted of other instances: fetched, absent, failed, cancelled, or joined to a fetch.",
            dict(stats.prefixes),
            "outcome",
        )
        yield self._ours.gauge("prfaas_role", "The role by which the engine divides its steps.", 1, role=stats.role)

    def _of_links(self, stats: Stats) -> Iterator[Metric]:
        """By peer cluster alone: a label for each connection would be one for each transfer."""
        for kind, described in ((GaugeMetricFamily, LINK_GAUGES), (CounterMetricFamily, LINK_COUNTERS)):
            for name, (field, text) in described.items():
                family = kind(name, text, labels=["peer"])
                for link in stats.links:
                    if (value := getattr(link, field)) is not None:
                        family.add_metric([link.peer], value)
                yield family
        yield self._ours.gauge(
            "prfaas_transfer_unsent_bytes",
            "Cache bytes that wait to be sent over data connections.",
            sum(link.unsent_bytes for link in stats.links),
        )
        yield self._ours.gauge("prfaas_egress_cap_mbps", "Most that is sent, 0 without a cap.", stats.egress_mbps or 0)

    def _of_cache(self, cache: CacheStats) -> Iterator[Metric]:
        ours = self._ours
        yield from ours.fields(cache, CACHE_GAUGES, CACHE_COUNTERS)
        size = GaugeMetricFamily("prfaas_cache_tier_bytes", "Bytes of cached prefixes off the device.", labels=["tier"])
        for tier in TIERS:
            size.add_metric([tier], getattr(cache, f"{tier}_bytes"))
        yield size
        hits = {tier: getattr(cache, f"{tier}_hit_tokens") for tier in TIERS}
        yield ours.counter("prfaas_prefix_cache_tier_hit_tokens", "Hit tokens that came from a tier.", hits, "tier")

    def _as_vllm(self, stats: Stats) -> Iterator[Metric]:
        vllms, took, cache = self._vllms, self.latencies, stats.cache
        yield from vllms.fields(stats, VLLM_GAUGES, VLLM_COUNTERS)
        used = cache.used_pages / cache.total_pages if cache.total_pages else 0.0
        yield vllms.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", used)
        yield vllms.counter("vllm:prompt_tokens", "Prefill tokens processed.", took.prompt_tokens)
        yield vllms.counter("vllm:prefix_cache_queries", "Queried tokens of the prefix cache.", cache.query_tokens)
        yield vllms.counter("vllm:prefix_cache_hits", "Cached tokens of the prefix cache.", cache.hit_tokens)
        ended = {reason: took.finished[reason] for reason in ("stop", "length", "abort", "error")}
        yield vllms.counter("vllm:request_success", "Finished requests.", ended, "finished_reason")
        for name, histogram in {
            "time_to_first_token": took.first_token,
            "inter_token_latency": took.between_tokens,
            "e2e_request_latency": took.request,
            "request_queue_time": took.queue,
            "request_prefill_time": took.prefill,
        }.items():
            yield vllms.histogram(f"vllm:{name}_seconds", f"Histogram of {name.replace('_', ' ')}.", histogram)
        sizes = {"block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(cache.total_pages)}
        yield vllms.gauge("vllm:cache_config_info", "Sizes of the cache.", 1, **sizes)

    def _of_profile(self, profile: Profile) -> Iterator[Metric]:
        shown = {str(tokens): tokens for tokens in PROFILE_TOKENS}
        seconds = GaugeMetricFamily(
            "prfaas_profile_prefill_seconds", "Time to prefill a prompt of so many tokens.", labels=["tokens"]
        )
        size = GaugeMetricFamily(
            "prfaas_profile_cache_bytes", "Cache of a prompt of so many tokens.", labels=["tokens"]
        )
        for text, tokens in shown.items():
            seconds.add_metric([text], prefill_seconds(profile, tokens))
            size.add_metric([text], cache_bytes(profile, tokens))
        yield seconds
        yield size
        yield self._ours.gauge("prfaas_profile_samples", "Prefills that the profile stands on.", profile.samples)
