"""The threshold at which offload pools and local pools would be equally busy, on what comes and what already waits.

Equations (3), (4) and (7) of the paper, for any number of pools, clusters and links. With E[x; L>t] for the part of a
mean that prompts above t bring, per prompt of any length,

    compute_k(t)  = sum over pools of cluster k of N / E[T; L>t]     requests/s that its pools could keep up with
    link_k(t)     = B_k / E[S; L>t]                                  requests/s that its link could
    offload(t)    = 1 / sum over k of min(compute_k, link_k)         busy share of it all, per request a second
    local(t)      = 1 / sum over local pools of N / E[T; L<=t]

offload falls and local rises with t, so the t where they meet is found by halving. Four things go beyond the paper.
A side where something waits is busier by that, and both meet with it (prfaas.routing.balance has the equation). B_k is
what the controller lets a link carry. Without local pools the *arrival rate* decides, for then no more may be offloaded
than the rest can carry. And pools of different hardware are weighed by what each can do, as the least loaded instance
is taken. With local pools the arrival rate is no part of it: more than both sides can do is shared by both, where a
bound to what links carry would leave the excess in the hub.
"""

from collections.abc import Mapping, Sequence
from operator import sub
from typing import Final, NamedTuple

import msgspec

from prfaas.names import HUB
from prfaas.routing.lengths import Demand, DemandAbove
from prfaas.wire.profile import Profile

MIN_PROMPTS: Final = 20
"""Fewer prompts say nothing of a distribution."""
ENOUGH_PROMPTS: Final = 200
"""Of fewer prompts the quantiles wander, so a threshold goes no lower than the policy's own."""
ACCURACY: Final = 0.001
"""Share of the threshold, or one token, to which it is found. The lengths that it follows from are not known better."""
HORIZON_SECONDS: Final = 6.0
"""Time in which a side should do what waits there, beside what comes. Chosen by simulation among 5 to 20 s: with more,
queues outlive the burst that made them; with less, the threshold follows single prompts."""
# In place of 0 where a part of the demand asks for nothing: a rate without bound, and no division by 0.
IDLE: Final = 1e-12


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill pool: where it is, how many instances are Ready, and what a prefill costs on one of them."""

    cluster: str
    ready_instances: int
    profile: Profile
    work: float = 1.0
    """Tokens that are computed here for each that the lengths count."""

    def seconds(self, part: DemandAbove) -> float:
        """Return how long one instance computes for `part`, a request of any length in the mean."""
        return self.work * part.seconds(self.profile)


class Waiting(NamedTuple):
    """How long each side needs for what waits there, beyond what comes."""

    hub_seconds: float
    away_seconds: float

    @property
    def hub_burden(self) -> float:
        """All that the hub has to do, over what comes alone."""
        return 1.0 + self.hub_seconds / HORIZON_SECONDS

    @property
    def away_burden(self) -> float:
        """The same for offload pools and their links."""
        return 1.0 + self.away_seconds / HORIZON_SECONDS


NO_QUEUES: Final = Waiting(hub_seconds=0.0, away_seconds=0.0)


def optimum(
    demand: Demand,
    pools: Sequence[PoolFacts],
    link_mbps: Mapping[str, float],
    arrivals_per_second: float | None,
    bounds: tuple[float, float],
    waiting: Waiting = NO_QUEUES,
) -> float | None:
    """Return the threshold in tokens, within `bounds`; None when too little is known.

    That is so with few prompts, prompts of one length, no measured pool, or one side only of the balance and no arrival
    rate. Pools take nothing whose link is not in `link_mbps`, which is what each live link may carry for us.
    `arrivals_per_second` counts all requests, short and long; None: not known.
    """
    known = [pool for pool in pools if pool.ready_instances > 0 and pool.profile.samples > 0]
    local = [pool for pool in known if pool.cluster == HUB]
    remote = {name: [pool for pool in known if pool.cluster == name] for name in link_mbps if name != HUB}
    remote = {name: found for name, found in remote.items() if found}
    if demand.prompts < MIN_PROMPTS or not demand.has_spread or not remote:
        return None
    if not local and arrivals_per_second is None:
        return None
    everything = demand.above(0.0)
    offload = [(link_mbps[name] * 1e6, found) for name, found in remote.items()]

    def sustainable(threshold_tokens: float) -> bool:
        """Return True when the prompts above this threshold can be offloaded; then true for every higher one."""
        above = demand.above(threshold_tokens)
        rate = 0.0
        for bits_per_second, found in offload:
            # Equation (3), for each link.
            rate += min(_rate(found, above), bits_per_second / max(IDLE, mean_bits(found, above)))
        rate /= waiting.away_burden
        if not local:
            return arrivals_per_second is None or rate >= arrivals_per_second
        # Equation (7) as an inequality; the search finds where it becomes true.
        return rate >= _rate(local, DemandAbove(*map(sub, everything, above))) / waiting.hub_burden

    low, high = bounds
    if sustainable(low):
        return low
    while high - low > max(1.0, ACCURACY * low):
        middle = (low + high) / 2
        low, high = (low, middle) if sustainable(middle) else (middle, high)
    return high


def sustainable_in_hub(
    demand: Demand,
    pools: Sequence[PoolFacts],
    arrivals_per_second: float | None,
    bounds: tuple[float, float],
    waiting: Waiting = NO_QUEUES,
) -> float:
    """Return the highest threshold, within `bounds`, at which the hub can do what waits and what stays there.

    It does the latter as fast as it comes. The upper bound where the hub or the arrivals are not known.
    """
    local = [one for one in pools if one.cluster == HUB and one.ready_instances > 0 and one.profile.samples > 0]
    low, high = bounds
    if not local or arrivals_per_second is None:
        return high
    everything, needed_per_second = demand.above(0.0), arrivals_per_second * waiting.hub_burden
    while high - low > max(1.0, ACCURACY * low):
        middle = (low + high) / 2
        rate = _rate(local, DemandAbove(*map(sub, everything, demand.above(middle))))
        low, high = (middle, high) if rate >= needed_per_second else (low, middle)
    return low


def _rate(pools: Sequence[PoolFacts], part: DemandAbove) -> float:
    """Return the requests a second, of any length, whose `part` these pools can prefill."""
    rate = 0.0
    for pool in pools:  # a loop, as is the next: these two are most of what an interval costs
        rate += pool.ready_instances / max(IDLE, pool.seconds(part))
    return rate


def mean_bits(pools: Sequence[PoolFacts], part: DemandAbove) -> float:
    """Return what `part` brings over the link, in bits a request of any length; the mean over instances."""
    instances, bits = 0, 0.0
    for pool in pools:
        instances += pool.ready_instances
        bits += pool.ready_instances * part.bits(pool.profile)
    return bits / instances
