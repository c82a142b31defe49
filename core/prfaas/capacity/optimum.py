"""The best plan of a system: threshold t and the split of the hub into N_p and N_d, equations (7) and (8).

    (7)  Theta_prfaas / p = Theta_pd-p / (1 - p)        neither kind of prefill waits for the other
    (8)  Theta_prfaas + Theta_pd-p = Theta_pd-d         neither prefill nor decode waits for the other

With t the left side of (7) rises and the right side falls. So for a given split the best t, where they cross, is found
by bisection over the workload's lengths. Instances are whole, so (8) holds only nearly: every split is tried. Several
hardware kinds in the hub multiply the splits, and beyond a bound the search refuses instead of running for hours. Most
splits cannot surpass the best one so far, which is seen without a bisection: their decode carries less, or their hub
does with any threshold at which the offload pools would not.

A *fractional* plan lets instances of the hub give part of their time to prefill, so that (8) holds exactly. An integer
split leaves up to an instance idle on the side that does not limit.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from prfaas.capacity import equations
from prfaas.capacity.equations import Split
from prfaas.capacity.system import NEVER_PREFILLS, HubPool, System
from prfaas.capacity.workload import Moments, Workload
from prfaas.errors import ConfigError

MAX_SPLITS: Final = 50_000


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """A threshold, a split, and what they carry in requests a second; a stage without instances carries 0."""

    threshold_tokens: int | None
    """None: no threshold decides, because all prompts go the same way."""
    n_prfaas: int
    n_p: float
    n_d: float
    theta_prfaas: float
    theta_pd_p: float
    theta_pd_d: float
    lambda_max: float
    offloaded_fraction: float
    egress_gbps: float
    """Of all links together, at lambda_max."""


class Plan(Throughput, frozen=True, kw_only=True):
    """The same, with the split by pool."""

    split: dict[str, float]
    """Instances of each pool of the hub that prefill."""


def best(system: System, workload: Workload) -> Plan:
    """Return the plan of whole instances that carries most; raises ConfigError where none serves, or too many exist."""
    found = plan_for(system, workload, _rounded(system, fractional(system, workload).split))
    below = _below_all_that_surpass(system, workload, found)
    for split in _splits(system):
        hub = min(equations.theta_pd_d(system, split), equations.local_arrivals(system, below, split))
        if hub >= found.lambda_max:
            better = _highest((found, plan_for(system, workload, split)))
            if better is not found:
                found, below = better, _below_all_that_surpass(system, workload, better)
    return _serving(found)


def fractional(system: System, workload: Workload) -> Plan:
    """Return the plan with the highest lambda_max if instances of the hub may divide their time between both roles."""

    def hub_arrivals(threshold_tokens: float) -> float:
        below = workload.below(threshold_tokens)
        split = _divided(system, below)
        return min(equations.local_arrivals(system, below, split), equations.theta_pd_d(system, split))

    # The hub with its best division falls with t, as each division of it does.
    thresholds = _around_crossing(system, workload, hub_arrivals)
    divided = [(t, _divided(system, workload.below(t))) for t in thresholds]
    return _serving(_highest(plan_at(system, workload, t, split) for t, split in divided))


def plan_for(system: System, workload: Workload, split: Split) -> Plan:
    """Return the best plan of a given split: its threshold by equation (7)."""

    def prefill_arrivals(threshold_tokens: float) -> float:
        return equations.local_arrivals(system, workload.below(threshold_tokens), split)

    thresholds = _around_crossing(system, workload, prefill_arrivals)
    return _highest(plan_at(system, workload, t, split) for t in thresholds)


def plan_at(system: System, workload: Workload, threshold_tokens: int, split: Split) -> Plan:
    above, below = workload.above(threshold_tokens), workload.below(threshold_tokens)
    arrivals = equations.lambda_max(system, workload, threshold_tokens, split)
    n_p = sum(split.values())
    egress = equations.egress_mbps(equations.offload_shares(system, above), above, arrivals)
    return Plan(
        threshold_tokens=threshold_tokens if above and below else None,
        n_prfaas=system.offload_instances,
        n_p=n_p,
        n_d=system.hub_instances - n_p,
        theta_prfaas=equations.theta_prfaas(system, above),
        theta_pd_p=equations.theta_pd_p(system, below, split),
        theta_pd_d=equations.theta_pd_d(system, split),
        lambda_max=arrivals,
        offloaded_fraction=above.share,
        egress_gbps=sum(egress.values()) / 1000,
        split=dict(split),
    )


def hub_alone(system: System) -> System:
    """Return the hub as it stands, without what offloads for it."""
    return msgspec.structs.replace(system, links=(), offload=())


def homogeneous(system: System) -> System:
    """Return the baseline without offload: the hub, with each offload instance replaced by one of its first pool.

    It is the first one whose prefills are known. Raises ConfigError where there is none.
    """
    first = next((pool for pool in system.hub if pool.profile != NEVER_PREFILLS), None)
    if first is None:
        raise ConfigError("no prefill of the hub's instances was measured; give a pool of it a profile")
    grown = msgspec.structs.replace(first, instances=first.instances + system.offload_instances)
    return msgspec.structs.replace(
        hub_alone(system), hub=tuple(grown if pool is first else pool for pool in system.hub)
    )


def naive(system: System, workload: Workload) -> Plan:
    """Return the baseline that offloads every prompt: all of the hub decodes, and no threshold decides."""
    return _serving(plan_at(system, workload, 0, {pool.name: float(pool.min_prefill) for pool in system.hub}))


def _highest(plans: Iterable[Plan]) -> Plan:
    """Return the plan that carries most; among equals, the one with most room for prefill."""
    return max(plans, key=lambda plan: (plan.lambda_max, plan.theta_prfaas + plan.theta_pd_p))


def _serving(plan: Plan) -> Plan:
    if not 0 < plan.lambda_max < math.inf:
        raise ConfigError(
            f"no split of the hub's {plan.n_p + plan.n_d:g} instances serves: one must decode, and one prefill "
            "where no offload pool does; raise instances, or lower minPrefill or minDecode"
        )
    return plan


def _splits(system: System) -> Iterable[Split]:
    """Yield every division of the hub into whole prefill and decode instances."""
    choices = [range(pool.min_prefill, pool.instances - pool.min_decode + 1) for pool in system.hub]
    count = math.prod(max(0, choice.stop - choice.start) for choice in choices)  # len() has a limit
    if count > MAX_SPLITS:
        raise ConfigError(
            f"hub: {len(choices)} pools can be split in {count} ways, and {MAX_SPLITS} are searched; "
            "raise minPrefill and minDecode, or merge pools"
        )
    for counts in itertools.product(*choices):
        yield {pool.name: float(n) for pool, n in zip(system.hub, counts, strict=True)}


def _rounded(system: System, split: Split) -> Split:
    """Return the division in whole instances that is nearest."""
    return {
        pool.name: float(min(max(round(split[pool.name]), pool.min_prefill), pool.instances - pool.min_decode))
        for pool in system.hub
    }


def _below_all_that_surpass(system: System, workload: Workload, found: Plan) -> Moments:
    """Return the prompts that stay in the hub at every threshold at which the offload pools bear what the plan does."""
    lengths = (0, *workload.lengths)

    def bears_as_much(threshold_tokens: int) -> bool:
        return equations.offload_arrivals(system, workload.above(threshold_tokens)) >= found.lambda_max

    place = bisect_left(lengths, True, hi=len(lengths) - 1, key=bears_as_much)
    return workload.below(lengths[place])


def _around_crossing(system: System, workload: Workload, local: Callable[[float], float]) -> list[int]:
    """Return the thresholds, lengths or 0, on both sides of where offload pools begin to bear more than the hub.

    `local` returns the requests a second that the hub bears with threshold t; it must not rise with t.
    """
    if not system.offload:
        return [workload.max_tokens]
    lengths = (0, *workload.lengths)

    def prefill_carries_more(threshold_tokens: int) -> bool:
        return equations.offload_arrivals(system, workload.above(threshold_tokens)) >= local(threshold_tokens)

    # At the highest nothing is offloaded, which bears anything.
    place = bisect_left(lengths, True, hi=len(lengths) - 1, key=prefill_carries_more)
    return [lengths[place], lengths[max(0, place - 1)]]


def _divided(system: System, below: Moments) -> Split:
    """Return the division of the hub, in parts of instances, that bears most requests of which `below` prefill there.

    Time goes to prefill first where it is worth most beside what it would decode, until both roles bear the same.
    """
    split = {pool.name: float(pool.min_prefill) for pool in system.hub}
    if not below:
        return split
    seconds = {pool.name: equations.mean_seconds(pool.profile, below) for pool in system.hub}

    def advantage(pool: HubPool) -> float:
        return 1 / (seconds[pool.name] * pool.decode_rate(system.output_tokens))

    for pool in sorted(system.hub, key=advantage, reverse=True):
        prefill = equations.local_arrivals(system, below, split)
        decode = equations.theta_pd_d(system, split)
        each = 1 / (seconds[pool.name] * below.share) + pool.decode_rate(system.output_tokens)
        room = pool.instances - pool.min_decode - pool.min_prefill
        split[pool.name] += min(float(room), max(0.0, (decode - prefill) / each))
    return split
