"""The file that describes a system to a planner or a simulator, read from its parsed YAML into typed facts.

    workload:       lognormal {mu, sigma, minTokens, maxTokens}, histogram {edgesTokens, counts}, or trace PATH;
                    outputTokens, which a trace tells itself
    profiles:       by name: points [{tokens, seconds, cacheMib}], or fixedSeconds, tokenSeconds, squaredSeconds,
                    stateBytes, tokenBytes
    links:          name, capacityMbps
    offloadPools:   name, profile, instances, link; costPerHour
    hub:            name, profile, instances, maxBatch, stepMillis; minPrefill, minDecode, costPerHour
    slo:            ttftMillis, tpotMillis
    published:      figures to compare with, by system and JSON key
    simulation:     what only a simulator reads

People write these files by hand, from figures in other units. So no field is ignored, a name or value in another unit
is answered with the right one, and every message names field, value and fix.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from prfaas.capacity.profile import Curve, Sample
from prfaas.capacity.section import Section
from prfaas.capacity.system import HubPool, Link, OffloadPool, System, check, check_profile
from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError
from prfaas.wire.profile import Profile

MIB: Final = 1 << 20
SYSTEMS: Final = ("prfaas_pd", "homogeneous", "naive_heterogeneous")


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What users are promised, in milliseconds: P90 of the first token, and time a token after it."""

    ttft_millis: float | None = None
    tpot_millis: float | None = None


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file's contents. `simulation` is handed on as it stands."""

    system: System
    workload: Workload
    slo: Slo
    published: dict[str, dict[str, float]]
    simulation: dict[str, Any]


LoadTrace = Callable[[str], list[tuple[int, int]]]
"""Returns the (input, output) tokens of the requests of the trace at a path."""


def read(document: object, load_trace: LoadTrace) -> PlanFile:
    """Read a parsed document: what YAML or JSON gave.

    Raises:
        ConfigError: a field is unknown, missing or absurd, or no plan can keep the SLO.

    """
    top = Section("", document)
    profiles = {name: _profile(section) for name, section in top.section("profiles").named()}
    workload, output_tokens = _workload(top.section("workload"), load_trace)
    system = System(
        links=tuple(_link(section) for section in top.sections("links")),
        offload=tuple(_offload_pool(section, profiles) for section in top.sections("offloadPools")),
        hub=tuple(_hub_pool(section, profiles) for section in top.sections("hub")),
        output_tokens=output_tokens,
    )
    result = PlanFile(
        system=check(system),
        workload=workload,
        slo=_slo(top.section("slo", {}), system),
        published=_published(top.section("published", {})),
        simulation=top.mapping("simulation", {}),
    )
    top.end()
    return result


def _workload(section: Section, load_trace: LoadTrace) -> tuple[Workload, float]:
    """Return the lengths of prompts, and the mean length of an answer."""
    kind = section.one_of("lognormal", "histogram", "trace")
    output_tokens: float | None = None
    if kind == "trace":
        requests = load_trace(section.text("trace"))
        workload = Workload.observed(tokens for tokens, _ in requests)
        output_tokens = sum(tokens for _, tokens in requests) / len(requests)
    elif kind == "histogram":
        inner = section.section("histogram")
        workload = Workload.histogram(inner.wholes("edgesTokens"), inner.numbers("counts"))
        inner.end()
    else:
        inner = section.section("lognormal")
        workload = Workload.lognormal(
            inner.number("mu"), inner.number("sigma"), inner.whole("minTokens"), inner.whole("maxTokens")
        )
        inner.end()
    if output_tokens is None or "outputTokens" in section.keys:
        output_tokens = section.number("outputTokens")
    section.end()
    return workload, output_tokens


def _profile(section: Section) -> Profile:
    if section.one_of("points", "tokenSeconds") == "points":
        points = [_point(point) for point in section.sections("points")]
        profile = fit(section.where, points)
    else:
        profile = Profile(
            state_bytes=section.whole("stateBytes"),
            token_bytes=section.whole("tokenBytes"),
            fixed_seconds=section.number("fixedSeconds", 0.0),
            token_seconds=section.number("tokenSeconds"),
            squared_seconds=section.number("squaredSeconds", 0.0),
        )
    section.end()
    check_profile(section.where, profile)
    return profile


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A measured prompt: its prefill and its cache."""

    tokens: int
    seconds: float
    cache_bytes: float


def _point(section: Section) -> Point:
    point = Point(
        tokens=section.whole("tokens"),
        seconds=section.number("seconds"),
        cache_bytes=section.number("cacheMib") * MIB,
    )
    section.end()
    return point


def fit(where: str, points: Sequence[Point]) -> Profile:
    """Fit a profile to measured points: no coefficient below zero, by relative error for the seconds.

    Raises:
        ConfigError: there are fewer than two, or a longer prompt takes less time or memory than a shorter one.

    """
    if len(points) < 2:
        raise ConfigError(f"{where}.points holds {len(points)}; measure at least two lengths")
    ascending = sorted(points, key=lambda point: point.tokens)
    if ascending[0].tokens < 1 or min(point.seconds for point in points) <= 0:
        raise ConfigError(f"{where}.points: tokens and seconds must be above 0; remove the point that is not")
    for short, long in pairwise(ascending):
        if long.tokens == short.tokens:
            raise ConfigError(f"{where}.points has {long.tokens} tokens twice; keep the quicker one")
        for name, unit, less, more in (
            ("seconds", 1, short.seconds, long.seconds),
            ("cacheMib", MIB, short.cache_bytes, long.cache_bytes),
        ):
            if more < less:
                raise ConfigError(
                    f"{where}.points: {name} falls from {less / unit:g} at {short.tokens} tokens to {more / unit:g} at "
                    f"{long.tokens}; a longer prompt never takes less: measure again, or look for swapped rows"
                )
    state_bytes, token_bytes = _line([(point.tokens, point.cache_bytes) for point in ascending])
    curve = Curve.fitted([Sample(point.tokens, point.seconds) for point in ascending])
    return curve.profile(round(state_bytes), round(token_bytes))


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the fixed part and the slope of the least-squares line, neither below zero, for values that never fall."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    fixed = mean_y - slope * mean_x
    if fixed < 0:
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return fixed, slope


def _link(section: Section) -> Link:
    link = Link(name=section.text("name"), capacity_mbps=section.number("capacityMbps"))
    section.end()
    return link


def _offload_pool(section: Section, profiles: dict[str, Profile]) -> OffloadPool:
    pool = OffloadPool(
        name=section.text("name"),
        profile=profiles[section.name_of("profile", profiles)],
        instances=section.whole("instances"),
        link=section.text("link"),
        cost_per_hour=section.optional("costPerHour"),
    )
    section.end()
    return pool


def _hub_pool(section: Section, profiles: dict[str, Profile]) -> HubPool:
    pool = HubPool(
        name=section.text("name"),
        profile=profiles[section.name_of("profile", profiles)],
        instances=section.whole("instances"),
        max_batch=section.whole("maxBatch"),
        step_seconds=section.number("stepMillis") / 1000,
        min_prefill=section.whole("minPrefill", 0),
        min_decode=section.whole("minDecode", 0),
        cost_per_hour=section.optional("costPerHour"),
    )
    section.end()
    return pool


def _slo(section: Section, system: System) -> Slo:
    slo = Slo(ttft_millis=section.optional("ttftMillis"), tpot_millis=section.optional("tpotMillis"))
    section.end()
    for pool in system.hub:
        if slo.tpot_millis is not None and pool.step_seconds * 1000 > slo.tpot_millis * (1 + 1e-9):
            raise ConfigError(
                f"slo.tpotMillis is {slo.tpot_millis:g}, but a step of hub.{pool.name} takes stepMillis "
                f"{pool.step_seconds * 1000:g}: no plan keeps it; lower maxBatch and measure stepMillis anew"
            )
    return slo


def _published(section: Section) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, figures in section.named():
        if name not in SYSTEMS:
            raise ConfigError(f"published.{name}: systems are {', '.join(SYSTEMS)}")
        found[name] = {key: figures.number(key) for key in figures.keys}
    return found
