"""The metrics of transfers and links, for whoever serves them: our worker's front, or a mover.

A histogram is a list and a bisection, and becomes text only at a scrape. There are no cluster or pool labels:
Prometheus adds them from the pod.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partialmethod
from typing import Any, Final, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from prfaas.wire.engine import Direction, Stats, TransferEnded

Described = Mapping[str, tuple[str, str]]

TRANSFER_GAUGES: Final[Described] = {
    "prfaas_transfer_memory_bytes": ("memory_bytes", "Memory that transfers hold beside the cache."),
    "prfaas_transfer_memory_limit_bytes": ("memory_limit_bytes", "Limit of prfaas_transfer_memory_bytes."),
}
TRANSFER_COUNTERS: Final[Described] = {
    "prfaas_transfer_sent_bytes": ("sent_bytes", "Bytes written to data connections."),
    "prfaas_transfer_received_bytes": ("received_bytes", "Bytes read from data connections."),
}
LINK_GAUGES: Final[Described] = {
    "prfaas_link_connections": ("connections", "Data connections to a peer cluster that transfer now."),
    "prfaas_link_rtt_seconds": ("rtt_seconds", "Mean round-trip time; twice the minimum means a queue."),
    "prfaas_link_min_rtt_seconds": ("min_rtt_seconds", "Minimum round-trip time of the last minutes."),
    "prfaas_link_delivery_rate_bytes_per_second": (
        "delivery_rate_bytes_per_second",
        "Delivery rate by the kernel's estimate, summed over connections.",
    ),
    "prfaas_link_unsent_bytes": ("unsent_bytes", "Bytes that wait to be sent."),
}
LINK_COUNTERS: Final[Described] = {
    "prfaas_link_sent_bytes": ("sent_bytes", "Bytes acknowledged by the peer, TLS included."),
    "prfaas_link_received_bytes": ("received_bytes", "Bytes received from the peer, TLS included."),
    "prfaas_link_retransmits": ("retransmits", "Segments sent again. They mean congestion under CUBIC, not under BBR."),
    "prfaas_link_busy_seconds": ("busy_seconds", "Seconds with data in flight, summed over connections."),
    "prfaas_link_rwnd_limited_seconds": ("rwnd_limited_seconds", "Busy seconds limited by the peer's receive window."),
    "prfaas_link_sndbuf_limited_seconds": ("sndbuf_limited_seconds", "Busy seconds limited by our own send buffer."),
    "prfaas_link_backlogged_bytes": ("backlogged_bytes", "Bytes delivered while data waited to be sent."),
    "prfaas_link_backlogged_seconds": ("backlogged_seconds", "Seconds in which data waited to be sent."),
}
PROFILE_TOKENS: Final = (256, 1024, 4096, 16384, 65536)
"""Lengths at which curves are exported."""
MAX_MISMATCH: Final = 600
"""Characters of a reason that becomes a label."""
MISMATCH_SECONDS: Final = 60.0
SIZE_BUCKETS: Final = tuple(1 << power for power in range(16, 38, 2))  # 64 KiB to 64 GiB.
# vLLM's buckets of request times behind three shorter ones, so that one dashboard shows both.
REQUEST_BUCKETS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts of values by upper bound; the last one counts larger values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Labelled:
    """Makes metrics with fixed labels."""

    def __init__(self, **labels: str):
        self.labels = labels

    def metric(self, kind: Callable[..., Any], name: str, text: str, values: Any, label: str = "") -> Metric:
        """Make a metric of one value, or with `label` of a mapping from that label to values."""
        more = [label] if label else []
        family = kind(name, text, labels=[*self.labels, *more])
        for own, value in values.items() if label else [("", values)]:
            figures = (_cumulated(value), value.total) if isinstance(value, Histogram) else (value,)
            family.add_metric([*self.labels.values(), *([own] if label else [])], *figures)
        return family

    gauge = partialmethod(metric, GaugeMetricFamily)
    counter = partialmethod(metric, CounterMetricFamily)
    histogram = partialmethod(metric, HistogramMetricFamily)

    def fields(self, source: object, gauges: Described, counters: Described) -> Iterator[Metric]:
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


class TransferMetrics:
    """Transfers by direction. The histograms hold only delivered ones: a partial one is no measure of a link."""

    def __init__(self) -> None:
        directions: tuple[Direction, ...] = get_args(Direction)
        self.seconds = {direction: Histogram(REQUEST_BUCKETS) for direction in directions}
        self.payload_bytes = {direction: Histogram(SIZE_BUCKETS) for direction in directions}
        self.breaks: Counter[str] = Counter(dict.fromkeys(directions, 0))
        self._mismatch = "", 0.0  # The latest one's reason, and unix seconds.

    def record_end(self, transfer: TransferEnded) -> None:
        self.breaks[transfer.direction] += transfer.breaks
        if transfer.outcome == "delivered":
            self.seconds[transfer.direction].observe(transfer.flow_seconds)
            self.payload_bytes[transfer.direction].observe(transfer.payload_bytes)
        elif transfer.outcome == "mismatched":
            self._record_mismatch(transfer.reason[:MAX_MISMATCH], time.time())

    def _record_mismatch(self, reason: str, now_seconds: float) -> None:
        """Peers may choose reasons, and each is a series: another one counts only after a while."""
        before, at_seconds = self._mismatch
        if reason == before or now_seconds - at_seconds >= MISMATCH_SECONDS:
            self._mismatch = reason, now_seconds

    def collect(self, ours: Labelled) -> Iterator[Metric]:
        text = "From the first cache byte of a delivered transfer to its end."
        yield ours.histogram("prfaas_transfer_seconds", text, self.seconds, "direction")
        text = "Payload bytes of delivered transfers as sent, after compression."
        yield ours.histogram("prfaas_transfer_bytes", text, self.payload_bytes, "direction")
        text = "Connections that broke during transfers. A new connection continues the transfer until a deadline."
        yield ours.counter("prfaas_transfer_breaks", text, self.breaks, "direction")
        text = "Unix time of the latest transfer whose source does not fit this instance, and why."
        latest = dict([self._mismatch] if self._mismatch[0] else [])
        yield ours.gauge("prfaas_transfer_mismatch_timestamp_seconds", text, latest, "reason")


def cache_sizes(ours: Labelled, sizes: Mapping[int, int]) -> Metric:
    """Return the bytes of the caches of prompts of these lengths."""
    by_tokens = {str(tokens): size for tokens, size in sizes.items()}
    return ours.gauge("prfaas_profile_cache_bytes", "Cache of a prompt of so many tokens.", by_tokens, "tokens")


def transfer_totals(ours: Labelled, stats: Stats) -> Iterator[Metric]:
    """Yield what transfers use and have done, and the links by peer cluster: a label for each connection would be one
    for each transfer."""
    yield from ours.fields(stats, TRANSFER_GAUGES, TRANSFER_COUNTERS)
    transfers = CounterMetricFamily(
        "prfaas_transfers", "Cache transfers that ended.", labels=[*ours.labels, "direction", "outcome"]
    )
    for direction, outcome, count in stats.transfers:
        transfers.add_metric([*ours.labels.values(), direction, outcome], count)
    yield transfers
    for make, described in ((ours.gauge, LINK_GAUGES), (ours.counter, LINK_COUNTERS)):
        for name, (field, text) in described.items():
            by_peer = {link.peer: getattr(link, field) for link in stats.links}
            known = {peer: value for peer, value in by_peer.items() if value is not None}
            yield make(name, text, known, "peer")
    yield ours.gauge(
        "prfaas_transfer_unsent_bytes",
        "Cache bytes that wait to be sent over data connections.",
        sum(link.unsent_bytes for link in stats.links),
    )
    yield ours.gauge(
        "prfaas_egress_cap_mbps", "Cap of the sending rate in Mbit/s, 0 without one.", stats.egress_mbps or 0
    )
