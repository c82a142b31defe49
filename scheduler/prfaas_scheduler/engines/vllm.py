"""vLLM 0.32 and 0.33, by the names of vllm/v1/metrics/loggers.py; ports 8000, and 8002 for our connector.

A prefill's time and its tokens are counted together when the request finishes. So the differences of two scrapes are
the mean prefill between them, and a single prefill where only one finished. `capacity` leaves out what waits for a
cache on its way: that is the link's queue, not the engine's. Our connector shows the size of a cache as our worker
does. vLLM does not publish --max-num-seqs.
"""

from typing import Final

from prfaas_scheduler.engines.facts import (
    BY_POOL,
    INSTANCE_LABELS,
    EngineQueries,
    first_token_p90,
    quotient_parts,
    share_that_fits,
)

_PREFILLS: Final = f"sum by ({INSTANCE_LABELS})"

QUERIES: Final = EngineQueries(
    short={
        "instances_sampled_at_seconds": "max by (cluster) (timestamp(vllm:num_requests_running{$at}))",
        "waiting_prefills": BY_POOL + ' (vllm:num_requests_waiting_by_reason{$at, reason="capacity"})',
        "prompts": _PREFILLS + " (vllm:request_prefill_time_seconds_count{$at})",
        "prompts_seconds": _PREFILLS + " (vllm:request_prefill_time_seconds_sum{$at})",
        "prompts_tokens": _PREFILLS + " (vllm:request_prefill_kv_computed_tokens_sum{$at})",
        "prompts_cached_tokens": (
            f"{_PREFILLS} (vllm:request_prompt_tokens_sum{{$at}})"
            f" - {_PREFILLS} (vllm:request_prefill_kv_computed_tokens_sum{{$at}})"
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
