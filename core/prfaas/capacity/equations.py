"""The throughput model: what each stage of a system can carry, equations (1) to (6) of the paper's section 3.4.1.

Equation (1), Phi_kv, is `profile.kv_bits_per_second`. The others are here for any number of offload pools, links and
hardware kinds in the hub. The paper writes T_prefill(l_long) for the work of the long prompts; work adds up over
prompts, not over lengths, so this is E[T_prefill(L) | L > t], which for a quadratic T is more than T at the mean.

Rates are requests per second. Those named `*_arrivals` count all requests, the others the part that a stage serves.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from prfaas.capacity.system import OffloadPool, System
from prfaas.capacity.workload import Moments, Workload
from prfaas.wire.profile import Profile

Split = Mapping[str, float]
"""How many instances of each pool of the hub prefill, by the pool's name; the others decode."""
BITS_PER_MBIT = 1e6


class Share(NamedTuple):
    """What one offload pool takes of the offloaded requests: requests a second while all pools are busy."""

    pool: OffloadPool
    rate: float


def mean_seconds(profile: Profile, part: Moments) -> float:
    """E[T_prefill(L) | L in the part]; 0 for an empty part."""
    if not part:
        return 0.0
    seconds = profile.fixed_seconds * part.share + profile.token_seconds * part.tokens
    return (seconds + profile.squared_seconds * part.squares) / part.share


def mean_cache_bits(profile: Profile, part: Moments) -> float:
    """E[S_kv(L) | L in the part], in bits; 0 for an empty part."""
    return 8 * (profile.state_bytes + profile.token_bytes * part.mean_tokens) if part else 0.0


def egress_demand_mbps(pool: OffloadPool, part: Moments) -> float:
    """Return B_out, equation (2): what a pool sends while all of its instances prefill prompts of the part."""
    seconds = mean_seconds(pool.profile, part)
    return pool.instances * mean_cache_bits(pool.profile, part) / seconds / BITS_PER_MBIT if seconds > 0 else 0.0


def offload_shares(system: System, part: Moments) -> list[Share]:
    """Return what each offload pool carries of the long prompts, equation (3): as fast as instances and links allow.

    Where a link carries less than its pools could send, those whose caches are smallest come first.
    """
    shares: list[Share] = []
    for link in system.links:
        left_bits = link.capacity_mbps * BITS_PER_MBIT
        pools = [pool for pool in system.offload if pool.link == link.name]
        for pool in sorted(pools, key=lambda pool: mean_cache_bits(pool.profile, part)):
            bits = mean_cache_bits(pool.profile, part)
            seconds = mean_seconds(pool.profile, part)
            rate = min(_quotient(pool.instances, seconds), _quotient(left_bits, bits)) if part else 0.0
            left_bits = max(0.0, left_bits - rate * bits)
            shares.append(Share(pool, rate))
    return shares


def theta_prfaas(system: System, part: Moments) -> float:
    """Return Theta_prfaas, equation (3): long prompts a second that the offload pools prefill and their links carry."""
    return math.fsum(share.rate for share in offload_shares(system, part))


def theta_pd_p(system: System, part: Moments, split: Split) -> float:
    """Return Theta_pd-p, equation (4): short prompts a second that the hub's prefilling instances take."""
    return sum(_quotient(split[pool.name], mean_seconds(pool.profile, part)) for pool in system.hub) if part else 0.0


def theta_pd_d(system: System, split: Split) -> float:
    """Return Theta_pd-d, equation (5): requests a second that the hub's decoding instances finish."""
    return sum((pool.instances - split[pool.name]) * pool.decode_rate(system.output_tokens) for pool in system.hub)


def offload_arrivals(system: System, part: Moments) -> float:
    """Return Theta_prfaas / p, the first term of equation (6): infinite where nothing is offloaded."""
    return theta_prfaas(system, part) / part.share if part else math.inf


def local_arrivals(system: System, part: Moments, split: Split) -> float:
    """Return Theta_pd-p / (1 - p), the second term of equation (6): infinite where nothing is prefilled in the hub."""
    return theta_pd_p(system, part, split) / part.share if part else math.inf


def lambda_max(system: System, workload: Workload, threshold_tokens: float, split: Split) -> float:
    """Return Lambda_max, equation (6): requests a second at which the first stage is full."""
    return min(
        offload_arrivals(system, workload.above(threshold_tokens)),
        local_arrivals(system, workload.below(threshold_tokens), split),
        theta_pd_d(system, split),
    )


def egress_mbps(shares: list[Share], part: Moments, arrivals: float) -> dict[str, float]:
    """Return what each link carries, in Mbit/s, at this rate of all requests, divided as the shares are."""
    carried: dict[str, float] = {}
    total = sum(share.rate for share in shares)
    for pool, rate in shares:
        offloaded = arrivals * part.share * rate / total if total > 0 else 0.0
        mbps = offloaded * mean_cache_bits(pool.profile, part) / BITS_PER_MBIT
        carried[pool.link] = carried.get(pool.link, 0.0) + mbps
    return carried


def _quotient(amount: float, each: float) -> float:
    return amount / each if each > 0 else math.inf
