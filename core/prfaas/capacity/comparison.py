"""A planned system beside its two baselines, as in the paper's Table 6, and what the table leaves out.

The baselines have as many instances: *homogeneous* prefills everything in the hub, on the hub's own hardware, and
*naive heterogeneous* offloads everything. Beyond the table stand a plan whose instances divide their time between
roles, the bound that no policy exceeds, the time to the first token under load, the rate that an SLO allows, and what
the same money buys.
"""

from typing import Final

import msgspec

from prfaas.capacity import bound, equalcost, equations, optimum, ttft
from prfaas.capacity.equalcost import EqualCost
from prfaas.capacity.optimum import Carried, Plan
from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.system import System
from prfaas.capacity.ttft import FirstToken
from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError

LOADS: Final = (0.5, 0.7, 0.9)


class Figures(Carried, frozen=True, kw_only=True):
    """One system's column of Table 6. The times are the paper's: prefill and transfer, and nothing waits."""

    ttft_mean_seconds: float
    ttft_p90_seconds: float


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The time to the first token, with waits, at a share of lambda_max."""

    load: float
    arrivals_per_second: float
    ttft_mean_seconds: float
    ttft_p50_seconds: float
    ttft_p90_seconds: float
    ttft_p99_seconds: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All of it. Systems that do not exist, for want of offload pools, are None."""

    prfaas_pd: Figures | None = None
    homogeneous: Figures
    naive_heterogeneous: Figures | None = None
    fractional: Figures
    """The best system of the file with instances that divide their time."""
    fractional_gain: float
    """Its lambda_max over that with whole instances."""
    lambda_bound: float
    """No policy carries more (a linear programme's bound)."""
    prices: dict[str, float]
    """What the bound says the pools and links are worth, in requests a second each; together they are the bound."""
    queueing: dict[str, list[Loaded]]
    arrivals_within_slo: dict[str, float | None] | None = None
    """By system; None: it keeps slo.ttftMillis at no rate."""
    equal_cost: EqualCost | None = None
    """None: no costPerHour is given."""
    notes: list[str]

    def systems(self) -> dict[str, Figures]:
        """Return the systems of Table 6 that exist, by name."""
        found = {
            "prfaas_pd": self.prfaas_pd,
            "homogeneous": self.homogeneous,
            "naive_heterogeneous": self.naive_heterogeneous,
        }
        return {name: figures for name, figures in found.items() if figures is not None}


def compare(file: PlanFile) -> Comparison:
    """Plan a system and its baselines.

    Raises:
        ConfigError: nothing can serve, or no rate keeps the SLO.

    """
    system, workload = file.system, file.workload
    plans: dict[str, tuple[System, Plan]] = {}
    if system.offload:
        plans["prfaas_pd"] = system, optimum.best(system, workload)
    alone = optimum.homogeneous(system)
    plans["homogeneous"] = alone, optimum.best(alone, workload)
    if system.offload:
        plans["naive_heterogeneous"] = system, optimum.naive(system, workload)
    ours = next(iter(plans.values()))[1]
    fractional = optimum.fractional(system, workload)
    limit = bound.bound(system, workload)
    return Comparison(
        **{name: _figures(one, workload, plan) for name, (one, plan) in plans.items()},
        fractional=_figures(system, workload, fractional),
        fractional_gain=fractional.lambda_max / ours.lambda_max,
        lambda_bound=limit.lambda_max,
        prices=limit.prices,
        queueing={name: _loaded(one, workload, plan) for name, (one, plan) in plans.items()},
        arrivals_within_slo=_within_slo(file, plans),
        equal_cost=equalcost.compare(system, workload),
        notes=_notes(system, workload, ours),
    )


def _figures(system: System, workload: Workload, plan: Plan) -> Figures:
    first = ttft.unloaded(system, workload, plan)
    carried = {name: getattr(plan, name) for name in Carried.__struct_fields__}
    for name in ("n_p", "n_d"):
        carried[name] = int(carried[name]) if carried[name].is_integer() else carried[name]
    return Figures(
        **carried,
        ttft_mean_seconds=first.mean_seconds,
        ttft_p90_seconds=first.p90_seconds,
    )


def _loaded(system: System, workload: Workload, plan: Plan) -> list[Loaded]:
    def at(load: float, first: FirstToken) -> Loaded:
        return Loaded(
            load=load,
            arrivals_per_second=load * plan.lambda_max,
            ttft_mean_seconds=first.mean_seconds,
            ttft_p50_seconds=first.p50_seconds,
            ttft_p90_seconds=first.p90_seconds,
            ttft_p99_seconds=first.p99_seconds,
        )

    return [at(load, ttft.queued(system, workload, plan, load * plan.lambda_max)) for load in LOADS]


def _within_slo(file: PlanFile, plans: dict[str, tuple[System, Plan]]) -> dict[str, float | None] | None:
    """Return the rate at which each system's P90 keeps the SLO; that the planned one does at some rate is demanded."""
    if file.slo.ttft_millis is None:
        return None
    rates: dict[str, float | None] = {}
    for name, (system, plan) in plans.items():
        try:
            rates[name] = ttft.arrivals_within(system, file.workload, plan, file.slo.ttft_millis / 1000)
        except ConfigError:
            if not rates:
                raise
            rates[name] = None
    return rates


def _notes(system: System, workload: Workload, plan: Plan) -> list[str]:
    """Say what the figures rest on where that is thin."""
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
    """Say which profiles are used far beyond what was measured, or do not fit it."""
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
