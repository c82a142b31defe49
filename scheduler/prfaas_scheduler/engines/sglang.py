"""SGLang 0.5.23 with --enable-metrics, by the names of its metrics collector (read, not run).

A prefill's seconds are counted where it is computed, its tokens when the request ends, after the transfer: the two
belong to different prompts at any one moment. So there is no curve here, and a pool needs `profile.points`. Ranks of
one engine may repeat the same figure; the largest counts once.
"""

from typing import Final

from prfaas_scheduler.engines.facts import BY_POOL, EngineQueries, first_token_p90, quotient_parts, share_that_fits

_ONCE: Final = "max by (cluster, pool, instance, dp_rank)"

QUERIES: Final = EngineQueries(
    short={
        "instances_sampled_at_seconds": "max by (cluster) (timestamp(sglang:num_running_reqs{$at}))",
        "waiting_prefills": f"{BY_POOL} ({_ONCE} (sglang:num_queue_reqs{{$at}}))",
    },
    long={
        **quotient_parts("sglang:inter_token_latency_seconds", "decode_seconds", "decode_steps"),
        "tokens": "sum(rate(sglang:generation_tokens_total{$decode}[$window]))",
        "answers": "sum(rate(sglang:num_requests_total{$decode}[$window]))",
        "batch": share_that_fits("sglang:num_running_reqs", "sglang:token_usage"),
        "first_token_seconds": first_token_p90("sglang:time_to_first_token_seconds"),
        "waiting": f"{BY_POOL} ({_ONCE} (sglang:num_queue_reqs{{$pools}}))",
        "running": f"{BY_POOL} ({_ONCE} (sglang:num_running_reqs{{$pools}}))",
        "cache_used": "avg by (cluster, pool) (sglang:token_usage{$pools})",
    },
    lacks={"prefill_seconds": "SGLang counts seconds and tokens of a prefill at different moments"},
)
