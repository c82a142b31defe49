"""What the same money buys: the plan beside the best hub alone, and the best mix of both kinds, that cost no more.

A table with as many instances of different kinds flatters the dearer kind. Here every system may spend what the
described one costs an hour, in whole instances: *homogeneous* buys instances of the hub's first pool alone, *best mix*
any number of each pool. Links are taken as they are, and as free. Prices are the reader's: their ratio decides.

There are many mixes, each with many splits. A mix carries no more than it would with instances that divide their time,
which is known at once; so mixes are tried in the order of that bound, until the best one found is above what is left.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from prfaas.capacity import optimum
from prfaas.capacity.optimum import Plan
from prfaas.capacity.system import HubPool, OffloadPool, System
from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError

MAX_MIXES: Final = 1_000
"""Where the money buys more of them, counts go in steps."""
_ROUNDING: Final = 1e-9


class Bought(msgspec.Struct, frozen=True, kw_only=True):
    """One system within the budget."""

    instances: dict[str, int]
    """By pool."""
    cost_per_hour: float
    lambda_max: float
    threshold_tokens: int | None
    n_p: float
    n_d: float


class EqualCost(msgspec.Struct, frozen=True, kw_only=True):
    """The described system, what its money buys otherwise, and how much more it serves than the hub alone."""

    described: Bought
    homogeneous: Bought
    best_mix: Bought
    gain: float
    """Lambda_max of the described system over that of the homogeneous one, less 1."""
    gain_of_best_mix: float
    even_at_ratio: float
    """Price of an offload instance, in hub instances, at which both serve as much, were instances divisible."""


def compare(system: System, workload: Workload) -> EqualCost | None:
    """Return the comparison; None where nothing is offloaded, or no pool has a price.

    Raises:
        ConfigError: some pools have a price and others none, or the money buys no hub.

    """
    pools = (*system.offload, *system.hub)
    priced = [pool for pool in pools if pool.cost_per_hour is not None]
    if not system.offload or not priced:
        return None
    for pool in pools:
        if pool.cost_per_hour is None:
            raise ConfigError(
                f"costPerHour is given for {priced[0].name} and missing for {pool.name}; "
                "give it for every pool, of one instance and in one currency, or for none"
            )
    described = _bought(system, optimum.best(system, workload))
    alone = _alone(system, described.cost_per_hour)
    homogeneous = _bought(alone, optimum.best(alone, workload))
    best_mix = _best_mix(system, workload, max(homogeneous, described, key=_worth))
    per_instance = homogeneous.lambda_max / alone.hub_instances
    return EqualCost(
        described=described,
        homogeneous=homogeneous,
        best_mix=best_mix,
        gain=described.lambda_max / homogeneous.lambda_max - 1,
        gain_of_best_mix=best_mix.lambda_max / homogeneous.lambda_max - 1,
        even_at_ratio=(described.lambda_max / per_instance - system.hub_instances) / system.offload_instances,
    )


def _alone(system: System, budget: float) -> System:
    """Return the hub's first pool with as many instances as the budget allows."""
    first = system.hub[0]
    count = _affordable(first, budget)
    lone = msgspec.structs.replace(system, links=(), offload=(), hub=(_sized(first, count),))
    if count < 2:
        raise ConfigError(
            f"hub.{first.name}.costPerHour is {first.cost_per_hour:g}: {budget:g} an hour buy {count} of it, "
            "and alone it takes one to prefill and one to decode; check costPerHour of every pool"
        )
    return lone


def _best_mix(system: System, workload: Workload, best: Bought) -> Bought:
    """Return the best of what is given and of every mix that costs no more than the system."""
    budget = sum(_cost(pool) * pool.instances for pool in (*system.offload, *system.hub))
    bounds = [(optimum.fractional(mix, workload).lambda_max, mix) for mix in _mixes(system, budget)]
    for bound, mix in sorted(bounds, key=operator.itemgetter(0), reverse=True):
        if bound <= best.lambda_max:
            break
        best = max(best, _bought(mix, optimum.best(mix, workload)), key=_worth)
    return best


def _worth(one: Bought) -> tuple[float, float]:
    return one.lambda_max, -one.cost_per_hour


def _mixes(system: System, budget: float) -> Iterable[System]:
    """Yield systems within the budget to which no instance of the last hub pool could be added."""
    *free, last = (*system.offload, *system.hub)
    tried = round(MAX_MIXES ** (1 / len(free)))
    most = [_affordable(pool, budget) for pool in free]
    for counts in itertools.product(*(range(0, one + 1, one // tried + 1) for one in most)):
        left = budget - sum(_cost(pool) * number for pool, number in zip(free, counts, strict=True))
        made = _with_counts(system, (*counts, _affordable(last, left)))
        if left >= -_ROUNDING and made.hub_instances >= (1 if made.offload else 2):
            yield made


def _with_counts(system: System, counts: Sequence[int]) -> System:
    far, near = counts[: len(system.offload)], counts[len(system.offload) :]
    offload = [
        msgspec.structs.replace(pool, instances=number) for pool, number in zip(system.offload, far, strict=True)
    ]
    hub = [_sized(pool, number) for pool, number in zip(system.hub, near, strict=True)]
    return msgspec.structs.replace(
        system,
        offload=tuple(pool for pool in offload if pool.instances),
        hub=tuple(pool for pool in hub if pool.instances),
    )


def _sized(pool: HubPool, instances: int) -> HubPool:
    """Return the pool with so many instances; what it had to keep for a role was said of another size."""
    return msgspec.structs.replace(pool, instances=instances, min_prefill=0, min_decode=0)


def _bought(system: System, plan: Plan) -> Bought:
    pools = (*system.offload, *system.hub)
    return Bought(
        instances={pool.name: pool.instances for pool in pools},
        cost_per_hour=sum(_cost(pool) * pool.instances for pool in pools),
        lambda_max=plan.lambda_max,
        threshold_tokens=plan.threshold_tokens,
        n_p=plan.n_p,
        n_d=plan.n_d,
    )


def _affordable(pool: OffloadPool | HubPool, budget: float) -> int:
    return max(0, math.floor(budget / _cost(pool) + _ROUNDING))


def _cost(pool: OffloadPool | HubPool) -> float:
    return pool.cost_per_hour or 0.0
