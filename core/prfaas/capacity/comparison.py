"""Compares a planned system with the hub as it stands and with the paper's baselines, and adds what Table 6 omits.

*Hub alone* is what there is without offload pools. The baselines of the paper's Table 6 have as many instances as the
planned system: *homogeneous* prefills everything in the hub, on the hub's own hardware, and *naive heterogeneous*
offloads everything. Beyond the table stand a plan whose instances divide their time between roles, and the bound that
no policy exceeds. Then come the time to the first token under load, the rate within an SLO, the systems that cost the
same, what other links would change, and the verdict.

A table with as many instances of different kinds flatters the dearer kind. So the last comparison gives every system
the hourly cost of the described one, in whole instances. *Homogeneous* buys instances of the hub's first pool only,
*best mix* any number of each pool. Links are taken as they are, and as free. Prices are the reader's: their ratio
decides. There are many mixes, each with many splits. Instances that divide their time bound what a mix can carry, and
that bound is quick to compute. So mixes are tried in its order, until the best one found is above the next bound.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from prfaas.capacity import equations, optimum, sweep, ttft, verdict
from prfaas.capacity.optimum import Plan, Throughput
from prfaas.capacity.planfile import SYSTEMS, PlanFile
from prfaas.capacity.sweep import LinkPoint
from prfaas.capacity.system import HubPool, OffloadPool, System, in_use
from prfaas.capacity.ttft import FirstToken
from prfaas.capacity.verdict import Planned, Verdict
from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError

LOADS: Final = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
MAX_MIXES: Final = 1_000
"""Counts go in steps where the budget allows more mixes."""
_ROUNDING: Final = 1e-9
_MOST: Final = 1e18
"""Instances that any budget buys at most: an absurd price must not make them infinite."""


class Figures(Throughput, frozen=True, kw_only=True):
    """One system's column of Table 6. The times are the paper's: prefill and transfer, and nothing waits."""

    ttft_mean_seconds: float
    ttft_p90_seconds: float


class TtftUnderLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The time to the first token, with waits, at a share of lambda_max."""

    load: float
    arrivals_per_second: float
    ttft_mean_seconds: float
    ttft_p50_seconds: float
    ttft_p90_seconds: float
    ttft_p99_seconds: float


class BudgetedSystem(msgspec.Struct, frozen=True, kw_only=True):
    """One system within the budget."""

    instances: dict[str, int]
    """By pool."""
    cost_per_hour: float
    lambda_max: float
    threshold_tokens: int | None
    n_p: float
    n_d: float


class EqualCost(msgspec.Struct, frozen=True, kw_only=True):
    """The described system beside those of the same cost, and its gain over the hub only."""

    described: BudgetedSystem
    homogeneous: BudgetedSystem
    best_mix: BudgetedSystem
    gain: float
    """Lambda_max of the described system over that of the homogeneous one, less 1."""
    gain_of_best_mix: float
    even_at_ratio: float
    """Price of an offload instance, in hub instances, at which both serve as much, were instances divisible."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole table. Systems that need offload pools are None where there are none."""

    verdict: Verdict
    hub_alone: Figures | None = None
    """None: the hub alone cannot serve; a note says why."""
    homogeneous: Figures | None = None
    """None: no prefill of the hub's instances is known; a note says so."""
    equal_cost: EqualCost | None = None
    """None: no costPerHour is given."""
    naive_heterogeneous: Figures | None = None
    prfaas_pd: Figures | None = None
    fractional: Figures
    """The best system of the file with instances that divide their time."""
    fractional_gain: float
    """Its lambda_max over that with whole instances."""
    lambda_bound: float
    """No policy carries more (a linear programme's bound)."""
    prices: dict[str, float]
    """The worth of each pool and link, in requests a second; together they are the bound."""
    queueing: dict[str, list[TtftUnderLoad]]
    arrivals_within_slo: dict[str, float | None] | None = None
    """By system; None: it keeps slo.ttftMillis at no rate."""
    over_links: tuple[LinkPoint, ...]
    notes: list[str]

    def systems(self) -> dict[str, Figures]:
        """Return the hub alone and the systems of Table 6, those that exist, by name."""
        return {name: figures for name in SYSTEMS if (figures := getattr(self, name)) is not None}


def compare(file: PlanFile) -> Comparison:
    """Plan a system and its baselines; raises ConfigError where nothing can serve, or no rate keeps the SLO."""
    file = msgspec.structs.replace(file, system=in_use(file.system))
    system, workload = file.system, file.workload
    plans, notes = _plans(system, workload)
    ours = verdict.planned(plans).plan
    fractional = optimum.fractional(system, workload)
    bound = equations.find_bound(system, workload)
    return Comparison(
        verdict=verdict.judge(file, plans),
        **{name: _figures(one, workload, plan) for name, (one, plan) in plans.items()},
        equal_cost=compare_costs(system, workload),
        fractional=_figures(system, workload, fractional),
        fractional_gain=fractional.lambda_max / ours.lambda_max,
        lambda_bound=bound.lambda_max,
        prices=bound.prices,
        queueing={name: _loaded(one, workload, plan) for name, (one, plan) in plans.items()},
        arrivals_within_slo=_within_slo(file, plans),
        over_links=sweep.over_links(system, workload, verdict.base_rate(plans)),
        notes=[*notes, *_notes(system, workload, ours), *file.notes],
    )


def _plans(system: System, workload: Workload) -> tuple[dict[str, Planned], list[str]]:
    """Return the plan of each system that there is, and a note for each that cannot serve."""
    plans: dict[str, Planned] = {}
    notes: list[str] = []
    try:
        plans["hub_alone"] = _planned(optimum.hub_alone(system), workload)
    except ConfigError as error:
        if not system.offload:
            raise
        notes.append(f"Hub alone: {error}.")
    try:
        plans["homogeneous"] = _planned(optimum.homogeneous(system), workload)
    except ConfigError as error:
        if not system.offload:
            raise
        notes.append(f"Homogeneous: {error}.")
    if system.offload:
        plans["naive_heterogeneous"] = Planned(system, optimum.naive(system, workload))
        plans["prfaas_pd"] = _planned(system, workload)
    return plans, notes


def _planned(system: System, workload: Workload) -> Planned:
    return Planned(system, optimum.best(system, workload))


def _figures(system: System, workload: Workload, plan: Plan) -> Figures:
    first = ttft.unloaded(system, workload, plan)
    carried = {name: getattr(plan, name) for name in Throughput.__struct_fields__}
    for name in ("n_p", "n_d"):
        carried[name] = int(carried[name]) if carried[name].is_integer() else carried[name]
    return Figures(**carried, ttft_mean_seconds=first.mean_seconds, ttft_p90_seconds=first.p90_seconds)


def _loaded(system: System, workload: Workload, plan: Plan) -> list[TtftUnderLoad]:
    found: list[TtftUnderLoad] = []
    for load in LOADS:
        arrivals = load * plan.lambda_max
        first = ttft.queued(system, workload, plan, arrivals)
        times = {f"ttft_{name}": getattr(first, name) for name in FirstToken.__struct_fields__}
        found.append(TtftUnderLoad(load=load, arrivals_per_second=arrivals, **times))
    return found


def _within_slo(file: PlanFile, plans: dict[str, Planned]) -> dict[str, float | None] | None:
    """Return the rate at which each system's P90 keeps the SLO. The planned system has to keep it at some rate."""
    if file.slo.ttft_millis is None:
        return None
    rates: dict[str, float | None] = {}
    for name, one in plans.items():
        try:
            rates[name] = ttft.arrivals_within(one.system, file.workload, one.plan, file.slo.ttft_millis / 1000)
        except ConfigError:
            if one is verdict.planned(plans):
                raise
            rates[name] = None
    return rates


def _notes(system: System, workload: Workload, plan: Plan) -> list[str]:
    notes: list[str] = []
    above = workload.above(plan.threshold_tokens) if plan.threshold_tokens is not None else workload.above(0)
    for link in system.links:
        demand = sum(equations.egress_demand_mbps(pool, above) for pool in system.offload if pool.link == link.name)
        if demand > link.capacity_mbps:
            notes.append(
                f"links.{link.name}.capacityMbps, {link.capacity_mbps:g}, limits offload: its pools could send "
                f"{demand:.0f} Mbit/s. If the figure is in megabytes a second, multiply it by 8."
            )
    return notes + profile_notes(system, workload)


def profile_notes(system: System, workload: Workload) -> list[str]:
    """Return a warning for each profile that is used far beyond its measurements, or does not fit them."""
    notes: list[str] = []
    for pool in (*system.offload, *system.hub):
        known = pool.profile.max_tokens
        if 0 < 2 * known < workload.max_tokens:
            notes.append(
                f"The profile of {pool.name} was measured up to {known} tokens; prompts reach {workload.max_tokens}, "
                "where it is a guess."
            )
        if pool.profile.relative_error > 0.1:
            notes.append(
                f"The profile of {pool.name} misses its points by {pool.profile.relative_error:.0%} in the mean."
            )
    return notes


def compare_costs(system: System, workload: Workload) -> EqualCost | None:
    """Return the comparison; None where nothing is offloaded, or no pool has a price.

    Raises ConfigError where only some pools have a price, or the money buys no hub.
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
    described = _budgeted(system, optimum.best(system, workload))
    alone = _alone(system, described.cost_per_hour)
    homogeneous = _budgeted(alone, optimum.best(alone, workload))
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
    if not 2 <= count <= optimum.MAX_SPLITS:
        raise ConfigError(
            f"hub.{first.name}.costPerHour is {first.cost_per_hour:g}: {budget:g} an hour buy {count} of it, "
            f"and alone it takes 2 to {optimum.MAX_SPLITS}, one to prefill and one to decode; "
            "check costPerHour of every pool"
        )
    return lone


def _best_mix(system: System, workload: Workload, best: BudgetedSystem) -> BudgetedSystem:
    """Return the best of what is given and of every mix that costs no more than the system."""
    budget = sum(_cost(pool) * pool.instances for pool in (*system.offload, *system.hub))
    bounds = [(optimum.fractional(mix, workload).lambda_max, mix) for mix in _mixes(system, budget)]
    for bound, mix in sorted(bounds, key=operator.itemgetter(0), reverse=True):
        if bound <= best.lambda_max:
            break
        best = max(best, _budgeted(mix, optimum.best(mix, workload)), key=_worth)
    return best


def _worth(one: BudgetedSystem) -> tuple[float, float]:
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
    return in_use(msgspec.structs.replace(system, offload=tuple(offload), hub=tuple(hub)))


def _sized(pool: HubPool, instances: int) -> HubPool:
    """Return the pool with so many instances, and without minima: these were given for another size."""
    return msgspec.structs.replace(pool, instances=instances, min_prefill=0, min_decode=0)


def _budgeted(system: System, plan: Plan) -> BudgetedSystem:
    pools = (*system.offload, *system.hub)
    return BudgetedSystem(
        instances={pool.name: pool.instances for pool in pools},
        cost_per_hour=sum(_cost(pool) * pool.instances for pool in pools),
        lambda_max=plan.lambda_max,
        threshold_tokens=plan.threshold_tokens,
        n_p=plan.n_p,
        n_d=plan.n_d,
    )


def _affordable(pool: OffloadPool | HubPool, budget: float) -> int:
    return max(0, math.floor(min(budget / _cost(pool), _MOST) + _ROUNDING))


def _cost(pool: OffloadPool | HubPool) -> float:
    return pool.cost_per_hour or 0.0
