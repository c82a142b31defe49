"""One adapter an engine: PromQL by the name of the fact that it answers, and the counters of a link.

A fact that an engine does not publish is absent, and `lacks` says what an owner can do about it. Consumers see names
and labels only, so that nobody else knows an engine.

    every short interval, by cluster
        instances_sampled_at_seconds    when an instance was last scraped
    every short interval, by cluster and pool
        waiting_prefills
        prefill_seconds, cache_bytes    of a prompt of `tokens`, where an instance shows its own curves
        profile_samples                 prefills behind such curves
    every short interval, by cluster, pool and instance: sums over its finished prompts since its start, for engines
    that show no curves
        prompts, prompts_seconds, prompts_tokens (computed), prompts_cached_tokens
    twice a minute
        decode_seconds, decode_steps    a second; their quotient is the time of a step
        tokens, answers                 a second; their quotient is the length of an answer
        batch                           requests that one instance can decode together
        first_token_seconds             P90 at the instances that decode
        waiting, running, cache_used    by pool; the last is a share of the cache
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from prfaas.engines import ENGINES

NO_FACTS: Final[Mapping[str, str]] = {}
BY_POOL: Final = "sum by (cluster, pool)"
BY_PROCESS: Final = "sum by (cluster, pool, instance, engine)"
"""The labels tell the counters of one engine process apart: replicas within a pod count for themselves."""


class EngineQueries(NamedTuple):
    """One engine's PromQL.

    Placeholders: $at selects clusters and pools, $decode the hub's pools that decode, $pools all of the policy's;
    $window is the window of rates.
    """

    short: Mapping[str, str]
    long: Mapping[str, str]
    lacks: Mapping[str, str] = NO_FACTS
    """What to do about a fact that is missing from an answer, by its name."""


def share_that_fits(running: str, cache_used: str) -> str:
    """Return how many requests fill one instance's cache, by what runs and what that occupies.

    Below a hundredth of the cache the quotient says nothing.
    """
    occupied = f"sum(avg_over_time({cache_used}{{$decode}}[$window]))"
    return f"sum(avg_over_time({running}{{$decode}}[$window])) / ({occupied} > 0.01)"


def first_token_p90(histogram: str) -> str:
    """Return the 90th percentile of a histogram of first-token times at the instances that decode."""
    return f"histogram_quantile(0.9, sum by (le) (rate({histogram}_bucket{{$decode}}[$window])))"


def quotient_parts(histogram: str, total: str, count: str) -> dict[str, str]:
    """Return the rates of a histogram's sum and count under two names."""
    return {
        total: f"sum(rate({histogram}_sum{{$decode}}[$window]))",
        count: f"sum(rate({histogram}_count{{$decode}}[$window]))",
    }


LINK: Final[Mapping[str, str]] = {
    "sampled_at_seconds": "max by (cluster) (timestamp(prfaas_transfer_sent_bytes_total{$in}))",
    "backlogged_mbps": "sum by (cluster) (rate(prfaas_link_backlogged_bytes_total{$link}[$window])) * 8 / 1e6",
    # The share of time in which at least one instance had data waiting, were they independent: 1 - prod(1 - share).
    # A sum would count time that they share twice, and take the link for narrower than it is.
    # PromQL has no product, but sums of logarithms; 0.999999 keeps ln 0 out.
    "backlogged_fraction": (
        "1 - exp(sum by (cluster) (ln(1 - clamp_max("
        "rate(prfaas_link_backlogged_seconds_total{$link}[$window]), 0.999999))))"
    ),
    # The same over the latest two scrapes.
    "latest_backlogged_mbps": (
        "sum by (cluster) (irate(prfaas_link_backlogged_bytes_total{$link}[$window])) * 8 / 1e6"
    ),
    "latest_backlogged_fraction": (
        "1 - exp(sum by (cluster) (ln(1 - clamp_max("
        "irate(prfaas_link_backlogged_seconds_total{$link}[$window]), 0.999999))))"
    ),
    "unsent_bytes": "sum by (cluster) (prfaas_link_unsent_bytes{$link})",
}
"""Our worker's counters of a link, and those of our connector inside vLLM, which have the same names.

Only bytes that a member's instances send to the hub, or to a peer of unknown name, cross its link. Placeholders: $in
selects the policy's clusters, $link those and the peer, $window the window of rates.
"""

MISMATCHES: Final[Mapping[str, str]] = {
    "mismatched_at_seconds": "max by (cluster, reason) (prfaas_transfer_mismatch_timestamp_seconds{$at}) > time() - 600"
}
"""Caches that pools refused for their kind in the last ten minutes. $at selects the pools."""

PRFAAS: Final = EngineQueries(
    short={
        "instances_sampled_at_seconds": "max by (cluster) (timestamp(prfaas_prefills_waiting{$at}))",
        "waiting_prefills": BY_POOL + " (prfaas_prefills_waiting{$at})",
        "prefill_seconds": "avg by (cluster, pool, tokens) (prfaas_profile_prefill_seconds{$at})",
        "cache_bytes": "avg by (cluster, pool, tokens) (prfaas_profile_cache_bytes{$at})",
        "profile_samples": "min by (cluster, pool) (prfaas_profile_samples{$at})",
    },
    long={
        "decode_seconds": "sum(rate(prfaas_decode_seconds_total{$decode}[$window]))",
        "decode_steps": "sum(rate(prfaas_decode_steps_total{$decode}[$window]))",
        "tokens": "sum(rate(prfaas_generation_tokens_total{$decode}[$window]))",
        "answers": 'sum(rate(prfaas_answers_total{$decode, reason=~"stop|length"}[$window]))',
        "batch": "min(prfaas_requests_running_limit{$decode})",
        "first_token_seconds": first_token_p90("prfaas_time_to_first_token_seconds"),
        "waiting": BY_POOL + " (prfaas_prefills_waiting{$pools})",
        "running": BY_POOL + " (prfaas_requests_running{$pools})",
        "cache_used": "avg by (cluster, pool) (prfaas_cache_used_pages{$pools} / prfaas_cache_pages{$pools})",
    },
)
"""The project's own worker: it shows its curves itself, and counts steps and prefills under our own names."""

VLLM: Final = EngineQueries(
    short={
        "instances_sampled_at_seconds": "max by (cluster) (timestamp(vllm:num_requests_running{$at}))",
        "waiting_prefills": BY_POOL + ' (vllm:num_requests_waiting_by_reason{$at, reason="capacity"})',
        "prompts": BY_PROCESS + " (vllm:request_prefill_time_seconds_count{$at})",
        "prompts_seconds": BY_PROCESS + " (vllm:request_prefill_time_seconds_sum{$at})",
        "prompts_tokens": BY_PROCESS + " (vllm:request_prefill_kv_computed_tokens_sum{$at})",
        "prompts_cached_tokens": (
            f"{BY_PROCESS} (vllm:request_prompt_tokens_sum{{$at}})"
            f" - {BY_PROCESS} (vllm:request_prefill_kv_computed_tokens_sum{{$at}})"
        ),
        "cache_bytes": "avg by (cluster, pool, tokens) (prfaas_profile_cache_bytes{$at})",
    },
    long={
        **quotient_parts("vllm:inter_token_latency_seconds", "decode_seconds", "decode_steps"),
        "tokens": "sum(rate(vllm:generation_tokens_total{$decode}[$window]))",
        "answers": 'sum(rate(vllm:request_success_total{$decode, finished_reason=~"stop|length"}[$window]))',
        "batch": share_that_fits("vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
        "first_token_seconds": first_token_p90("vllm:time_to_first_token_seconds"),
        "waiting": BY_POOL + ' (vllm:num_requests_waiting_by_reason{$pools, reason="capacity"})',
        "running": BY_POOL + " (vllm:num_requests_running{$pools})",
        "cache_used": "avg by (cluster, pool) (vllm:kv_cache_usage_perc{$pools})",
    },
)
"""vLLM 0.30 to 0.33, by the names of vllm/v1/metrics/loggers.py; ports 8000, and 8002 for our connector.

A prefill's time and its tokens are counted together when the request finishes. So the differences of two scrapes are
the mean prefill between them, and a single prefill where only one finished. `capacity` leaves out what waits for a
cache on its way: that is the link's queue, not the engine's. Our connector shows the size of a cache as our worker
does. vLLM does not publish --max-num-seqs.
"""

_ONCE_A_RANK: Final = "max by (cluster, pool, instance, dp_rank)"

SGLANG: Final = EngineQueries(
    short={
        "instances_sampled_at_seconds": "max by (cluster) (timestamp(sglang:num_running_reqs{$at}))",
        "waiting_prefills": f"{BY_POOL} ({_ONCE_A_RANK} (sglang:num_queue_reqs{{$at}}))",
    },
    long={
        **quotient_parts("sglang:inter_token_latency_seconds", "decode_seconds", "decode_steps"),
        "tokens": "sum(rate(sglang:generation_tokens_total{$decode}[$window]))",
        "answers": "sum(rate(sglang:num_requests_total{$decode}[$window]))",
        "batch": share_that_fits("sglang:num_running_reqs", "sglang:token_usage"),
        "first_token_seconds": first_token_p90("sglang:time_to_first_token_seconds"),
        "waiting": f"{BY_POOL} ({_ONCE_A_RANK} (sglang:num_queue_reqs{{$pools}}))",
        "running": f"{BY_POOL} ({_ONCE_A_RANK} (sglang:num_running_reqs{{$pools}}))",
        "cache_used": "avg by (cluster, pool) (sglang:token_usage{$pools})",
    },
    lacks={"prefill_seconds": "SGLang counts seconds and tokens of a prefill at different moments"},
)
"""SGLang 0.5.23 with --enable-metrics, by the names of its metrics collector (read, not run).

A prefill's seconds are counted where it is computed, its tokens when the request ends, after the transfer: the two
belong to different prompts at any one moment. So there is no curve here, and a pool needs `profile.points`. Ranks of
one engine may repeat the same figure; the largest counts once.
"""

_TENSORRT_CACHED: Final = f"{BY_PROCESS} (trtllm_prompt_cached_tokens_total{{$at}})"

TENSORRT_LLM: Final = EngineQueries(
    short={
        "instances_sampled_at_seconds": "max by (cluster) (timestamp(trtllm_num_requests_running{$at}))",
        "waiting_prefills": BY_POOL + " (trtllm_num_requests_waiting{$at})",
        "prompts": BY_PROCESS + " (trtllm_request_prefill_time_seconds_count{$at})",
        "prompts_seconds": BY_PROCESS + " (trtllm_request_prefill_time_seconds_sum{$at})",
        "prompts_tokens": f"{BY_PROCESS} (trtllm_prompt_tokens_total{{$at}}) - {_TENSORRT_CACHED}",
        "prompts_cached_tokens": _TENSORRT_CACHED,
    },
    long={
        **quotient_parts("trtllm_time_per_output_token_seconds", "decode_seconds", "decode_steps"),
        "tokens": "sum(rate(trtllm_generation_tokens_total{$decode}[$window]))",
        "answers": 'sum(rate(trtllm_request_success_total{$decode, finished_reason=~"stop|length"}[$window]))',
        "batch": "min(trtllm_max_batch_size_runtime{$decode})",
        "first_token_seconds": first_token_p90("trtllm_time_to_first_token_seconds"),
        "waiting": BY_POOL + " (trtllm_num_requests_waiting{$pools})",
        "running": BY_POOL + " (trtllm_num_requests_running{$pools})",
        "cache_used": "avg by (cluster, pool) (trtllm_kv_cache_utilization{$pools})",
    },
    lacks={
        "waiting_prefills": "set enable_iter_perf_stats in its LLM arguments, and scrape /prometheus/metrics",
        "prefill_seconds": "set return_perf_metrics in its LLM arguments, and scrape /prometheus/metrics",
    },
)
"""TensorRT-LLM's trtllm-serve, by the names of tensorrt_llm/metrics/collector.py (read, not run).

It answers at /prometheus/metrics, and only with `return_perf_metrics` (times) and `enable_iter_perf_stats` (queues)
in its LLM arguments. A finished request's prefill time and tokens are counted together.
"""

DYNAMO: Final = EngineQueries(
    short={
        "instances_sampled_at_seconds": "max by (cluster) (timestamp(dynamo_frontend_inflight_requests{$at}))",
        "waiting_prefills": BY_POOL + " (dynamo_frontend_queued_requests{$at})",
    },
    long={
        **quotient_parts("dynamo_frontend_inter_token_latency_seconds", "decode_seconds", "decode_steps"),
        "tokens": "sum(rate(dynamo_frontend_output_sequence_tokens_sum{$decode}[$window]))",
        "answers": "sum(rate(dynamo_frontend_output_sequence_tokens_count{$decode}[$window]))",
        "batch": "min(dynamo_frontend_model_max_num_seqs{$decode})",
        "first_token_seconds": first_token_p90("dynamo_frontend_time_to_first_token_seconds"),
        "waiting": BY_POOL + " (dynamo_frontend_queued_requests{$pools})",
        "running": BY_POOL + " (dynamo_frontend_inflight_requests{$pools})",
    },
    lacks={"prefill_seconds": "Dynamo publishes no prefill times"},
)
"""A Dynamo frontend as one instance, by the names of Dynamo's metrics catalogue (read, not run).

It prefills and decodes behind one address, so it has neither a link of ours nor prefills that we place. It publishes
no prefill times.
"""

QUERIES: Final[Mapping[str, EngineQueries]] = {
    "prfaas": PRFAAS,
    "vllm": VLLM,
    "sglang": SGLANG,
    "tensorrt-llm": TENSORRT_LLM,
    "dynamo": DYNAMO,
}
"""The adapters by the names that records of engines have for them."""


def queries_of(engine: str) -> EngineQueries:
    """Return the adapter of an engine."""
    return QUERIES[ENGINES[engine].metrics]
