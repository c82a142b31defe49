"""A Dynamo frontend as one instance, by the names of Dynamo's metrics catalogue (read, not run).

It prefills and decodes behind one address, so it has neither a link of ours nor prefills that we place. It publishes
no prefill times.
"""

from typing import Final

from prfaas_scheduler.engines.facts import BY_POOL, EngineQueries, first_token_p90, quotient_parts

QUERIES: Final = EngineQueries(
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
