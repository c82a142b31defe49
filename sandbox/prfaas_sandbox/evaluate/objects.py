"""The objects of a system that is evaluated: pools of emulated instances, their profiles, and a policy. Pure.

A scenario of the simulator says all: hardware, split of the hub, threshold. Caches are as much smaller as the link is
slower. The policy's times are the case's own, for a scheduler lives as slowly as its emulated instances.
"""

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from prfaas.api.membercluster import DEFAULT_UTILISATION_QUERY
from prfaas.capacity.builtin import Builtin, DecodeStep, PrefillTime
from prfaas.capacity.profile import POINT_TOKENS, prefill_seconds
from prfaas.capacity.system import HubPool, OffloadPool
from prfaas.errors import ConfigError
from prfaas.evaluate.case import Case
from prfaas.kube.session import Object
from prfaas.names import HUB
from prfaas.schedule import RUNNING, slots_for
from prfaas.simulate.scenario import ConversionPolicy, Scenario
from prfaas_sandbox.demo.install import MEMBER, NAMESPACE

API: Final = "prfaas.io/v1alpha1"
POLICY: Final = "evaluation"
MODEL: Final = "evaluated"
PROFILES: Final = "evaluation-profiles"
SCALED_BY_POLICY: Final = "prfaas.io/scaled-by-policy"
"""On a pool: the policy may write the replicas that were applied."""
OF_A_RUN: Final = "evaluation=run"
"""The label of what leaves when a run ends."""
_SOURCE: Final = "builtin:kimi-linear-tiny"
"""Only its tokenizer is used: a token a byte."""
_SHAPE: Final = "kimi-k3"
"""Has the layers of a cache of which only the sizes are known."""
_MOUNTED: Final = "/evaluation"
_NEVER_DECODES_SECONDS: Final = 0.025
"""Of an offload pool's decode steps, which its file has to name."""
_LEAST_CACHE_MIB: Final = 512
_BESIDE_CACHES: Final = 1.1
"""Times what the caches take: pages are whole."""
_NO_LINK_MBPS: Final = 1000
"""Of the live link of a case without one; nothing crosses it."""
_MOST_ROUNDED: Final = 0.05
"""Of the link's rate."""
_DRAIN_SECONDS: Final = 60.0
"""In which an instance that scaling removes answers what it has, in the case's time."""
_RATE_WINDOW_SECONDS: Final = 5
"""Of a MemberCluster's default query."""


class CaseScale(msgspec.Struct, frozen=True, kw_only=True):
    """How a case is made to fit this machine: times are `stretch` times as long, caches 1/`cache_scale` as large."""

    stretch: float
    cache_scale: int

    def link_mbps(self, mbps: float) -> float:
        """Return the rate of the sandbox's link that stands for this one."""
        return mbps / (self.cache_scale * self.stretch)

    def case_mbps(self, mbps: float) -> float:
        return mbps * self.cache_scale * self.stretch

    def whole_seconds(self, seconds: float) -> int:
        """Return these seconds of the case by the clock, rounded up, as Prometheus has windows and intervals."""
        return math.ceil(seconds * self.stretch)


def instances(scenario: Scenario) -> dict[str, int]:
    """Return the instances by name of the pool; raises ConfigError for a system that two clusters cannot hold."""
    if len({pool.link for pool in scenario.system.offload}) > 1:
        raise ConfigError("links: the evaluation has one member cluster; describe one link")
    found = {pool.name: pool.instances for pool in scenario.system.offload if scenario.offloads}
    decoding = []
    for pool in scenario.system.hub:
        prefilling = scenario.prefilling(pool)
        found |= {f"{pool.name}-prefill": prefilling} if prefilling else {}
        if pool.instances > prefilling:
            found[f"{pool.name}-decode"] = pool.instances - prefilling
            decoding.append(pool.name)
    if len(decoding) != 1:
        raise ConfigError(f"hub: a policy has one decode pool, and here {', '.join(decoding)} decode; describe one")
    return found


def check_live(case: Case, scenario: Scenario) -> None:
    """Raise ConfigError for what a file asks of the simulator, and no live run does."""
    failing = next((one.name for one in scenario.failures), "")
    delayed = next((name for name, shape in scenario.conditions.items() if shape.round_trip_seconds), "")
    for is_asked, what, why in (
        (failing, f"failures: {failing}", "fails in the simulator only"),
        (delayed, f"links: roundTripMillis of {delayed}", "is simulated only: the live link has a rate, and no delay"),
        ("prefixShare" in case.file.simulation, "prefixShare", "is simulated only: live prompts share nothing"),
    ):
        if is_asked:
            raise ConfigError(f"simulation.{what} {why}; leave it out")
    _check_long_loop(scenario)
    instances(scenario)
    live_mbps(case)


def _check_long_loop(scenario: Scenario) -> None:
    """Raise ConfigError for a long loop that would do live what it does not do in the simulator, or nothing at all."""
    if (conversion := scenario.policy.conversion) is None:
        return
    if conversion.ttft_seconds is not None:
        raise ConfigError(
            "simulation.longLoop keeps slo.ttftMillis, by which a live gateway would refuse requests, too: "
            "leave one of them out"
        )
    if not any(map(scenario.prefilling, scenario.system.hub)):
        raise ConfigError("simulation.longLoop converts the hub's prefills, and the plan has none there: leave it out")


def live_mbps(case: Case) -> int:
    """Return the Mbit/s of the live link, which the member cluster declares and which is shaped: of all runs alike,
    also of those that use no link. Raises ConfigError where a whole number is far from the case's rate."""
    system = case.file.system
    if not system.offload:
        return _NO_LINK_MBPS
    scale = CaseScale(stretch=case.stretch, cache_scale=case.cache_scale)
    exact = scale.link_mbps(system.link(system.offload[0].link).capacity_mbps)
    if abs(round(exact) - exact) > _MOST_ROUNDED * exact:
        raise ConfigError(
            f"the live link would carry {exact:.3g} Mbit/s, and a member cluster declares whole ones: "
            "take a smaller --stretch or --cache-scale"
        )
    return max(1, round(exact))


def pool_objects(scenario: Scenario, scale: CaseScale, longest_tokens: int) -> list[Object]:
    """Return the pools and the policy. `longest_tokens` are of a prompt and its answer, without what begins a text.

    Nothing is drained: a run's pods leave when all its requests are answered. Where the long loop acts, the hub's
    prefills share its decode pool's instances, and a pool that it scales drains what leaves.
    """
    objects: list[Object] = []
    wanted, conversion = instances(scenario), scenario.policy.conversion
    prefill_pools: list[str] = []
    for pool, name in _named(scenario):
        decodes = name.endswith("-decode") and isinstance(pool, HubPool)
        if conversion and isinstance(pool, HubPool) and not decodes:
            spec: Object = {"shareWith": f"{pool.name}-decode", "replicas": wanted[name]}
        else:
            spec = _instances_spec(pool, wanted[name], scenario, scale, longest_tokens)
        if isinstance(pool, OffloadPool):
            spec |= {"clusterName": MEMBER, **_bounds(scenario, pool, scale)}
        if not decodes:
            prefill_pools.append(name)
        made = _object("DecodePool" if decodes else "PrefillPool", name, spec)
        if conversion:
            made["metadata"]["annotations"] = {SCALED_BY_POLICY: "true"}
        objects.append(made)
    return [*objects, _policy(scenario, scale, prefill_pools)]


def _instances_spec(
    pool: OffloadPool | HubPool, replicas: int, scenario: Scenario, scale: CaseScale, longest_tokens: int
) -> Object:
    """Return the spec of a pool with instances of its own."""
    args = [
        f"--emulate={_MOUNTED}/{pool.name}.json",
        f"--cache-scale={scale.cache_scale}",
        f"--stretch={scale.stretch:g}",
        f"--max-running={_running(pool)}",
        f"--max-context={longest_tokens + 1}",
        f"--cache-mib={_cache_mib(pool, scenario, scale, longest_tokens)}",
        *([f"--step-tokens={scenario.step_tokens}"] if scenario.step_tokens else []),
    ]
    return {
        "model": {"name": MODEL, "source": _SOURCE},
        "engine": {"type": "emulated", "args": args},
        "replicas": replicas,
        "drainSeconds": 0,
        "template": {
            "volumes": [{"name": "profiles", "configMap": {"name": PROFILES}}],
            "volumeMounts": [{"name": "profiles", "mountPath": _MOUNTED}],
        },
    }


def _bounds(scenario: Scenario, pool: OffloadPool, scale: CaseScale) -> Object:
    """Return the fields of a pool that the long loop scales; none of another one."""
    conversion = scenario.policy.conversion
    bounds = next((one for one in (conversion.scaled if conversion else ()) if one.name == pool.name), None)
    if bounds is None:
        return {}
    drain_seconds = scale.whole_seconds(_DRAIN_SECONDS)
    return {"minReplicas": bounds.least, "maxReplicas": bounds.most, "drainSeconds": drain_seconds}


def profiles_object(scenarios: Iterable[Scenario]) -> Object:
    """Return the ConfigMap with the profiles of all pools: the plan's curves and steps, also of built-in profiles."""
    pools = {pool.name: pool for scenario in scenarios for pool, _ in _named(scenario)}
    data = {f"{name}.json": _profile(pool) for name, pool in pools.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _named_here(PROFILES), "data": data}


def utilisation_query(scale: CaseScale) -> str:
    """Return the query of the link's traffic, its window stretched like all times."""
    window = scale.whole_seconds(_RATE_WINDOW_SECONDS)
    return DEFAULT_UTILISATION_QUERY.replace(f"[{_RATE_WINDOW_SECONDS}s]", f"[{window}s]")


def _named(scenario: Scenario) -> list[tuple[OffloadPool | HubPool, str]]:
    """Return each pool of the system with the names of the pools that stand for it."""
    wanted = instances(scenario)
    names = [
        *((pool, pool.name) for pool in scenario.system.offload),
        *((pool, f"{pool.name}-{role}") for pool in scenario.system.hub for role in ("prefill", "decode")),
    ]
    return [(pool, name) for pool, name in names if name in wanted]


def is_scaled(scenario: Scenario) -> bool:
    """Return whether instances may come and go during a run."""
    return bool(scenario.policy.conversion and scenario.policy.conversion.scaled)


def _policy(scenario: Scenario, scale: CaseScale, prefill_pools: list[str]) -> Object:
    threshold, policy = scenario.policy.threshold, scenario.policy
    decode_pool = next(name for name in instances(scenario) if name.endswith("-decode"))
    spec = {
        "model": MODEL,
        "decodePool": decode_pool,
        "prefillPools": prefill_pools,
        "threshold": {
            "mode": threshold.mode,
            "tokens": threshold.tokens,
            "min": threshold.min_tokens,
            "max": threshold.max_tokens,
        },
        "intervals": {"shortSeconds": policy.short_interval_seconds},
        "metrics": {
            "prometheusUrl": "http://prometheus.monitoring.svc:9090",
            "staleAfterSeconds": policy.stale_after_seconds,
        },
        "onOffloadFailure": policy.on_offload_failure,
        "gateway": {"drainSeconds": 0},
    }
    if policy.conversion:
        spec |= _long_loop(scenario, policy.conversion, scale)
    return _object("PrfaaSPolicy", POLICY, spec)


def _long_loop(scenario: Scenario, conversion: ConversionPolicy, scale: CaseScale) -> Object:
    """Return the policy's part of the long loop. The operator lives by the clock, so its times are stretched here."""
    pool = next(pool for pool in scenario.system.hub if scenario.prefilling(pool))
    cooldown_seconds = scale.whole_seconds(conversion.cooldown_seconds)
    return {
        "intervals": {
            "shortSeconds": scenario.policy.short_interval_seconds,
            "longSeconds": scale.whole_seconds(conversion.interval_seconds),
        },
        "conversion": {
            "enabled": True,
            "minPrefill": max(1, pool.min_prefill),
            "minDecode": max(1, pool.min_decode),
            "cooldownSeconds": cooldown_seconds,
        },
        "scaling": {
            "mode": "Auto" if conversion.scaled else "None",
            "targetLoadPercent": round(100 * conversion.target_load),
            "cooldownSeconds": cooldown_seconds,
        },
    }


def _running(pool: OffloadPool | HubPool) -> int:
    """Return the sequences that decode at once on an instance, as the simulator has them."""
    return pool.max_batch if isinstance(pool, HubPool) else RUNNING


def _cache_mib(pool: OffloadPool | HubPool, scenario: Scenario, scale: CaseScale, longest_tokens: int) -> int:
    """Return the memory in which as many sequences as an instance has slots find room, however long, and beside them
    the prefixes that it keeps in the simulator."""
    longest_bytes = pool.profile.state_bytes + pool.profile.token_bytes * longest_tokens
    cluster, sharing = (
        (HUB, scenario.system.hub_instances) if isinstance(pool, HubPool) else (pool.link, pool.instances)
    )
    kept_bytes = scenario.cache_bytes.get(cluster, 0.0) / sharing
    cache_bytes = _BESIDE_CACHES * slots_for(_running(pool)) * longest_bytes + kept_bytes
    return max(_LEAST_CACHE_MIB, math.ceil(cache_bytes / scale.cache_scale / 2**20))


def _profile(pool: OffloadPool | HubPool) -> str:
    """Return a pool's profile in the form of `prfaas profile show NAME -o json`."""
    step_seconds = pool.step_seconds if isinstance(pool, HubPool) else _NEVER_DECODES_SECONDS
    document = Builtin(
        name=f"{pool.model or _SHAPE}-{pool.name}",
        model=pool.model or "of the case",
        precision="",
        device="",
        devices=1,
        parallelism="",
        source="the case's file",
        basis="assumed",
        weights_bytes=0,
        state_bytes=pool.profile.state_bytes,
        token_bytes=pool.profile.token_bytes,
        points=tuple(
            PrefillTime(tokens=tokens, seconds=prefill_seconds(pool.profile, tokens)) for tokens in POINT_TOKENS
        ),
        checks=(),
        context_tokens=0,
        decode_steps=tuple(DecodeStep(batch=one, seconds=step_seconds) for one in sorted({1, _running(pool)})),
    )
    return msgspec.json.encode(document).decode()


def _object(kind: str, name: str, spec: Object) -> Object:
    label, _, value = OF_A_RUN.partition("=")
    return {"apiVersion": API, "kind": kind, "metadata": {**_named_here(name), "labels": {label: value}}, "spec": spec}


def _named_here(name: str) -> Object:
    return {"name": name, "namespace": NAMESPACE}
