"""The project's own worker: it shows its curves itself, and counts steps and prefills under our own names."""

from typing import Final

from prfaas_scheduler.engines.facts import BY_POOL, EngineQueries, first_token_p90

QUERIES: Final = EngineQueries(
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
        "answers": 'sum(rate(vllm:request_success_total{$decode, finished_reason=~"stop|length"}[$window]))',
        "batch": "min(prfaas_requests_running_limit{$decode})",
        "first_token_seconds": first_token_p90("prfaas_time_to_first_token_seconds"),
        "waiting": BY_POOL + " (prfaas_prefills_waiting{$pools})",
        "running": BY_POOL + " (prfaas_requests_running{$pools})",
        "cache_used": "avg by (cluster, pool) (prfaas_cache_used_pages{$pools} / prfaas_cache_pages{$pools})",
    },
)
