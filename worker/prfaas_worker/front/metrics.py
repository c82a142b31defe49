"""Serves GET /metrics: this worker's figures in the Prometheus text format.

Figures of the engine are from its `Stats` at each scrape. Latencies are from the messages between front and engine,
which run for every token of every stream. A histogram is therefore a list and a bisection, and becomes text only at a
scrape. There are no cluster or pool labels: Prometheus adds them from the pod.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.measure.emulated import why_engine_too_slow
from prfaas.wire.engine import (
    ALL_CHOICES,
    Cancel,
    Failed,
    Generate,
    Measured,
    Started,
    Stats,
    ToEngine,
    ToFront,
    Tokens,
    TransferEnded,
)
from prfaas.wire.profile import Profile
from prfaas.wire.stats import LATE_BOUNDS, EmulationStats
from prfaas_transfer.credentials import PeerCredentials
from prfaas_transfer.metrics import (
    PROFILE_TOKENS,
    REQUEST_BUCKETS,
    Described,
    Histogram,
    Labelled,
    TransferMetrics,
    cache_sizes,
    transfer_totals,
)

GAUGES: Final[Described] = {
    "prfaas_requests_running": (
        "requests_running",
        "Requests with memory: they fetch, wait for a slot, prefill or decode.",
    ),
    "prfaas_requests_waiting": ("requests_waiting", "Requests without memory: they wait for room or for a source."),
    "prfaas_prefills_running": ("prefills_running", "Prefills for other instances, begun or being sent."),
    "prfaas_prefills_waiting": ("prefills_waiting", "Prefills for other instances of which nothing is computed yet."),
}
COUNTERS: Final[Described] = {
    "prfaas_prompt_tokens": ("prompt_tokens", "Prompt tokens prefilled here."),
    "prfaas_generation_tokens": ("generation_tokens", "Tokens generated here."),
    "prfaas_decode_steps": ("decode_steps", "Steps that computed only decodes."),
    "prfaas_decode_seconds": ("decode_seconds", "Seconds of the steps that computed only decodes."),
    "prfaas_prefix_fetched_tokens": ("prefix_tokens", "Tokens of cached prefixes fetched from other instances."),
    "prfaas_preemptions": ("preemptions", "Running requests that lost their memory to others and began again."),
}
CACHE_GAUGES: Final[Described] = {
    "prfaas_cache_page_bytes": ("page_bytes", "Size of a page of the cache."),
    "prfaas_cache_pages": ("total_pages", "Pages of the cache."),
    "prfaas_cache_used_pages": ("used_pages", "Pages held by requests."),
    "prfaas_cache_cached_pages": ("cached_pages", "Evictable pages (held by the prefix cache only)."),
}
CACHE_COUNTERS: Final[Described] = {
    "prfaas_prefix_cache_query_tokens": ("query_tokens", "Prompt tokens looked up in the prefix cache."),
    "prfaas_prefix_cache_hit_tokens": ("hit_tokens", "Prompt tokens found there with a state at their end."),
    "prfaas_prefix_cache_stateless_tokens": (
        "stateless_tokens",
        "Prompt tokens computed again because their attention rows had no state at their end.",
    ),
    "prfaas_prefix_cache_evicted_pages": ("evicted_pages", "Pages of cached prefixes that were evicted."),
}
EMULATION_GAUGES: Final[Described] = {
    "prfaas_emulation_cache_scale": ("cache_scale", "Divisor of the bytes of an emulated cache."),
    "prfaas_emulation_stretch": ("stretch", "Factor of an emulated engine's times."),
}
EMULATION_COUNTERS: Final[Described] = {
    "prfaas_emulation_cpu_seconds": ("cpu_seconds", "CPU time of the engine since its first step."),
    "prfaas_emulation_busy_seconds": ("busy_seconds", "Time that the machine's cores worked since then."),
    "prfaas_emulation_idle_seconds": ("idle_seconds", "Time that they did not."),
}
# vLLM's buckets, and lower ones for small models.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)


class LatencyMetrics:
    """Measures and counts requests by the messages between front and engine."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.queue = Histogram(REQUEST_BUCKETS)
        self.prefill = Histogram(REQUEST_BUCKETS)
        self.transfer = Histogram(REQUEST_BUCKETS)
        self.finished: Counter[str] = Counter()
        """Choices that ended, by reason: stop, length, abort (the client disconnected) or error."""
        self._running: dict[int, set[int]] = {}
        """The choices of each call that have not ended."""

    def on_sent(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self._running[message.handle] = set(range(message.choice, message.choice + message.choices))
            case Cancel(handle, choice):
                # A single choice is ended where the front found a stop string in its text.
                self._end(handle, *((None, "abort") if choice == ALL_CHOICES else (choice, "stop")))

    def on_received(self, message: ToFront) -> None:
        if isinstance(message, Tokens):
            if message.finish_reason is not None:
                self._end(message.handle, message.choice, message.finish_reason)
        elif isinstance(message, Started):
            self._started(message)
        elif isinstance(message, Failed):
            self._end(message.handle, None, "error")

    def _started(self, message: Started) -> None:
        if message.handle in self._running:
            self.queue.observe(message.queue_seconds)
            self.prefill.observe(message.prefill_seconds)
            self.transfer.observe(message.transfer_seconds)

    def _end(self, handle: int, choice: int | None, reason: str) -> None:
        """End one choice of a call, or all that still run."""
        running = self._running.get(handle, set())
        ended = running & (running if choice is None else {choice})
        self.finished[reason] += len(ended)
        running -= ended
        if not running:
            self._running.pop(handle, None)


class WorkerMetrics(Collector):
    """All metrics of this worker. Listens to the engine."""

    def __init__(self, max_running: int = 0, credentials: PeerCredentials | None = None):
        self._max_running = max_running
        self._credentials = credentials
        self.latencies = LatencyMetrics()
        self.transfers = TransferMetrics()
        self.profile: Profile | None = None  # The costs of prefills, by the engine's last message.
        self._stats: Stats | None = None
        self._ours = Labelled()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def on_sent(self, message: ToEngine) -> None:
        self.latencies.on_sent(message)

    def on_received(self, message: ToFront) -> None:
        if isinstance(message, Measured):
            self.profile = message.profile
        elif isinstance(message, TransferEnded):
            self.transfers.record_end(message)
        else:
            self.latencies.on_received(message)

    def first_token(self, seconds: float) -> None:
        self.latencies.first_token.observe(seconds)

    def render(self, stats: Stats | None) -> bytes:
        """Return the text format; only the front's metrics before the engine is ready (no stats)."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._of_requests()
        yield from self.transfers.collect(self._ours)
        if self._credentials is not None:
            yield self._ours.gauge(
                "prfaas_certificate_expires_timestamp_seconds",
                "Expiry of the certificate of new connections, in Unix time.",
                self._credentials.expires_unix_seconds,
            )
        if self._stats is not None:
            yield from self._of_engine(self._stats)
            yield from transfer_totals(self._ours, self._stats)
            yield from self._ours.fields(self._stats.cache, CACHE_GAUGES, CACHE_COUNTERS)
            if self._stats.emulation is not None:
                yield from self._of_emulation(self._stats.emulation)
        if self.profile is not None:
            yield from self._of_profile(self.profile)

    def _of_requests(self) -> Iterator[Metric]:
        ours, took = self._ours, self.latencies
        yield ours.histogram(
            "prfaas_time_to_first_token_seconds", "From the request's arrival to its first token.", took.first_token
        )
        yield ours.histogram(
            "prfaas_time_to_first_token_part_seconds",
            "Parts of the time to the first token: queue, prefill where the prompt was computed, and transfer of its "
            "cache. Prefill and transfer overlap.",
            {"queue": took.queue, "prefill": took.prefill, "transfer": took.transfer},
            "part",
        )
        ended = {reason: took.finished[reason] for reason in ("stop", "length", "abort", "error")}
        yield ours.counter("prfaas_answers", "Answers that ended.", ended, "reason")

    def _of_engine(self, stats: Stats) -> Iterator[Metric]:
        yield from self._ours.fields(stats, GAUGES, COUNTERS)
        text = "Sequences that decode at the same time, at most."
        yield self._ours.gauge("prfaas_requests_running_limit", text, self._max_running)
        yield self._ours.counter(
            "prfaas_prefix_fetches",
            "Prefixes asked of other instances: fetched, failed, cancelled, or joined to a running fetch.",
            dict(stats.prefixes),
            "outcome",
        )
        text = "1 for the role by which the engine divides its steps."
        yield self._ours.gauge("prfaas_role", text, {stats.role: 1}, "role")

    def _of_emulation(self, emulation: EmulationStats) -> Iterator[Metric]:
        ours, late = self._ours, dict[str, Histogram]()
        text = "1 for the profile that an emulated engine's time follows."
        yield ours.gauge("prfaas_emulated", text, {emulation.profile: 1}, "profile")
        yield from ours.fields(emulation, EMULATION_GAUGES, EMULATION_COUNTERS)
        for step, lateness in (("prefill", emulation.prefills), ("decode", emulation.decodes)):
            late[step] = Histogram(LATE_BOUNDS)
            late[step].counts, late[step].total = list(lateness.counts), lateness.total
        text = "How late emulated steps ended, as a share of their time."
        yield ours.histogram("prfaas_emulation_late_ratio", text, late, "step")
        text = "1 where the machine is too slow for this emulated engine: then its figures do not count."
        yield ours.gauge("prfaas_emulation_too_slow", text, int(bool(why_engine_too_slow(emulation))))

    def _of_profile(self, profile: Profile) -> Iterator[Metric]:
        ours = self._ours
        seconds = {str(tokens): prefill_seconds(profile, tokens) for tokens in PROFILE_TOKENS}
        text = "Time to prefill a prompt of so many tokens."
        yield ours.gauge("prfaas_profile_prefill_seconds", text, seconds, "tokens")
        yield cache_sizes(ours, {tokens: cache_bytes(profile, tokens) for tokens in PROFILE_TOKENS})
        yield ours.gauge("prfaas_profile_samples", "Prefills from which the profile was measured.", profile.samples)
