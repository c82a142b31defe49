"""The answer to what was asked, from the rows of all systems: the most that each serves, and how they compare."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from prfaas.capacity import ttft
from prfaas.capacity.planfile import PlanFile
from prfaas.errors import ConfigError
from prfaas.evaluate.case import COMPARED_AT
from prfaas.evaluate.expected import PlanFigures
from prfaas.evaluate.limit import Bounds, RateLimit, limit_of, ratio_of
from prfaas.evaluate.rows import LoadFigures, LoadRow
from prfaas.evaluate.steady import Sampled, quotient
from prfaas.simulate import setup as setups
from prfaas.simulate.scenario import PolicyName

SATURATED_AT: Final = 1.3
"""Of what a plan carries: surely too much for a system, and not so much that long prompts never end."""
_SAME_RATE: Final = 0.01
"""Share by which two rates may differ where first tokens are compared."""
_NEAR: Final = 0.02
"""Of what the plan of homogeneous carries: so far from COMPARED_AT they may be compared."""


class PolicyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a policy serves, in requests a second. None: no run was overloaded, or no rate keeps the limit."""

    saturated: Sampled | None
    saturated_counted: Sampled | None
    """The same, with each request counted as one."""
    saturated_load: float | None
    """At which it was measured: of overloaded ones, the nearest to SATURATED_AT."""
    saturated_planned: float
    """The plan's lambda_max."""
    saturated_simulated: Sampled | None
    limit: RateLimit
    limit_planned: float | None
    limit_simulated: RateLimit


class PolicyRatio(msgspec.Struct, frozen=True, kw_only=True):
    """By how many times PrfaaS-PD serves more than another policy: saturated, and within the limit of P90."""

    saturated: Sampled | None
    saturated_planned: float
    saturated_simulated: Sampled | None
    limit: Bounds
    limit_planned: float | None
    limit_simulated: Bounds


class FirstTokenRatio(msgspec.Struct, frozen=True, kw_only=True):
    """P90 of the first token of PrfaaS-PD and of homogeneous at the same rate."""

    rate_per_second: float
    of_plan: float
    """The rate's share of what the plan of homogeneous carries."""
    of_measured: float | None
    """Its share of what homogeneous serves when it is saturated."""
    ours: Sampled
    homogeneous: Sampled
    ratio: Sampled
    planned: float | None
    simulated: float | None


def answer_of(file: PlanFile, rows: Sequence[LoadRow], limit_seconds: float) -> PolicyAnswer:
    system, plan = setups.planned(file, rows[0].policy)
    try:
        planned = ttft.arrivals_within(system, file.workload, plan, limit_seconds)
    except ConfigError:  # not even alone a request keeps it
        planned = None
    simulated = [row.simulated_result for row in rows if row.simulated_result]
    saturated = [row for row in rows if row.result.saturated_per_second]
    nearest = min(saturated, key=lambda row: abs(row.load - SATURATED_AT), default=None)
    simulated_at = nearest.simulated_result if nearest else None
    return PolicyAnswer(
        saturated=nearest.result.saturated_per_second if nearest else None,
        saturated_counted=nearest.result.saturated_counted if nearest else None,
        saturated_load=nearest.load if nearest else None,
        saturated_planned=plan.lambda_max,
        saturated_simulated=simulated_at.saturated_per_second if simulated_at else None,
        limit=limit_of(row.result.verdict for row in rows),
        limit_planned=planned,
        limit_simulated=limit_of(seen.verdict for seen in simulated),
    )


def ratios_of(answers: Mapping[PolicyName, PolicyAnswer]) -> dict[PolicyName, PolicyRatio]:
    ours = answers.get("threshold")
    found: dict[PolicyName, PolicyRatio] = {}
    others: tuple[PolicyName, ...] = ("homogeneous", "naive")
    for policy in others:
        theirs = answers.get(policy)
        if ours is not None and theirs is not None:
            found[policy] = PolicyRatio(
                saturated=_quotient(ours.saturated, theirs.saturated),
                saturated_planned=ours.saturated_planned / theirs.saturated_planned,
                saturated_simulated=_quotient(ours.saturated_simulated, theirs.saturated_simulated),
                limit=ratio_of(ours.limit.bounds, theirs.limit.bounds),
                limit_planned=_divided(ours.limit_planned, theirs.limit_planned),
                limit_simulated=ratio_of(ours.limit_simulated.bounds, theirs.limit_simulated.bounds),
            )
    return found


def compare_first_tokens(rows: Sequence[LoadRow], answers: Mapping[PolicyName, PolicyAnswer]) -> FirstTokenRatio | None:
    """Return the pair at the same rate that is nearest to COMPARED_AT of what the plan of homogeneous carries, if one
    is near."""
    if "homogeneous" not in answers:
        return None
    carried = answers["homogeneous"].saturated_planned
    pairs = [
        (ours, theirs, ours.measured.ttft_p90_seconds, theirs.measured.ttft_p90_seconds)
        for ours in rows
        for theirs in rows
        if (ours.policy, theirs.policy) == ("threshold", "homogeneous") and ours.measured and theirs.measured
    ]
    pairs = [
        pair
        for pair in pairs
        if abs(pair[0].rate_per_second / pair[1].rate_per_second - 1) <= _SAME_RATE
        and abs(pair[1].load - COMPARED_AT) <= _NEAR
    ]
    if not pairs:
        return None
    pair = min(pairs, key=lambda pair: abs(pair[1].rate_per_second - COMPARED_AT * carried))
    ours, theirs, our_p90, their_p90 = pair
    saturated = answers["homogeneous"].saturated
    return FirstTokenRatio(
        rate_per_second=theirs.rate_per_second,
        of_plan=theirs.rate_per_second / carried,
        of_measured=theirs.rate_per_second / saturated.value if saturated else None,
        ours=our_p90,
        homogeneous=their_p90,
        ratio=quotient(our_p90, their_p90),
        planned=_divided(_p90(ours.planned), _p90(theirs.planned)),
        simulated=_divided(_p90(ours.simulated), _p90(theirs.simulated)),
    )


def _quotient(above: Sampled | None, below: Sampled | None) -> Sampled | None:
    return quotient(above, below) if above and below else None


def _divided(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _p90(figures: LoadFigures | PlanFigures | None) -> float | None:
    found = figures.ttft_p90_seconds if figures else None
    return found.value if isinstance(found, Sampled) else found
