"""Metrics: the names that dashboards and the scheduler read are there with the right figures."""

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prfaas.wire.engine import Cancel, Failed, Generate, Measured, Sampling, Started, Stats, Tokens
from prfaas.wire.profile import Profile
from prfaas.wire.stats import CacheStats, LinkStats
from prfaas_worker.front.metrics import Histogram, LatencyMetrics, WorkerMetrics

CACHE = CacheStats(
    page_bytes=4096,
    total_pages=200,
    used_pages=50,
    cached_pages=30,
    query_tokens=1000,
    hit_tokens=640,
    stateless_tokens=64,
    evicted_pages=7,
)
STATS = Stats(
    handle=0,
    requests_running=3,
    requests_waiting=4,
    prefills_running=0,
    prefills_waiting=0,
    transfers=[("send", "done", 5)],
    sent_bytes=1,
    received_bytes=2,
    prompt_tokens=360,
    generation_tokens=99,
    preemptions=2,
    role="prefill",
    cache=CACHE,
    links=(
        LinkStats(peer="", unsent_bytes=2),
        LinkStats(
            peer="hub",
            connections=4,
            rtt_seconds=0.06,
            min_rtt_seconds=0.03,
            delivery_rate_bytes_per_second=25_000_000,
            unsent_bytes=3,
            sent_bytes=1000,
            retransmits=7,
            rwnd_limited_seconds=0.25,
            backlogged_bytes=800,
            backlogged_seconds=0.5,
        ),
    ),
    egress_mbps=800,
    memory_bytes=1 << 20,
    memory_limit_bytes=256 << 20,
    prefixes=(("failed", 2), ("fetched", 3)),
    prefix_tokens=1920,
)


class Scraped:
    """All samples, as Prometheus reads the text."""

    def __init__(self, metrics: WorkerMetrics, stats: Stats | None):
        families = text_string_to_metric_families(metrics.render(stats).decode())
        every = [one for family in families for one in family.samples]
        self._values = {(one.name, frozenset(one.labels.items())): one.value for one in every}
        assert len(self._values) == len(every)
        self.names = {one.name for one in every}

    def __call__(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]


def generate(handle: int, tokens: int = 10, choices: int = 1) -> Generate:
    return Generate(handle, "r", list(range(tokens)), choices, 8, Sampling(0, 1, 0, 0), -1, "")


def token(handle: int, choice: int = 0, reason=None) -> Tokens:
    return Tokens(handle, choice, [1], [], reason)


def test_reports_the_caches_figures():
    found = Scraped(WorkerMetrics(), STATS)
    assert found("prfaas_prefix_cache_stateless_tokens_total") == 64
    assert found("prfaas_prefix_cache_hit_tokens_total") == 640
    assert found("prfaas_prefix_cache_evicted_pages_total") == 7
    assert found("prfaas_cache_cached_pages") == 30
    assert found("prfaas_role", role="prefill") == 1
    assert found("prfaas_transfers_total", direction="send", outcome="done") == 5
    assert found("prfaas_prefix_fetches_total", outcome="fetched") == 3
    assert found("prfaas_prefix_fetched_tokens_total") == 1920


def test_reports_links_by_peer_cluster_and_no_unknown_delays():
    found = Scraped(WorkerMetrics(), STATS)
    assert found("prfaas_link_rtt_seconds", peer="hub") == 0.06
    assert found("prfaas_link_min_rtt_seconds", peer="hub") == 0.03
    assert found("prfaas_link_delivery_rate_bytes_per_second", peer="hub") == 25e6
    assert found("prfaas_link_connections", peer="hub") == 4
    assert found("prfaas_link_retransmits_total", peer="hub") == 7
    assert found("prfaas_link_rwnd_limited_seconds_total", peer="hub") == 0.25
    assert found("prfaas_link_backlogged_bytes_total", peer="hub") == 800
    assert found("prfaas_link_backlogged_seconds_total", peer="hub") == 0.5
    assert found("prfaas_link_sent_bytes_total", peer="") == 0
    assert found("prfaas_transfer_unsent_bytes") == 5
    with pytest.raises(KeyError):
        found("prfaas_link_rtt_seconds", peer="")


def test_reports_the_cap_and_the_memory_of_transfers():
    found = Scraped(WorkerMetrics(), STATS)
    assert found("prfaas_egress_cap_mbps") == 800
    assert (found("prfaas_transfer_memory_bytes"), found("prfaas_transfer_memory_limit_bytes")) == (1 << 20, 256 << 20)
    uncapped = Scraped(WorkerMetrics(), msgspec.structs.replace(STATS, egress_mbps=None))
    assert uncapped("prfaas_egress_cap_mbps") == 0


def test_the_profile_is_shown_at_fixed_lengths():
    metrics = WorkerMetrics()
    profile = Profile(state_bytes=1000, token_bytes=2, fixed_seconds=0.5, token_seconds=1e-3, samples=9)
    metrics.on_received(Measured(profile))
    found = Scraped(metrics, None)
    assert found("prfaas_profile_prefill_seconds", tokens="1024") == pytest.approx(1.524)
    assert found("prfaas_profile_cache_bytes", tokens="256") == 1512
    assert found("prfaas_profile_samples") == 9


def test_before_the_engine_is_ready_only_the_fronts_own_figures_are_reported():
    found = Scraped(WorkerMetrics(), None)
    assert found("prfaas_time_to_first_token_seconds_count") == 0
    assert not any("requests_running" in name or "profile" in name for name in found.names)


def test_a_request_is_timed_by_its_parts():
    metrics = WorkerMetrics()
    took = metrics.latencies
    metrics.on_sent(generate(1, tokens=10))
    metrics.on_received(Started(1, 0, 0, 0.75, 0.5, 0.1, queue_seconds=0.25))
    for reason in (None, None, "length"):
        metrics.on_received(token(1, reason=reason))
    assert (took.queue.total, took.prefill.total, took.transfer.total) == (0.25, 0.75, 0.5)
    found = Scraped(metrics, STATS)
    assert found("prfaas_time_to_first_token_part_seconds_sum", part="transfer") == 0.5
    assert found("prfaas_answers_total", reason="length") == 1
    assert found("prfaas_answers_total", reason="stop") == 0


def test_every_end_has_its_reason_and_nothing_is_remembered_of_it():
    took = LatencyMetrics()
    took.on_sent(generate(1, choices=3))
    took.on_received(token(1, 0, "stop"))
    took.on_sent(Cancel(1, 1))  # a stop string in its text
    took.on_sent(Cancel(1))  # the client of the third left
    took.on_sent(generate(2))
    took.on_received(Failed(2, 500, "x", "broken"))
    took.on_received(token(2))  # still under way
    took.on_sent(Cancel(2))
    assert dict(took.finished) == {"stop": 2, "abort": 1, "error": 1}
    assert took._running == {}


def test_a_value_counts_in_the_bucket_whose_bound_it_does_not_exceed():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 14.0)
