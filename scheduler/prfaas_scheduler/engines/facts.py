"""The names of the facts that the loop measures, and the selectors that every engine's queries share.

An adapter is PromQL by the name of the fact that it answers. A fact that an engine does not publish is absent, and
`lacks` says what an owner can do about it. Consumers see names and labels only, so that nobody else knows an engine.

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

NO_FACTS: Final[Mapping[str, str]] = {}
BY_POOL: Final = "sum by (cluster, pool)"
INSTANCE_LABELS: Final = "cluster, pool, instance, engine"
"""Labels that tell the counters of one engine process apart: replicas within a pod count for themselves."""


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
