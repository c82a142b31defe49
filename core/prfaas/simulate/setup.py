"""Makes a scenario for each policy from a described system and its `simulation` section.

    requests, seed      how many, and of which random numbers
    load                share of the planned lambda_max that arrives; or ratePerSecond
    bursts              everySeconds, forSeconds, factor: so many times as dense, at the same mean rate
    shift               atSeconds, lognormal, outputTokens: from then on requests have these lengths, at the same rate
    prefixShare         share of the prompts that go on from an earlier one; none without it
    warmupRequests      the first ones are served but not timed
    thresholdTokens     where t starts, and stays for `static`; the plan's without it
    shortIntervalSeconds, stepTokens, cacheGib by cluster (`hub` or a link)
    links               name, roundTripMillis and one of
                          schedule [{atSeconds, capacityMbps}]
                          diurnal {everySeconds, lowMbps}: a cosine from the declared capacity to the low one and back
                          flapping {everySeconds, forSeconds, lowMbps}: low at the end of every period
    longLoop            intervalSeconds, cooldownSeconds, conversionSeconds (60, 300, 1.5; {} for these): `threshold`
                        and `price` convert the hub's instances as the operator does; without it splits stay.
                        scaled [{name, minInstances, maxInstances}], startSeconds, targetLoad (60, 0.7): offload pools
                        that it scales, too
    failures            name of an instance or link, atSeconds, forSeconds

All policies meet the same requests. Each has the hardware of the plan's column of its name. `threshold`, `price` and
`static` have the planned split, `naive` a hub that only decodes. `homogeneous` has one grown by the offload instances.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from prfaas.capacity import optimum
from prfaas.capacity.optimum import Plan
from prfaas.capacity.planfile import PlanFile, numbers_of, read_lognormal
from prfaas.capacity.section import Section
from prfaas.capacity.system import System
from prfaas.capacity.workload import Randomness, Workload
from prfaas.errors import ConfigError
from prfaas.names import HUB
from prfaas.simulate.arrivals import Bursts, poisson, sharing, shifting
from prfaas.simulate.request import Arrival
from prfaas.simulate.scenario import (
    ConversionPolicy,
    Failure,
    LinkShape,
    Policy,
    PolicyName,
    ScaledPool,
    Scenario,
    instance_names,
)
from prfaas.wire.routes import Threshold, ThresholdMode

GIB: Final = 1 << 30
STEPS_A_PERIOD: Final = 48
MAX_LOAD: Final = 10.0
"""Ten times what can be served shows all that an overload does; more is a percentage."""
MAX_STEPS: Final = 100_000
MAX_REQUESTS: Final = 10_000_000
"""A run of so many takes hours, and gigabytes for the times that percentiles are taken from."""
MIN_THRESHOLD_TOKENS: Final = 256


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The `simulation` section, as far as no plan is needed to read it."""

    requests: int
    seed: int
    load: float | None
    rate_per_second: float | None
    """Exactly one of the two is there."""
    bursts: Bursts | None
    prefix_share: float
    warmup_requests: int
    threshold_tokens: int | None
    short_interval_seconds: int
    step_tokens: int
    cache_bytes: dict[str, float]
    links: dict[str, "LinkSetup"]
    failures: tuple[Failure, ...]
    conversion: ConversionPolicy | None
    shift: "Shift | None"


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """From a time on requests have other lengths."""

    at_seconds: float
    workload: Workload
    output_tokens: int


class LinkSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of a link over time; a period of 0 never repeats."""

    round_trip_seconds: float = 0.0
    schedule: tuple[tuple[float, float], ...] = ()
    every_seconds: float = 0.0
    low_seconds: float | None = None
    """Time at the end of each period in which capacity is low; None: it swings between high and low."""
    low_mbps: float = 0.0

    def conditions(self, high_mbps: float, horizon_seconds: float) -> LinkShape:
        """Return the steps of capacity until the horizon."""
        if self.low_mbps > high_mbps:
            raise ConfigError(
                f"simulation.links: lowMbps is {self.low_mbps:g} where capacityMbps is {high_mbps:g}; it must be lower"
            )
        steps = self._repeated(high_mbps, horizon_seconds) if self.every_seconds > 0 else self.schedule
        return LinkShape(round_trip_seconds=self.round_trip_seconds, schedule=tuple(steps))

    def _repeated(self, high_mbps: float, horizon_seconds: float) -> list[tuple[float, float]]:
        period = self.every_seconds
        if self.low_seconds is not None:
            steps = [(0.0, high_mbps), (period - self.low_seconds, self.low_mbps)]
        else:
            middle, swing = (high_mbps + self.low_mbps) / 2, (high_mbps - self.low_mbps) / 2
            shares = [step / STEPS_A_PERIOD for step in range(STEPS_A_PERIOD)]
            steps = [(share * period, middle + swing * math.cos(2 * math.pi * share)) for share in shares]
        periods = math.ceil(horizon_seconds / period)
        if periods * len(steps) > MAX_STEPS:
            raise ConfigError(
                f"simulation.links: a period of {period:g} s repeats {periods} times in {horizon_seconds:.0f} s; "
                f"raise everySeconds to at least {horizon_seconds * len(steps) / MAX_STEPS:.1f}"
            )
        return [(n * period + at, mbps) for n in range(periods) for at, mbps in steps]


def capacity(file: PlanFile, policy: PolicyName) -> float:
    """Return the requests a second that a policy's plan carries."""
    return planned(file, policy)[1].lambda_max


def read(file: PlanFile) -> Setup:
    """Read the `simulation` section; raises ConfigError where a field is unknown, missing or absurd."""
    section = Section("simulation", file.simulation)
    rate = section.one_of("load", "ratePerSecond")
    amount = section.number(rate)
    if amount <= 0:
        raise ConfigError(f"simulation.{rate} is {amount:g}; it must be above 0")
    if rate == "load" and amount > MAX_LOAD:
        share = amount / 100
        cure = f"write {share:g} for {amount:g} %" if share <= MAX_LOAD else f"give at most {MAX_LOAD:g}"
        raise ConfigError(f"simulation.load is {amount:g} times what the best plan carries; it is a fraction: {cure}")
    setup = Setup(
        requests=section.whole("requests"),
        seed=section.whole("seed", 1),
        load=amount if rate == "load" else None,
        rate_per_second=amount if rate == "ratePerSecond" else None,
        bursts=section.section("bursts", _bursts, {}),
        prefix_share=section.number("prefixShare", 0.0),
        warmup_requests=section.whole("warmupRequests", 0),
        threshold_tokens=section.whole("thresholdTokens") if "thresholdTokens" in section.keys else None,
        short_interval_seconds=section.whole("shortIntervalSeconds", 1),
        step_tokens=section.whole("stepTokens", 0),
        cache_bytes={name: gib * GIB for name, gib in section.section("cacheGib", numbers_of, {}).items()},
        links=dict(section.sections("links", _link_setup)),
        failures=tuple(section.sections("failures", _failure)),
        conversion=section.section("longLoop", partial(_conversion, file)) if "longLoop" in section.keys else None,
        shift=section.section("shift", _shift) if "shift" in section.keys else None,
    )
    section.end()
    _check_links(file, setup)
    for field, value in (("requests", setup.requests), ("shortIntervalSeconds", setup.short_interval_seconds)):
        if value < 1:
            raise ConfigError(f"simulation.{field} is {value}; it must be at least 1")
    if setup.requests > MAX_REQUESTS:
        raise ConfigError(f"simulation.requests is {setup.requests}; it must be at most {MAX_REQUESTS}")
    if setup.warmup_requests >= setup.requests:
        raise ConfigError(
            f"simulation.warmupRequests is {setup.warmup_requests} of {setup.requests} requests, which leaves none "
            "to be timed; lower it, or raise requests"
        )
    return setup


def _bursts(section: Section) -> Bursts | None:
    if not section.keys:
        return None
    return Bursts(
        every_seconds=section.number("everySeconds"),
        for_seconds=section.number("forSeconds"),
        factor=section.number("factor"),
    )


def _conversion(file: PlanFile, section: Section) -> ConversionPolicy:
    usual, promised_millis = ConversionPolicy(), file.slo.ttft_millis
    return ConversionPolicy(
        interval_seconds=section.number("intervalSeconds", usual.interval_seconds),
        cooldown_seconds=section.number("cooldownSeconds", usual.cooldown_seconds),
        conversion_seconds=section.number("conversionSeconds", usual.conversion_seconds),
        ttft_seconds=promised_millis / 1000 if promised_millis is not None else None,
        start_seconds=section.number("startSeconds", usual.start_seconds),
        target_load=section.number("targetLoad", usual.target_load),
        scaled=tuple(section.sections("scaled", _scaled)),
    )


def _scaled(section: Section) -> ScaledPool:
    return ScaledPool(
        name=section.text("name"), least=section.whole("minInstances"), most=section.whole("maxInstances")
    )


def _shift(section: Section) -> Shift:
    return Shift(
        at_seconds=section.positive("atSeconds"),
        workload=section.section("lognormal", read_lognormal),
        output_tokens=section.at_least(1, "outputTokens"),
    )


def _failure(section: Section) -> Failure:
    return Failure(
        name=section.text("name"), at_seconds=section.number("atSeconds"), for_seconds=section.number("forSeconds")
    )


def _link_setup(section: Section) -> tuple[str, LinkSetup]:
    """Return the name of a link, and its capacity over time."""
    name, round_trip_seconds = section.text("name"), _at_least_0(section, "roundTripMillis", 0.0) / 1000
    made = LinkSetup(round_trip_seconds=round_trip_seconds)
    kinds = {"schedule", "diurnal", "flapping"} & set(section.keys)
    if kinds:
        kind = section.one_of("schedule", "diurnal", "flapping")
        if kind == "schedule":
            made = msgspec.structs.replace(made, schedule=tuple(section.sections("schedule", _step)))
        else:
            made = msgspec.structs.replace(made, **section.section(kind, partial(_period, kind)))
    return name, made


def _step(section: Section) -> tuple[float, float]:
    return _at_least_0(section, "atSeconds"), _at_least_0(section, "capacityMbps")


def _period(kind: str, section: Section) -> dict[str, float]:
    found = {"every_seconds": section.number("everySeconds"), "low_mbps": _at_least_0(section, "lowMbps")}
    if kind == "flapping":
        found["low_seconds"] = section.number("forSeconds")
        if not 0 < found["low_seconds"] < found["every_seconds"]:
            raise ConfigError(f"{section.where}.forSeconds must lie between 0 and everySeconds")
    if found["every_seconds"] <= 0:
        raise ConfigError(f"{section.where}.everySeconds is {found['every_seconds']:g}; it must be above 0")
    return found


def _at_least_0(section: Section, key: str, default: float | None = None) -> float:
    value = section.number(key) if default is None else section.number(key, default)
    if value < 0:
        raise ConfigError(f"{section.where}.{key} is {value:g}; it must be 0 or more")
    return value


def planned(file: PlanFile, policy: PolicyName) -> tuple[System, Plan]:
    """Return the hardware of a policy, and its plan; raises ConfigError if it has nowhere to offload."""
    if policy == "homogeneous":
        alone = optimum.homogeneous(file.system)
        return alone, optimum.best(alone, file.workload)
    if not file.system.offload:
        raise ConfigError(f"no offload pool has instances, and {policy} offloads: give one some, or try homogeneous")
    if policy == "naive":
        return file.system, optimum.naive(file.system, file.workload)
    return file.system, optimum.best(file.system, file.workload)


def rate(file: PlanFile, setup: Setup) -> float:
    """Return the requests a second that arrive, the same for every policy: `load` is of the file's best plan."""
    if setup.rate_per_second is not None:
        return setup.rate_per_second
    plan = optimum.best(file.system, file.workload)
    return (setup.load or 0.0) * plan.lambda_max


def planned_for(file: PlanFile, requests: Sequence[Arrival]) -> PlanFile:
    """Return the file with the lengths of these requests, such as a trace's."""
    outputs = sum(one.output_tokens for one in requests) / len(requests)
    return msgspec.structs.replace(
        file,
        workload=Workload.observed(one.input_tokens for one in requests),
        system=msgspec.structs.replace(file.system, output_tokens=outputs),
    )


def draw(
    file: PlanFile, setup: Setup, rate_per_second: float, rng: Randomness, prefix_rng: Randomness
) -> Iterable[Arrival]:
    """Return the requests of a setup."""
    drawn = poisson(file.workload, round(file.system.output_tokens), rate_per_second, rng, setup.bursts)
    if setup.shift is not None:
        later = poisson(setup.shift.workload, setup.shift.output_tokens, rate_per_second, rng, setup.bursts)
        drawn = shifting(drawn, later, setup.shift.at_seconds)
    if setup.prefix_share > 0:
        drawn = sharing(drawn, setup.prefix_share, prefix_rng)
    return islice(drawn, setup.requests)


def scenario(file: PlanFile, setup: Setup, policy: PolicyName, horizon_seconds: float) -> Scenario:
    """Return the scenario of a policy; raises ConfigError if it has nowhere to offload, or names what is not there."""
    system, plan = planned(file, policy)
    links = {link.name: link.capacity_mbps for link in system.links}
    there = Scenario(
        system=system,
        prefill_instances={name: round(count) for name, count in plan.split.items()},
        policy=Policy(
            threshold=_threshold(file, setup, policy, plan),
            short_interval_seconds=setup.short_interval_seconds,
            conversion=setup.conversion if policy in ("threshold", "price") else None,
        ),
        conditions={
            name: link.conditions(links[name], horizon_seconds) for name, link in setup.links.items() if name in links
        },
        cache_bytes={name: size for name, size in setup.cache_bytes.items() if name in {HUB, *links}},
        step_tokens=setup.step_tokens,
    )
    return msgspec.structs.replace(there, failures=_failures(file, setup, there)).validated()


def _failures(file: PlanFile, setup: Setup, there: Scenario) -> tuple[Failure, ...]:
    """Return the failures of what a policy has. Another split has other instances, whose failures it is spared."""
    existing = {*instance_names(there), *(link.name for link in there.system.links)}
    links = {link.name for link in file.system.links}
    far = {f"{pool.name}-{i}" for pool in file.system.offload for i in range(pool.instances)}
    for failure in setup.failures:
        if failure.name not in links | far and not _is_of_hub(file, failure.name):
            raise ConfigError(f"simulation.failures.{failure.name}: there are {', '.join(sorted(existing))}")
    return tuple(failure for failure in setup.failures if failure.name in existing)


def _is_of_hub(file: PlanFile, name: str) -> bool:
    """Return True when an instance of the hub has this name in some split; baselines have a larger hub."""
    stem, _, number = name.rpartition("-")
    roles = {f"{pool.name}-{role}" for pool in file.system.hub for role in ("prefill", "decode")}
    return (
        stem in roles and number.isdigit() and int(number) < file.system.hub_instances + file.system.offload_instances
    )


def _check_links(file: PlanFile, setup: Setup) -> None:
    declared = [link.name for link in file.system.links]
    for field, names in (("links", setup.links), ("cacheGib", setup.cache_bytes)):
        for name in names:
            if name not in declared and not (field == "cacheGib" and name == HUB):
                known = [*declared, HUB] if field == "cacheGib" else declared
                raise ConfigError(f"simulation.{field}.{name}: there are {', '.join(known) or 'none'}")


def _threshold(file: PlanFile, setup: Setup, policy: PolicyName, plan: Plan) -> Threshold:
    longest = max(file.workload.max_tokens, MIN_THRESHOLD_TOKENS)
    tokens = plan.threshold_tokens if setup.threshold_tokens is None else setup.threshold_tokens
    if tokens is None:  # all prompts go the same way
        tokens = MIN_THRESHOLD_TOKENS if plan.offloaded_fraction > 0 else longest
    if policy == "naive":
        tokens = 0
    modes: dict[PolicyName, ThresholdMode] = {"threshold": "Auto", "price": "Priced", "homogeneous": "Disabled"}
    return Threshold(
        mode=modes.get(policy, "Fixed"),
        tokens=min(max(tokens, MIN_THRESHOLD_TOKENS), longest) if policy in ("threshold", "price") else tokens,
        min_tokens=MIN_THRESHOLD_TOKENS,
        max_tokens=longest,
    )
