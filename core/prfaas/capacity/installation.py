"""A running installation as a planner sees it: pools with so many instances each, links, and the load that comes.

A hub's instances that two pools share are one HubPool of the model, whose split is what each pool wants. A pool of its
own is a HubPool that may not be divided. What a change of counts would carry is read off the same equations as
everything else that plans; counts are an argument, so that a change can be computed before it is made.
"""

import math
from collections.abc import Mapping

import msgspec

from prfaas.capacity import optimum, ttft
from prfaas.capacity.optimum import Plan
from prfaas.capacity.system import NEVER_PREFILLS, HubPool, LinkCapacity, OffloadPool, System
from prfaas.capacity.workload import Workload
from prfaas.wire.profile import Profile
from prfaas.wire.routes import PoolRole, Threshold

ReplicaCounts = Mapping[str, int]
"""Instances by pool."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of instances."""

    name: str
    role: PoolRole
    replicas: int
    link: str = ""
    """Of an offload pool, to the hub; empty in the hub."""
    shares: bool = False
    """True for a prefill pool whose instances belong to the decode pool's Deployment."""
    least: int | None = None
    most: int | None = None
    """Bounds of replicas; None: none."""
    profile: Profile | None = None
    """None: not measured. Instances that two pools share have the decode pool's."""
    refusal: str = ""
    """The reason why we may not write its replicas; empty: we may."""


class MeasuredLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The measured workload, and the cost of decoding it: BS_max, T_decode and L_out."""

    workload: Workload
    arrivals_per_second: float
    output_tokens: float
    max_batch: int
    step_seconds: float

    @property
    def decode_rate(self) -> float:
        """Requests a second that one instance decodes."""
        return self.max_batch / (self.step_seconds * self.output_tokens)


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """The pools of one policy, its live links and its threshold. Exactly one pool decodes."""

    pools: tuple[Pool, ...]
    links: tuple[LinkCapacity, ...]
    threshold: Threshold
    load: MeasuredLoad | None
    """None: not known."""

    @property
    def decode(self) -> Pool:
        return next(pool for pool in self.pools if pool.role == "decode")

    @property
    def sharer(self) -> Pool | None:
        """The prefill pool that shares the decode pool's instances."""
        return next((pool for pool in self.pools if pool.shares), None)

    @property
    def counts(self) -> dict[str, int]:
        """Instances that there are to be."""
        return {pool.name: pool.replicas for pool in self.pools}

    def hub_prefill(self, counts: ReplicaCounts) -> int:
        """N_p: instances in the hub that prefill."""
        return sum(counts[pool.name] for pool in self.pools if pool.role == "prefill" and not pool.link)

    def unmeasured(self) -> list[str]:
        """Return the pools with prefill instances of which no profile is known."""
        prefilling = [pool for pool in self.pools if pool.role == "prefill" and pool.replicas]
        return [pool.name for pool in prefilling if not (self.decode if pool.shares else pool).profile]


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The requests a second that given numbers of instances carry."""

    counts: dict[str, int]
    plan: Plan | None = None
    """None if no instance decodes."""
    prefill_per_second: float = 0.0
    """At which the first kind of prefill is full."""
    decode_per_second: float = 0.0
    arrivals_per_second: float = 0.0

    @property
    def lambda_max(self) -> float:
        return min(self.prefill_per_second, self.decode_per_second)

    @property
    def prefill_load(self) -> float:
        """Arrivals as a share of the prefill rate."""
        return _share(self.arrivals_per_second, self.prefill_per_second)

    @property
    def decode_load(self) -> float:
        return _share(self.arrivals_per_second, self.decode_per_second)

    @property
    def busiest(self) -> float:
        return max(self.prefill_load, self.decode_load)


def _share(arrivals: float, capacity: float) -> float:
    if arrivals <= 0:
        return 0.0
    return arrivals / capacity if capacity > 0 else math.inf


def system_of(installation: Installation, load: MeasuredLoad, counts: ReplicaCounts, *, divided: bool = True) -> System:
    """Return the system that so many instances make; pools without instances, profile or link are left out.

    If `divided`, shared instances stay divided as `counts` say; else they may be divided anew.
    """
    links = {link.name for link in installation.links}
    offload = [
        OffloadPool(name=pool.name, profile=profile, instances=counts[pool.name], link=pool.link)
        for pool in installation.pools
        if pool.link in links and counts[pool.name] and (profile := pool.profile)
    ]
    decode, sharer = installation.decode, installation.sharer
    decoding = counts[decode.name]
    prefilling = counts[sharer.name] if sharer is not None and decode.profile else 0

    def in_hub(pool: Pool, profile: Profile, instances: int, min_prefill: int, min_decode: int = 0) -> HubPool:
        return HubPool(
            name=pool.name,
            profile=profile,
            instances=instances,
            max_batch=load.max_batch,
            step_seconds=load.step_seconds,
            min_prefill=min_prefill,
            min_decode=min_decode,
        )

    hub: list[HubPool] = []
    if decoding + prefilling:
        least = (prefilling if divided else 0, decoding if divided or sharer is None else 0)
        hub.append(in_hub(decode, decode.profile or NEVER_PREFILLS, decoding + prefilling, *least))
    others = [pool for pool in installation.pools if pool.role == "prefill" and not pool.link and not pool.shares]
    hub += [in_hub(pool, pool.profile, n, n) for pool in others if (n := counts[pool.name]) and pool.profile]
    offloads = installation.threshold.mode != "Disabled"
    return System(
        links=installation.links if offloads else (),
        offload=tuple(offload) if offloads else (),
        hub=tuple(hub),
        output_tokens=load.output_tokens,
    )


def forecast(installation: Installation, counts: ReplicaCounts) -> Forecast:
    """Return what so many instances carry at their best threshold, or at the policy's own where it is fixed."""
    load = installation.load
    if load is None or not counts[installation.decode.name]:
        return Forecast(counts=dict(counts), arrivals_per_second=load.arrivals_per_second if load else 0.0)
    system = system_of(installation, load, counts)
    plan = _planned(installation, load, system)
    # A share of 0 or 1 of the prompts leaves one kind of prefill without any: it bears anything.
    below, offloaded = 1.0 - plan.offloaded_fraction, plan.offloaded_fraction
    return Forecast(
        counts=dict(counts),
        plan=plan,
        prefill_per_second=min(
            plan.theta_prfaas / offloaded if offloaded > 0 else math.inf,
            plan.theta_pd_p / below if below > 0 else math.inf,
        ),
        decode_per_second=plan.theta_pd_d,
        arrivals_per_second=load.arrivals_per_second,
    )


def ttft_p90_seconds(installation: Installation, seen: Forecast) -> float:
    """Return the predicted P90 of the time to the first token, waits included; infinite where too much arrives."""
    load = installation.load
    if load is None or seen.plan is None or load.arrivals_per_second >= seen.plan.lambda_max:
        return math.inf
    system = system_of(installation, load, seen.counts)
    return ttft.queued(system, load.workload, seen.plan, load.arrivals_per_second).p90_seconds


def _planned(installation: Installation, load: MeasuredLoad, system: System) -> Plan:
    threshold = installation.threshold
    split = {pool.name: float(pool.min_prefill) for pool in system.hub}
    if threshold.mode == "Fixed":
        return optimum.plan_at(system, load.workload, threshold.tokens, split)
    if not system.offload:
        return optimum.plan_at(system, load.workload, load.workload.max_tokens, split)
    plan = optimum.plan_for(system, load.workload, split)
    tokens = plan.threshold_tokens
    if tokens is None:
        return plan
    bounded = min(max(tokens, threshold.min_tokens), threshold.max_tokens)
    return plan if bounded == tokens else optimum.plan_at(system, load.workload, bounded, split)
