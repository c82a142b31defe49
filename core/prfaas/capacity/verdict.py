"""What a plan comes to: whether offloading pays over the hub as it stands, from where on, and what limits it.

*What limits* is the stage of which a tenth more serves most, with the threshold and the split that are best then.
Decode is one stage. Prefill is the other, at home and away: the threshold fills both together. It is called *link*
where the offload pools could prefill more than their links carry. Decode is called *memory* where a batch that is
a tenth larger would not fit into a decoding instance.

A rate of requests is a mean over prompts. A single prompt may be worse off, since it waits for a slower instance and a
link. So prompts are also looked at by class of length: with the waits of one rate that both systems carry, and alone.
"""

import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from prfaas.capacity import equations, optimum, sweep, ttft
from prfaas.capacity.optimum import Plan
from prfaas.capacity.planfile import PlanFile, request_cache_bytes
from prfaas.capacity.system import HubPool, System
from prfaas.capacity.workload import Workload

LimitedBy = Literal["link", "prefill", "decode", "memory"]
LOAD: Final = 0.7
"""Share of the lower lambda_max at which the times of both systems are compared."""
_FIRST_EDGE_TOKENS: Final = 2048
_EDGE_GROWTH: Final = 4
_MORE: Final = 1.1
"""How much more of a stage is tried."""
_SHORT: Final = 1.02
"""A link is short where the pools behind it could prefill this many times as much."""
_SLOWER: Final = 1.1
"""A lone prompt is slower away from this ratio on."""
_LIMITS: Final[dict[LimitedBy, str]] = {
    "link": "the link limits",
    "prefill": "prefill limits",
    "decode": "decode limits",
    "memory": "memory limits, as no larger batch fits into a decoding instance",
}
_CURES: Final[dict[LimitedBy, str]] = {
    "prefill": "more or faster offload instances would",
    "decode": "more hub instances or larger batches would",
    "memory": "more hub instances or smaller weights would",
}
"""What makes offloading pay where no link does."""


class Planned(NamedTuple):
    """A system with its plan."""

    system: System
    plan: Plan


Plans = Mapping[str, Planned]
"""By the names of planfile.SYSTEMS. Without offload pools the system that was asked for is the homogeneous one."""


class LengthClass(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of a class of lengths, and their mean times to the first token; None where the hub alone serves none.

    The first two have the waits of the verdict's rate; of a lone prompt nothing waits.
    """

    from_tokens: int
    to_tokens: int
    share: float
    """Of all prompts."""
    offloaded: float
    """Share of the class."""
    hub_ttft_seconds: float | None
    ttft_seconds: float
    lone_hub_seconds: float | None
    lone_seconds: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a plan."""

    sentence: str
    gain: float
    """Lambda_max over that of the hub alone, less 1; where it cannot serve, of homogeneous; where that neither, 0."""
    from_tokens: int | None
    """The shortest prompt that is offloaded; None: none is."""
    from_mbps: float | None
    """Of all links together, from which the gain over the hub alone is sweep.PAYS.

    None: at no capacity, or the hub alone cannot serve.
    """
    limit: LimitedBy
    arrivals_per_second: float
    """At which the classes' times are: LOAD of the lower lambda_max."""
    classes: tuple[LengthClass, ...]


def judge(file: PlanFile, plans: Plans) -> Verdict:
    """Judge the planned system against the hub alone."""
    workload, alone, ours = file.workload, plans.get("hub_alone"), planned(plans)
    base = base_rate(plans)
    gain = ours.plan.lambda_max / base - 1
    from_mbps, limit = None, _limit(ours, workload)
    if alone and ours.system.offload:
        from_mbps = sweep.paying_mbps(ours.system, workload, base)
        if gain < sweep.PAYS:
            limit = "link" if from_mbps else _limit_behind(ours.system, workload)
    arrivals = LOAD * min(base, ours.plan.lambda_max)
    found = Verdict(
        sentence="",
        gain=gain,
        from_tokens=ttft.threshold(workload, ours.plan) + 1 if ours.plan.offloaded_fraction else None,
        from_mbps=from_mbps,
        limit=limit,
        arrivals_per_second=arrivals,
        classes=_classes(workload, ours, alone, arrivals),
    )
    sentence = _sentence(found, plans)
    if alone and found.from_tokens:
        sentence += _slower_when_lone(workload, ours, alone)
    return msgspec.structs.replace(found, sentence=sentence)


def planned(plans: Plans) -> Planned:
    """Return the system that was asked for."""
    return plans.get("prfaas_pd") or plans["homogeneous"]


def base_rate(plans: Plans) -> float:
    """Return the requests a second over which a gain is: of the hub alone, or of what is nearest to it."""
    base = plans.get("hub_alone") or plans.get("homogeneous") or planned(plans)
    return base.plan.lambda_max


def _limit(one: Planned, workload: Workload) -> LimitedBy:
    # All rates grow together: a tenth more prefill is a tenth more of everything, with decode left as it was.
    more_decode = _with_steps(one.system, 1 / _MORE, workload)
    more_prefill = _MORE * _with_steps(one.system, _MORE, workload)
    if more_decode >= more_prefill:
        decoding = [pool for pool in one.system.hub if one.plan.split[pool.name] < pool.instances]
        is_short = all(_is_memory_short(pool, one.system.output_tokens, workload) for pool in decoding)
        return "memory" if is_short else "decode"
    above = workload.above(ttft.threshold(workload, one.plan))
    unlimited = equations.theta_prfaas(sweep.unlimited(one.system), above)
    return "link" if unlimited > _SHORT * one.plan.theta_prfaas else "prefill"


def _with_steps(system: System, factor: float, workload: Workload) -> float:
    """Return lambda_max with decode steps so many times as long."""
    hub = [msgspec.structs.replace(pool, step_seconds=factor * pool.step_seconds) for pool in system.hub]
    return optimum.best(msgspec.structs.replace(system, hub=tuple(hub)), workload).lambda_max


def _is_memory_short(pool: HubPool, output_tokens: float, workload: Workload) -> bool:
    """Return whether a batch that is a tenth larger, in whole requests with their answers, would not fit."""
    if pool.memory is None:
        return False
    cache = request_cache_bytes(pool.profile, pool.memory, output_tokens, workload)
    return math.ceil(_MORE * pool.max_batch) * cache > pool.memory.left_bytes


def _limit_behind(system: System, workload: Workload) -> LimitedBy:
    """Return what limits when no link does."""
    unlimited = sweep.unlimited(system)
    return _limit(Planned(unlimited, optimum.best(unlimited, workload)), workload)


def _classes(workload: Workload, ours: Planned, alone: Planned | None, arrivals: float) -> tuple[LengthClass, ...]:
    spans = _spans(workload)
    edges = [*(high for _, high in spans[:-1]), workload.max_tokens]
    threshold = ttft.threshold(workload, ours.plan)

    def means(one: Planned, rate: float) -> list[float]:
        return ttft.mean_by_class(one.system, workload, one.plan, rate, edges)

    loaded, lone = means(ours, arrivals), means(ours, 0.0)
    hub_loaded, hub_lone = (means(alone, arrivals), means(alone, 0.0)) if alone else (None, None)
    return tuple(
        LengthClass(
            from_tokens=max(low + 1, workload.lengths[0]),
            to_tokens=min(high, workload.max_tokens),
            share=_share(workload, low, high),
            offloaded=_share(workload, max(low, threshold), max(high, threshold)) / _share(workload, low, high),
            hub_ttft_seconds=hub_loaded[place] if hub_loaded else None,
            ttft_seconds=loaded[place],
            lone_hub_seconds=hub_lone[place] if hub_lone else None,
            lone_seconds=lone[place],
        )
        for place, (low, high) in enumerate(spans)
    )


def _spans(workload: Workload) -> list[tuple[int, int]]:
    """Return the classes that hold prompts: above the first number of tokens, up to the second."""
    spans: list[tuple[int, int]] = []
    low, high = 0, _FIRST_EDGE_TOKENS
    while low < workload.max_tokens:
        if _share(workload, low, high) > 0:
            spans.append((low, high))
        low, high = high, _EDGE_GROWTH * high
    return spans


def _share(workload: Workload, low: int, high: int) -> float:
    return workload.above(low).share - workload.above(high).share


def _sentence(found: Verdict, plans: Plans) -> str:
    ours, alone, has_homogeneous = planned(plans), plans.get("hub_alone"), "homogeneous" in plans
    rate, limits = ours.plan.lambda_max, _LIMITS[found.limit]
    if not ours.system.offload:
        return f"Nothing can be prefilled away: the hub alone serves {rate:.2f} requests/s; {limits}."
    away = _away(found.from_tokens)
    if alone is None:
        than = f", {_more(found.gain)} than as many instances in the hub" if has_homogeneous else ""
        return f"The hub alone cannot serve. PrfaaS-PD serves {rate:.2f} requests/s{than}: {away}; {limits}."
    more = f"{_more(found.gain)} than the hub alone ({rate:.2f} against {alone.plan.lambda_max:.2f} requests/s)"
    if found.from_mbps is None:
        return f"PrfaaS-PD does not pay: it serves {more}; {limits}. No link changes that: {_CURES[found.limit]}."
    link = _link(ours.system, found.from_mbps)
    if found.gain >= sweep.PAYS:
        return f"PrfaaS-PD serves {more}: {away}, which pays from {link} on; {limits}."
    part = sweep.total_mbps(ours.system) / found.from_mbps
    return (
        f"PrfaaS-PD does not pay: it serves {more}; {limits}. It would pay from {link} on, "
        f"or with caches of {part:.0%} of the bytes."
    )


def _away(from_tokens: int | None) -> str:
    if from_tokens is None:
        return "no prompt is prefilled away"
    if from_tokens == 1:
        return "every prompt is prefilled away"
    return f"prompts from {from_tokens:,} tokens are prefilled away"


def _more(gain: float) -> str:
    return f"{abs(gain):.0%} {'less' if gain < 0 else 'more'}"


def rounded_up(mbps: float) -> float:
    """Return a capacity with two digits that is no less."""
    unit = 10.0 ** (math.floor(math.log10(mbps)) - 1)
    return math.ceil(mbps / unit) * unit


def _link(system: System, mbps: float) -> str:
    name = f"{rounded_up(mbps):,.10g} Mbit/s"
    return f"a link of {name}" if len(system.links) == 1 else f"links of {name} together"


def _slower_when_lone(workload: Workload, ours: Planned, alone: Planned) -> str:
    """Say how much longer a lone prompt takes away, if it does: one nearly as long as the mean of those that leave."""
    threshold = ttft.threshold(workload, ours.plan)
    mean = workload.above(threshold).mean_tokens
    tokens = max(threshold + 1, 1 << (int(mean).bit_length() - 1))
    lone = Workload([tokens], [1.0])

    def seconds(one: Planned, least_tokens: int) -> float:
        plan = optimum.plan_at(one.system, lone, least_tokens, one.plan.split)
        return ttft.mean_by_class(one.system, lone, plan, 0.0, (tokens,))[0]

    away, home = seconds(ours, 0), seconds(alone, tokens)
    if away < _SLOWER * home:
        return ""
    return (
        f" A lone prompt of {tokens:,} tokens takes {away / home:.1f} times as long to its first token "
        f"({_seconds(away)} against {_seconds(home)})."
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.{1 if seconds >= 1 else 2}f} s"
