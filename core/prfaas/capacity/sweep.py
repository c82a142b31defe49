"""What faster and slower links would change: the best plan at each of a row of capacities, and where offloading pays.

All links are scaled together, and everything else stays. A faster link never carries less. So lambda_max rises with the
scale until something else is full, and the capacity from which offloading pays is found by bisection. Only the quotient
of bytes and capacity counts: a link twice as fast is worth as much as caches of half the bytes.
"""

import math
from typing import Final

import msgspec

from prfaas.capacity import optimum
from prfaas.capacity.system import System
from prfaas.capacity.workload import Workload

PAYS: Final = 0.05
"""The gain from which offloading is worth its effort."""
SCALES: Final = tuple(2.0**power for power in range(-4, 5))
_SLOWEST_MBPS: Final = 1e-3
_UNLIMITED_MBPS: Final = 1e12
"""A capacity at which no link limits."""
_PRECISION: Final = 0.005


class LinkPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan with all links scaled. Without a threshold all prompts go the same way."""

    scale: float
    mbps: float
    """Of all links together."""
    threshold_tokens: int | None
    lambda_max: float
    gain: float
    """As in the verdict."""


def over_links(system: System, workload: Workload, base: float) -> tuple[LinkPoint, ...]:
    """Return a point for each scale, with its gain over `base` requests/s; none where nothing offloads."""
    if not system.offload_instances:
        return ()
    points: list[LinkPoint] = []
    for scale in SCALES:
        plan = optimum.best(scaled(system, scale), workload)
        points.append(
            LinkPoint(
                scale=scale,
                mbps=scale * total_mbps(system),
                threshold_tokens=plan.threshold_tokens,
                lambda_max=plan.lambda_max,
                gain=plan.lambda_max / base - 1,
            )
        )
    return tuple(points)


def paying_mbps(system: System, workload: Workload, base: float) -> float | None:
    """Return the Mbit/s of all links together from which offloading pays over `base` requests/s; None: at no rate."""

    def pays(changed: System) -> bool:
        return optimum.best(changed, workload).lambda_max >= (1 + PAYS) * base

    if not pays(unlimited(system)):
        return None
    total = total_mbps(system)
    low, high = math.log(_SLOWEST_MBPS / total), math.log(_UNLIMITED_MBPS / total)
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(scaled(system, math.exp(middle))) else (middle, high)
    return math.exp(high) * total


def scaled(system: System, scale: float) -> System:
    """Return the system with all links so many times as fast."""
    links = [msgspec.structs.replace(link, capacity_mbps=scale * link.capacity_mbps) for link in system.links]
    return msgspec.structs.replace(system, links=tuple(links))


def unlimited(system: System) -> System:
    """Return the system with links that never limit."""
    links = [msgspec.structs.replace(link, capacity_mbps=_UNLIMITED_MBPS) for link in system.links]
    return msgspec.structs.replace(system, links=tuple(links))


def total_mbps(system: System) -> float:
    return sum(link.capacity_mbps for link in system.links)
