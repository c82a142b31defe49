"""TensorRT-LLM's trtllm-serve, by the names of tensorrt_llm/metrics/collector.py (read, not run).

It answers at /prometheus/metrics, and only with `return_perf_metrics` (times) and `enable_iter_perf_stats` (queues)
in its LLM arguments. A finished request's prefill time and tokens are counted together.
"""

from typing import Final

from prfaas_scheduler.engines.facts import BY_POOL, INSTANCE_LABELS, EngineQueries, first_token_p90, quotient_parts

_PREFILLS: Final = f"sum by ({INSTANCE_LABELS})"
_CACHED: Final = f"{_PREFILLS} (trtllm_prompt_cached_tokens_total{{$at}})"

QUERIES: Final = EngineQueries(
    short={
        "instances_sampled_at_seconds": "max by (cluster) (timestamp(trtllm_num_requests_running{$at}))",
        "waiting_prefills": BY_POOL + " (trtllm_num_requests_waiting{$at})",
        "prompts": _PREFILLS + " (trtllm_request_prefill_time_seconds_count{$at})",
        "prompts_seconds": _PREFILLS + " (trtllm_request_prefill_time_seconds_sum{$at})",
        "prompts_tokens": f"{_PREFILLS} (trtllm_prompt_tokens_total{{$at}}) - {_CACHED}",
        "prompts_cached_tokens": _CACHED,
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
