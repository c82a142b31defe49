"""The scenario of a run: a system, the split of its hub into roles, the policy, and the faults.

Everything is a frozen value in seconds, bytes, tokens and Mbit/s. A link stands for its member cluster, under the same
name. A scenario says nothing of the requests: they come from a trace or a generator (`prfaas.simulate.arrivals`).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec

from prfaas.capacity.system import HubPool, System, check
from prfaas.errors import ConfigError
from prfaas.names import HUB
from prfaas.routing.facts import CLUSTER_MBPS
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Instance, LinkWatermarks, OnOffloadFailure, PoolRole, Threshold

PolicyName = Literal["threshold", "price", "static", "naive", "homogeneous"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
"""threshold: the short loop moves t. price: it sets prices, by which each request is routed. static: t stays.
naive: everything is offloaded. homogeneous: nothing is."""


class LinkShape(msgspec.Struct, frozen=True, kw_only=True):
    """The real behaviour of a link, whatever capacity was declared for it."""

    round_trip_seconds: float = 0.0
    schedule: tuple[tuple[float, float], ...] = ()
    """From which second on it carries how many Mbit/s, in order of time; 0: it is down."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An instance, or a member cluster with its instances and its link, is gone for some time."""

    at_seconds: float
    for_seconds: float
    name: str
    """An instance's (see `instance_names`) or a link's."""


class ScaledPool(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds within which the long loop scales an offload pool."""

    name: str
    least: int
    most: int


class ConversionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The long loop's settings for conversions, and for pools that it scales, with a policy's own defaults."""

    interval_seconds: float = 60.0
    cooldown_seconds: float = 300.0
    conversion_seconds: float = 1.5
    """Until requests follow a new role."""
    start_seconds: float = 60.0
    """Until a new instance serves."""
    target_load: float = 0.7
    """Of a stage: above it instances are added."""
    scaled: tuple[ScaledPool, ...] = ()
    ttft_seconds: float | None = None
    """Promised P90 of the time to the first token, which no conversion may break; None: none."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a PrfaaSPolicy that a run needs."""

    threshold: Threshold
    watermarks: LinkWatermarks = LinkWatermarks(high_percent=80, low_percent=50)
    short_interval_seconds: int = 1
    stale_after_seconds: int = 10
    on_offload_failure: OnOffloadFailure = "PrefillLocally"
    conversion: ConversionPolicy | None = None
    """None: the split of the hub stays as it began."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One system under one policy. Mappings without an entry mean the defaults: none, or as declared."""

    system: System
    prefill_instances: Mapping[str, int]
    """Instances of each hub pool that prefill at first; the rest decode."""
    policy: Policy
    conditions: Mapping[str, LinkShape] = {}
    """By link."""
    cache_bytes: Mapping[str, float] = {}
    """Memory for prefix blocks and states by cluster: a link's name, or `hub`."""
    failures: tuple[Failure, ...] = ()
    step_tokens: int = 0
    """Tokens of an instance's step; 0: as many as a worker finds best by its profile."""
    cluster_mbps: float = CLUSTER_MBPS
    """What moves between instances of one cluster, such as prefixes."""
    block_tokens: int = 512
    """Tokens of a block, as the arrivals name them."""
    detection_seconds: float = 1.0
    """Time until a dead instance, or a link that carries nothing, is noticed."""
    attempts: int = 4
    """Routes that one request may be given."""

    def validated(self) -> "Scenario":
        """Return this scenario; raises ConfigError with the first field that makes no sense, and what it should be."""
        check(self.system)
        for field, value, fits, want in self._claims():
            if not fits:
                raise ConfigError(f"{field} is {value!r}; it must be {want}")
        return self

    @property
    def offloads(self) -> bool:
        return bool(self.system.offload) and self.policy.threshold.mode != "Disabled"

    @property
    def most_instances(self) -> dict[str, int]:
        """Of each offload pool, also those that only the long loop may start."""
        scaled = self.policy.conversion.scaled if self.policy.conversion else ()
        return {pool.name: pool.instances for pool in self.system.offload} | {one.name: one.most for one in scaled}

    @property
    def profiles(self) -> dict[str, Profile]:
        """By pool. They are exact here, however few samples they were fitted to."""
        return {
            pool.name: msgspec.structs.replace(pool.profile, samples=max(1, pool.profile.samples))
            for pool in (*self.system.hub, *self.system.offload)
        }

    def prefilling(self, pool: HubPool) -> int:
        return self.prefill_instances.get(pool.name, 0)

    def _claims(self) -> Iterable[tuple[str, object, bool, str]]:
        pools = {pool.name: pool.instances for pool in self.system.hub}
        links = {link.name for link in self.system.links}
        for name, count in self.prefill_instances.items():
            yield "plan.prefill", name, name in pools, f"a hub pool: {', '.join(pools)}"
            yield f"plan.prefill.{name}", count, 0 <= count <= pools[name], f"between 0 and {pools[name]}"
        decoding = self.system.hub_instances - sum(self.prefill_instances.values())
        yield "plan.prefill", dict(self.prefill_instances), decoding > 0, "fewer than all: some instance has to decode"
        yield "links", sorted(links), HUB not in links, f"of other names than {HUB!r}"
        for name, one in self.conditions.items():
            yield "conditions", name, name in links, f"a link: {', '.join(sorted(links))}"
            times = [at for at, _ in one.schedule]
            yield f"conditions.{name}.schedule", times, times == sorted(times), "in order of time"
            for at, mbps in one.schedule:
                yield f"conditions.{name}.schedule at {at:g} s", mbps, 0 <= mbps < math.inf, "Mbit/s, 0 or more"
        for name, size in self.cache_bytes.items():
            yield "cacheGib", name, name in links | {HUB}, f"of {HUB} or a link: {', '.join(sorted(links))}"
            yield f"cacheGib.{name}", size, 0 <= size < math.inf, "0 or more"
        failing = {*links, *instance_names(self)}
        for failure in self.failures:
            yield "failures.name", failure.name, failure.name in failing, f"one of {', '.join(sorted(failing))}"
            yield "failures.forSeconds", failure.for_seconds, 0 < failure.for_seconds < math.inf, "above 0"
            yield "failures.atSeconds", failure.at_seconds, 0 <= failure.at_seconds < math.inf, "0 or more"
        if (conversion := self.policy.conversion) is not None:
            yield "longLoop", sorted(pools), len(pools) == 1, "left out where the hub has several pools"
            yield "longLoop.intervalSeconds", conversion.interval_seconds, conversion.interval_seconds > 0, "above 0"
            for field, value in (
                ("cooldownSeconds", conversion.cooldown_seconds),
                ("conversionSeconds", conversion.conversion_seconds),
                ("startSeconds", conversion.start_seconds),
            ):
                yield f"longLoop.{field}", value, 0 <= value < math.inf, "0 or more"
            yield "longLoop.targetLoad", conversion.target_load, 0 < conversion.target_load <= 1, "above 0, at most 1"
            away = {pool.name: pool.instances for pool in self.system.offload}
            for pool in conversion.scaled:
                yield "longLoop.scaled", pool.name, pool.name in away, f"an offload pool: {', '.join(away)}"
                fits = 0 <= pool.least <= away[pool.name] <= pool.most
                bounds = f"{pool.least} to {pool.most}"
                yield f"longLoop.scaled.{pool.name}", bounds, fits, f"around its {away[pool.name]} instances"
        yield "stepTokens", self.step_tokens, self.step_tokens == 0 or self.step_tokens >= 64, "at least 64, or 0"
        yield "blockTokens", self.block_tokens, self.block_tokens >= 1, "at least 1"


def instances_of(scenario: Scenario) -> Iterable[Instance]:
    """Yield all instances that there may be, each in its role at the start."""

    def made(pool: str, cluster: str, role: PoolRole, name: str) -> Instance:
        return Instance(name=name, pool=pool, cluster=cluster, role=role, url="")

    for pool in scenario.system.hub:
        prefilling = scenario.prefilling(pool)
        for i in range(prefilling):
            yield made(pool.name, HUB, "prefill", f"{pool.name}-prefill-{i}")
        for i in range(pool.instances - prefilling):
            yield made(pool.name, HUB, "decode", f"{pool.name}-decode-{i}")
    for pool in scenario.system.offload:
        for i in range(scenario.most_instances[pool.name]):
            yield made(pool.name, pool.link, "prefill", f"{pool.name}-{i}")


def instance_names(scenario: Scenario) -> list[str]:
    """Return the names of all instances, as failures and reports use them."""
    return [one.name for one in instances_of(scenario)]
