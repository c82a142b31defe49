"""What no policy can exceed: an upper bound on Lambda_max, over all ways to route by length and to divide instances.

A linear programme. Let y_r be the rate at which requests follow routing r, where a routing names for every length the
pool that prefills it, and for decode the pool that decodes. Each resource (instances of a pool, a link) has its
capacity, and a request of routing r takes the share a_ir of resource i for a second:

    maximise sum of y_r    such that    sum over r of a_ir y_r <= 1    for every resource i

There are far too many routings to write down, but at given prices of the resources the cheapest one is found length by
length. So columns are generated: solve with a few routings, price the resources by the dual solution, add the cheapest
routing at these prices. If it costs c, then (sum of prices) / c is a bound whatever the prices are (weak duality), so
stopping early makes the bound looser, never wrong.

The prices are what one more unit of a resource is worth, in requests a second times its size.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from prfaas.capacity.equations import BITS_PER_MBIT
from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.capacity.system import System
from prfaas.capacity.workload import Workload

_GAP: Final = 1e-4
"""The bound is at most this share above what routing can reach."""
_MOST_ROUTINGS: Final = 200
_EPSILON: Final = 1e-12


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """`lambda_max` cannot be exceeded, and `reached` can be. Prices, by resource, add up to `lambda_max`."""

    lambda_max: float
    reached: float
    prices: dict[str, float]


Column = list[float]
"""The share of each resource, for a second, that one request takes."""


def bound(system: System, workload: Workload) -> Bound:
    """Return the bound for whole and fractional plans alike; limits such as `min_prefill` are left out of it."""
    resources = [pool.name for pool in (*system.hub, *system.offload)] + [link.name for link in system.links]
    options = _options(system, workload)
    decodes = [1 / (pool.instances * pool.decode_rate(system.output_tokens)) for pool in system.hub]
    weights = [weight for _, weight in workload.items()]
    prices = [1.0] * len(resources)
    columns: list[Column] = []
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
    return Bound(
        lambda_max=upper,
        reached=reached,
        prices=dict(zip(resources, best_prices, strict=True)),
    )


class _Option(msgspec.Struct, frozen=True):
    """One way to prefill: which resources it takes, and how much of each for every length of the workload."""

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
) -> Column:
    """Return what the cheapest routing takes at these prices."""
    column = [0.0] * len(prices)
    decode = min(range(len(decodes)), key=lambda place: prices[place] * decodes[place])
    column[decode] += decodes[decode]
    costs = [_costs(option, prices) for option in options]
    for place, (weight, asked) in enumerate(zip(weights, zip(*costs, strict=True), strict=True)):
        option = options[asked.index(min(asked))]
        for resource, shares in zip(option.resources, option.shares, strict=True):
            column[resource] += weight * shares[place]
    return column


def _costs(option: _Option, prices: Sequence[float]) -> list[float]:
    first, *others = (
        [prices[resource] * share for share in shares]
        for resource, shares in zip(option.resources, option.shares, strict=True)
    )
    return [sum(parts) for parts in zip(first, *others, strict=True)] if others else first


def _pack(columns: Sequence[Column]) -> tuple[float, list[float]]:
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
