"""The throughput model, equations (1) to (6) of the paper's section 3.4.1, and an upper bound on Lambda_max.

Equation (1), Phi_kv, is `profile.kv_bits_per_second`. The others are here for any number of offload pools, links and
hardware kinds in the hub. The paper writes T_prefill(l_long) for the work of the long prompts. Work adds up over
prompts, not over lengths, so this is E[T_prefill(L) | L > t]. For a quadratic T this mean is more than T at the mean.
Rates are requests per second. Those named `*_arrivals` count all requests, the others the part that a stage serves.

The bound holds for every way to route by length and to divide instances between roles. It is a linear programme. y_r is
the rate of requests that follow routing r. A routing names the pool that prefills each length and the pool that
decodes. A request of routing r takes the share a_ir of resource i (instances of a pool, a link) for a second:

    maximise sum of y_r    such that    sum over r of a_ir y_r <= 1    for every resource i

There are too many routings to list, but at given prices of the resources the cheapest one is found length by length. So
columns are generated. Solve with a few routings, price the resources by the dual solution, add the cheapest routing at
these prices. If it costs c, then (sum of prices) / c is a bound whatever the prices are (weak duality). So stopping
early makes the bound looser, never wrong. A price is the worth of one more unit of a resource, in requests a second
times the resource's size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.capacity.system import OffloadPool, System
from prfaas.capacity.workload import Moments, Workload
from prfaas.wire.profile import Profile

Split = Mapping[str, float]
"""Instances that prefill, by pool of the hub; the others decode."""
BITS_PER_MBIT = 1e6
_GAP: Final = 1e-4
"""The bound is at most this share above what routing can reach."""
_MOST_ROUTINGS: Final = 200
_EPSILON: Final = 1e-12
_Column = list[float]
"""The share of each resource, for a second, that one request takes."""


class Share(NamedTuple):
    """The offloaded requests a second that one offload pool takes while all pools are busy."""

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


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """`lambda_max` cannot be exceeded, and `reached` can be. Prices, by resource, add up to `lambda_max`."""

    lambda_max: float
    reached: float
    prices: dict[str, float]


def find_bound(system: System, workload: Workload) -> Bound:
    """Return the bound for whole and fractional plans alike; limits such as `min_prefill` are left out of it."""
    resources = [pool.name for pool in (*system.hub, *system.offload)] + [link.name for link in system.links]
    options = _options(system, workload)
    decodes = [1 / (pool.instances * pool.decode_rate(system.output_tokens)) for pool in system.hub]
    weights = [weight for _, weight in workload.items()]
    prices = [1.0] * len(resources)
    columns: list[_Column] = []
    upper, reached, best_prices = float("inf"), 0.0, prices
    for _ in range(_MOST_ROUTINGS):
        column = _cheapest(options, decodes, weights, prices)
        cost = sum(price * share for price, share in zip(prices, column, strict=True))
        # Where prices are zero the cheapest routing may be free: that bounds nothing, but is worth trying.
        if sum(prices) < upper * cost:
            upper, best_prices = sum(prices) / cost, [price / cost for price in prices]
        if upper <= reached * (1 + _GAP):
            break
        columns.append(column)
        reached, prices = _pack(columns)
    return Bound(lambda_max=upper, reached=reached, prices=dict(zip(resources, best_prices, strict=True)))


class _Option(msgspec.Struct, frozen=True):
    """One way to prefill: its resources, and the share of each that a prompt of every length takes."""

    resources: tuple[int, ...]
    shares: tuple[list[float], ...]


def _options(system: System, workload: Workload) -> list[_Option]:
    hub = [
        _Option((place,), ([prefill_seconds(pool.profile, n) / pool.instances for n in workload.lengths],))
        for place, pool in enumerate(system.hub)
    ]
    offload: list[_Option] = []
    links = [link.name for link in system.links]
    first_link = len(system.hub) + len(system.offload)
    for place, pool in enumerate(system.offload, len(system.hub)):
        link_bits = system.link(pool.link).capacity_mbps * BITS_PER_MBIT
        seconds = [prefill_seconds(pool.profile, n) / pool.instances for n in workload.lengths]
        bits = [8 * cache_bytes(pool.profile, n) / link_bits for n in workload.lengths]
        offload.append(_Option((place, first_link + links.index(pool.link)), (seconds, bits)))
    return hub + offload


def _cheapest(
    options: Sequence[_Option], decodes: Sequence[float], weights: Sequence[float], prices: Sequence[float]
) -> _Column:
    """Return what the cheapest routing takes at these prices."""
    column = [0.0] * len(prices)
    decode = min(range(len(decodes)), key=lambda place: prices[place] * decodes[place])
    column[decode] += decodes[decode]
    costs = [_costs(option, prices) for option in options]
    for place, (weight, uses) in enumerate(zip(weights, zip(*costs, strict=True), strict=True)):
        option = options[uses.index(min(uses))]
        for resource, shares in zip(option.resources, option.shares, strict=True):
            column[resource] += weight * shares[place]
    return column


def _costs(option: _Option, prices: Sequence[float]) -> list[float]:
    first, *others = (
        [prices[resource] * share for share in shares]
        for resource, shares in zip(option.resources, option.shares, strict=True)
    )
    return [sum(parts) for parts in zip(first, *others, strict=True)] if others else first


def _pack(columns: Sequence[_Column]) -> tuple[float, list[float]]:
    """Solve: maximise sum(y) such that the columns times y stay at or below 1; return it and the prices of the rows.

    The simplex method on a dense tableau, from y = 0. Bland's rule picks the pivots, so that it always ends.
    """
    rows, width = len(columns[0]), len(columns)
    table = [
        [column[row] for column in columns] + [float(row == slack) for slack in range(rows)] + [1.0]
        for row in range(rows)
    ]
    goal = [-1.0] * width + [0.0] * (rows + 1)
    basis = list(range(width, width + rows))
    while True:
        entering = next((place for place, gain in enumerate(goal[:-1]) if gain < -_EPSILON), None)
        if entering is None:
            return goal[-1], [max(0.0, price) for price in goal[width:-1]]
        ratios = [(row[-1] / row[entering], basis[i], i) for i, row in enumerate(table) if row[entering] > _EPSILON]
        leaving = min(ratios)[2]
        pivot = table[leaving] = [value / table[leaving][entering] for value in table[leaving]]
        for i, row in enumerate(table):
            if i != leaving and row[entering]:
                table[i] = [value - row[entering] * other for value, other in zip(row, pivot, strict=True)]
        goal = [value - goal[entering] * other for value, other in zip(goal, pivot, strict=True)]
        basis[leaving] = entering
