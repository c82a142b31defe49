"""The balance: where the threshold stands while lengths and profiles are known, by what comes and by what waits.

    offload(t) * (1 + W_away / T) = local(t) * (1 + W_hub / T)

offload(t) and local(t) are how busy a request a second keeps either side (prfaas.routing.feedforward). W is how many
seconds a side needs for what waits there, and T (HORIZON_SECONDS) the time in which that should be done, beside what
comes. So the side where more waits gets less, and where nothing waits both are equally busy.

    W_hub     the time of the prefills that wait in the hub
    W_away    the time of the prefills that wait at a member's pools, of which a part counts, or of the data that waits
              for its link, less one cache, for one is always on its way. The longer one, of the member where it is most

A link is planned to carry the middle between the watermarks. What waits changes that (`find_base`):

- While anything waits in the hub, a link carries more, up to all it can, until the hub keeps up with what comes and
  with its queue.
- What waits longer for a link than in the hub is drained within an interval, so a link that falls is followed at once.
  But while anything waits in the hub, draining raises the threshold no further than the hub keeps up.

Lengths count what no cache of the hub, or of a member, holds. The instance that computes may lack more. So a side's
times are multiplied by its *work*, the tokens that it computes for each counted one (`find_work`).

Profiles know neither that caches are larger than they say, nor what others send over a link. So the threshold is
*trimmed* upward, a little an interval, while a link is above its high watermark and the hub waits no longer than the
other side. It comes back in the same way once every link is below its low watermark, or the hub waits longer. There is
no other feedback: no move that a late measurement could answer twice.
"""

import math
from collections.abc import Callable, Sequence
from operator import sub
from typing import Final

import msgspec

from prfaas.names import HUB
from prfaas.routing.feedforward import ENOUGH_PROMPTS, PoolFacts, Waiting, mean_bits, optimum, sustainable_in_hub
from prfaas.routing.lengths import Demand, DemandAbove
from prfaas.routing.links import SATURATED_DRAIN_SECONDS, SATURATED_QUEUE_PER_INSTANCE, LinkView
from prfaas.wire.control import PrefillTokens
from prfaas.wire.routes import LinkWatermarks, Threshold

QUEUE_SHARE: Final = 0.35
"""Part of a queue at offload pools that counts. A prompt there keeps its place until its cache has left: much of the
queue waits for the link, which is counted itself. Chosen by simulation, with T and the mean."""
MEAN_SECONDS: Final = 2.0
"""Time over which W is a mean: one prompt that comes or goes is no queue."""
LEAST_SECONDS: Final = 0.01
"""A mean that is less counts as none; it would never fall to 0."""
MOST_SECONDS: Final = 3600.0
"""A longer wait says no more, and an absurd figure is forgotten within half a minute."""
FULL_LINK_SECONDS: Final = 2.0
"""From this wait in the hub on, a link is planned to carry all it can."""
USUAL_WAIT_SECONDS: Final = 1.0
"""A cache on its way waits so long for a link. What waits longer is a backlog. It is drained in the same time, or in an
interval where that is longer: otherwise an interval that sends nothing would follow each that sent too much."""
LEAST_SHARE: Final = 0.001
"""Share of its capacity that a link is planned to carry at least. With 0 the threshold would rise to its maximum, past
the longest prompt."""
MOST_WORK: Final = 3.0
"""Most tokens that count as computed for each counted one, and the inverse of the fewest: a few prompts say little."""
TRIM_FACTOR: Final = 1.05
"""One move of the trim. Rates are means over seconds, so several moves are made before the first one shows in them."""
DEAD_BAND: Final = 0.1
"""Share by which the balance must differ from the one before to count as changed: it wanders with the lengths."""
UNKNOWN_PREFILL_SECONDS: Final = SATURATED_DRAIN_SECONDS / SATURATED_QUEUE_PER_INSTANCE
"""A prefill's time at a pool that was never measured: a saturated queue takes as long as a saturated link's backlog."""


def find_work(first: PrefillTokens, last: PrefillTokens) -> float:
    """Return the tokens that a side computed for each counted one between two counts; 1 where none was counted.

    1 also where a count fell: then the gateway restarted in between.
    """
    counted, computed = last.counted - first.counted, last.computed - first.computed
    if counted <= 0 or computed < 0:
        return 1.0
    return min(MOST_WORK, max(1.0 / MOST_WORK, computed / counted))


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """The demand, and the pools that can serve it."""

    demand: Demand
    arrivals_per_second: float | None
    """All requests that were decided; None: not known."""
    pools: tuple[PoolFacts, ...]
    local_waiting_prefills: float = 0.0
    """Prefills that wait in the hub's pools."""

    def ready(self, cluster: str) -> list[PoolFacts]:
        """Return the pools of a cluster that have a Ready instance."""
        return [pool for pool in self.pools if pool.cluster == cluster and pool.ready_instances > 0]


def waiting_now(offered: Offered, links: Sequence[LinkView], threshold_tokens: float) -> Waiting:
    """Return how long either side needs for what waits there now; `links` are all that live."""
    above = offered.demand.above(threshold_tokens)
    below = DemandAbove(*map(sub, offered.demand.above(0.0), above))
    away = [_away_seconds(offered.ready(link.cluster), link, above) for link in links]
    return Waiting(_within(_hub_seconds(offered, below)), _within(max(away, default=0.0)))


def _within(seconds: float) -> float:
    return min(MOST_SECONDS, max(0.0, seconds))


def _hub_seconds(offered: Offered, below: DemandAbove) -> float:
    """Return how long the hub's pools need; 0 where there are none or nothing sensible was measured."""
    pools = offered.ready(HUB)
    if not pools or not math.isfinite(offered.local_waiting_prefills):
        return 0.0
    return offered.local_waiting_prefills / _instances(pools) * _mean_seconds(pools, below)


def _away_seconds(pools: Sequence[PoolFacts], link: LinkView, above: DemandAbove) -> float:
    """Return how long one member's pools need, or its link where that is longer."""
    queue_seconds = QUEUE_SHARE * link.waiting_per_instance * _mean_seconds(pools, above)
    return max(queue_seconds, link.drain_seconds - _cache_seconds(pools, link, above))


def _cache_seconds(pools: Sequence[PoolFacts], link: LinkView, above: DemandAbove) -> float:
    """Return how long the link takes for the mean cache; 0 where none crosses."""
    if not pools or above.share <= 0:
        return 0.0
    return mean_bits(pools, above) / above.share / 1e6 / link.effective_mbps


def _mean_seconds(pools: Sequence[PoolFacts], part: DemandAbove) -> float:
    """Return what a prompt of this part of the demand takes at these pools, the mean over their instances."""
    if not pools or part.share <= 0 or not all(pool.profile.samples > 0 for pool in pools):
        return UNKNOWN_PREFILL_SECONDS
    return sum(pool.ready_instances * pool.seconds(part) for pool in pools) / part.share / _instances(pools)


def _instances(pools: Sequence[PoolFacts]) -> int:
    return sum(pool.ready_instances for pool in pools)


def mean_waiting(before: Waiting, now: Waiting, elapsed_seconds: float) -> Waiting:
    """Return the running mean, this long after the one `before`."""
    share = min(1.0, elapsed_seconds / MEAN_SECONDS)

    def mean(before_seconds: float, now_seconds: float) -> float:
        found_seconds = before_seconds + share * (now_seconds - before_seconds)
        return found_seconds if found_seconds > LEAST_SECONDS else 0.0

    return Waiting(mean(before.hub_seconds, now.hub_seconds), mean(before.away_seconds, now.away_seconds))


def find_base(
    threshold: Threshold,
    marks: LinkWatermarks,
    offered: Offered,
    links: Sequence[LinkView],
    waiting: Waiting,
    interval_seconds: float,
) -> float | None:
    """Return the threshold of the balance; None: too little is known (`optimum`).

    `links` are all that live, `interval_seconds` the time since the step before. Few prompts do not lower the threshold
    below the policy's own tokens.
    """
    low, high = _bounds(threshold)
    if offered.demand.prompts < ENOUGH_PROMPTS:
        low = float(threshold.tokens)

    def balanced(share_of: Callable[[LinkView], float]) -> float | None:
        """Return the balance where each link carries this share of what it can; None for any share or for none."""
        link_mbps = {link.cluster: share_of(link) * link.effective_mbps for link in links}
        return optimum(offered.demand, offered.pools, link_mbps, offered.arrivals_per_second, (low, high), waiting)

    planned_share = (marks.high_percent + marks.low_percent) / 200.0  # the middle between the two, of percents
    planned = balanced(lambda _: planned_share)
    if planned is None:
        return None
    backlogs = {link.cluster: _backlog_seconds(link, waiting) for link in links}
    drained = planned
    if any(backlogs.values()):
        drain_seconds = max(USUAL_WAIT_SECONDS, interval_seconds)
        drained = balanced(lambda link: max(LEAST_SHARE, planned_share - backlogs[link.cluster] / drain_seconds)) or 0.0
    if waiting.hub_seconds <= 0.0:
        return max(planned, drained)
    more_share = planned_share + (1.0 - planned_share) * min(1.0, waiting.hub_seconds / FULL_LINK_SECONDS)
    fuller = balanced(lambda _: more_share) or 0.0
    bearable = find_bearable(threshold, offered, waiting)
    return max(min(planned, max(fuller, bearable)), min(drained, bearable))


def _backlog_seconds(link: LinkView, waiting: Waiting) -> float:
    """Return how long the link needs for what waits longer than usual, and longer than in the hub."""
    return max(0.0, link.drain_seconds - max(USUAL_WAIT_SECONDS, waiting.hub_seconds))


def keep_steady(threshold: Threshold, found_tokens: float, before_tokens: float | None) -> float:
    """Return the balance of before where the one that was found hardly differs."""
    if before_tokens is None or not threshold.min_tokens <= before_tokens <= threshold.max_tokens:
        return found_tokens
    return before_tokens if abs(found_tokens - before_tokens) <= DEAD_BAND * before_tokens else found_tokens


def find_bearable(threshold: Threshold, offered: Offered, waiting: Waiting) -> float:
    """Return the highest threshold at which the hub keeps up with what comes and with its queue; inf: it has no queue.

    While nothing waits, the hub has shown that it bears what stays there, whatever its profile says.
    """
    if waiting.hub_seconds <= 0.0:
        return math.inf
    return sustainable_in_hub(offered.demand, offered.pools, offered.arrivals_per_second, _bounds(threshold), waiting)


def _bounds(threshold: Threshold) -> tuple[float, float]:
    return float(threshold.min_tokens), float(threshold.max_tokens)


def find_trim(
    before: float, marks: LinkWatermarks, used_percent: float, waiting: Waiting, *, offloads_lately: bool
) -> float:
    """Return the factor on the balance, 1 or more, from the one `before` and the use of the busiest link."""
    if waiting.hub_seconds > waiting.away_seconds or used_percent < marks.low_percent:
        return max(1.0, before / TRIM_FACTOR)
    if used_percent > marks.high_percent and offloads_lately:
        return max(1.0, before) * TRIM_FACTOR
    return max(1.0, before)
