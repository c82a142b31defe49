"""Reads the file that describes a system to a planner or a simulator: parsed YAML in, typed facts out.

docs/understand/capacity.md lists the fields. People write these files by hand, from data sheets in other units. So no
field is ignored, and every message names field, value and fix. A number with its unit is answered with the number to
write, an unknown field with the field probably meant. A reader takes the fields of its `Section` one by one; the rest
are errors.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec

from prfaas.capacity.builtin import Builtin, read_builtin
from prfaas.capacity.memory import DEVICE_BYTES, InstanceMemory, check_batch, check_prompt, check_weights
from prfaas.capacity.models import MODEL_CACHES, ModelCache
from prfaas.capacity.profile import Curve, MeasuredPoint, Sample, cache_bytes
from prfaas.capacity.system import HubPool, LinkCapacity, OffloadPool, System, check, check_profile, present
from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError
from prfaas.util import MIB
from prfaas.wire.profile import Profile

T = TypeVar("T")
SYSTEMS: Final = ("hub_alone", "homogeneous", "naive_heterogeneous", "prfaas_pd")
_REQUIRED: Final = object()
_WITH_UNIT: Final = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]+(?:/s|ps)?)\s*")
# By the end of the field's name: its unit in words, and the factors of other units.
_UNITS: Final[dict[str, tuple[str, dict[str, float]]]] = {
    "Mbps": (
        "Mbit/s",
        {
            **dict.fromkeys(("Mbit/s", "Mbps", "Mb/s"), 1.0),
            **dict.fromkeys(("Gbit/s", "Gbps", "Gb/s"), 1e3),
            **dict.fromkeys(("Tbit/s", "Tbps", "Tb/s"), 1e6),
            **dict.fromkeys(("MB/s", "MBps"), 8.0),
            **dict.fromkeys(("GB/s", "GBps"), 8e3),
            "MiB/s": 8.388608,
            "GiB/s": 8589.934592,
        },
    ),
    "Mib": ("MiB", {"MiB": 1.0, "GiB": 1024.0, "KiB": 1 / 1024, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20}),
    "Bytes": ("bytes", {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "KB": 1e3, "MB": 1e6, "GB": 1e9}),
    "Millis": ("milliseconds", {"ms": 1.0, "s": 1e3, "us": 1e-3}),
    "econds": ("seconds", {"s": 1.0, "ms": 1e-3, "us": 1e-6}),
    "okens": ("tokens", {"K": 1024.0, "k": 1000.0, "M": 2.0**20}),
}


class PlanSlo(msgspec.Struct, frozen=True, kw_only=True):
    """The promises to users, in milliseconds: P90 of the first token, and the time of each later token."""

    ttft_millis: float | None = None
    tpot_millis: float | None = None


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file's contents. `simulation` is handed on as it stands."""

    system: System
    workload: Workload
    slo: PlanSlo
    published: dict[str, dict[str, float]]
    simulation: dict[str, Any]


class _Instance(NamedTuple):
    """What a section of `profiles` says of an instance."""

    profile: Profile
    memory: InstanceMemory | None = None
    builtin: Builtin | None = None


LoadTrace = Callable[[str], list[tuple[int, int]]]
"""Returns the (input, output) tokens of the requests of the trace at a path."""


def read(document: object, load_trace: LoadTrace) -> PlanFile:
    """Read a parsed YAML or JSON document.

    Raises ConfigError where a field is unknown, missing or absurd, or no plan can keep the SLO.
    """
    top = Section("", document)
    profiles = top.section("profiles", partial(_named, _instance), {})
    workload, output_tokens = top.section("workload", partial(_workload, load_trace))
    system = System(
        links=tuple(top.sections("links", _link)),
        offload=tuple(top.sections("offloadPools", partial(_offload_pool, profiles))),
        hub=tuple(top.sections("hub", partial(_hub_pool, profiles))),
        output_tokens=output_tokens,
    )
    check(system)
    _check_memory(system, workload)
    result = PlanFile(
        system=present(system),
        workload=workload,
        slo=top.section("slo", partial(_slo, system), {}),
        published=top.section("published", _published, {}),
        simulation=top.mapping("simulation", {}),
    )
    top.end()
    return result


class Section:
    """A mapping of the file at `where`, a dotted path. All raise ConfigError for what is missing or not of its kind."""

    def __init__(self, where: str, value: object) -> None:
        self.where = where
        if value is None and not where:
            raise ConfigError("the file is empty; it must describe a system, see docs/understand/capacity.md")
        if not isinstance(value, dict):
            raise ConfigError(f"{where or 'the file'} is {_shown(value)}; it must hold fields: name: value")
        self._fields = {str(key): field for key, field in cast(dict[object, Any], value).items()}
        self._known: dict[str, None] = {}

    @property
    def keys(self) -> list[str]:
        return list(self._fields)

    def has(self, key: str) -> bool:
        """Return whether a field that may be absent is there; another reader takes it."""
        self._known[key] = None
        return key in self._fields

    def number(self, key: str, default: object = _REQUIRED) -> float:
        """Take a finite number."""
        return _number(self._path(key), key, self._take(key, default))

    def optional(self, key: str) -> float | None:
        """Take a number above 0 that may be absent."""
        if key not in self._fields:
            self._take(key, None)
            return None
        value = self.number(key)
        if value <= 0:
            raise ConfigError(f"{self._path(key)} is {value:g}; it must be above 0, or absent")
        return value

    def whole(self, key: str, default: object = _REQUIRED) -> int:
        """Take a whole number of at least 0."""
        return _whole(self._path(key), self.number(key, default))

    def at_least(self, low: int, key: str) -> int:
        """Take a whole number of at least `low`."""
        value = self.whole(key)
        if value < low:
            raise ConfigError(f"{self._path(key)} is {value}; it must be a whole number of at least {low}")
        return value

    def is_mapping(self, key: str) -> bool:
        return isinstance(self._fields.get(key), dict)

    def numbers(self, key: str) -> list[float]:
        return [_number(f"{self._path(key)}[{i}]", key, value) for i, value in enumerate(self._list(key))]

    def integers(self, key: str) -> list[int]:
        return [_whole(f"{self._path(key)}[{i}]", value) for i, value in enumerate(self.numbers(key))]

    def text(self, key: str) -> str:
        value = self._take(key, _REQUIRED)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self._path(key)} is {_shown(value)}; it must be a name")
        return value

    def name_of(self, key: str, known: Iterable[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise ConfigError(f"{self._path(key)} is {value!r}; there are: {', '.join(known) or 'none'}")
        return value

    def mapping(self, key: str, default: object = _REQUIRED) -> dict[str, Any]:
        """Take a section as it stands."""
        return Section(self._path(key), self._take(key, default))._fields

    def section(self, key: str, read: Callable[["Section"], T], default: object = _REQUIRED) -> T:
        """Take what `read` makes of a section; it must take all fields."""
        section = Section(self._path(key), self._take(key, default))
        found = read(section)
        section.end()
        return found

    def sections(self, key: str, read: Callable[["Section"], T]) -> list[T]:
        """Take a list of sections, as `section` does; an absent one is empty."""
        found: list[T] = []
        for i, value in enumerate(self._list(key, [])):
            section = Section(f"{self._path(key)}[{i}]", value)
            if isinstance(name := section._fields.get("name"), str):
                section.where = f"{self._path(key)}.{name}"
            found.append(read(section))
            section.end()
        return found

    def one_of(self, *keys: str) -> str:
        """Return which one of the fields is there."""
        there = [key for key in keys if key in self._fields]
        if len(there) != 1:
            raise ConfigError(
                f"{self.where} has {' and '.join(there) or 'none'} of {', '.join(keys)}; give exactly one"
            )
        self._known.update(dict.fromkeys(keys))
        return there[0]

    def end(self) -> None:
        """Refuse the fields that were not taken."""
        for key in self._fields:
            if key not in self._known:
                raise ConfigError(f"{self._path(key)} is no field here; {_advice(key, list(self._known))}")

    def _path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def _take(self, key: str, default: object) -> object:
        self._known[key] = None
        value = self._fields.get(key, default)
        if value is _REQUIRED:
            for other in self._fields:
                if _alike(other, key):
                    raise ConfigError(f"{self._path(key)} is missing; the file has {other}: {_advice(other, [key])}")
            raise ConfigError(f"{self._path(key)} is missing; add it")
        return value

    def _list(self, key: str, default: object = _REQUIRED) -> list[Any]:
        value = self._take(key, default)
        if not isinstance(value, list):
            raise ConfigError(f"{self._path(key)} is {_shown(value)}; it must be a list")
        return cast(list[Any], value)


def _named(read: Callable[[Section], T], section: Section) -> dict[str, T]:
    return {name: section.section(name, read) for name in section.keys}


def _workload(load_trace: LoadTrace, section: Section) -> tuple[Workload, float]:
    """Return the lengths of prompts, and the mean length of an answer."""
    kind = section.one_of("lognormal", "histogram", "trace")
    output_tokens: float | None = None
    if kind == "trace":
        requests = load_trace(section.text("trace"))
        workload = Workload.observed(tokens for tokens, _ in requests)
        output_tokens = sum(tokens for _, tokens in requests) / len(requests)
    elif kind == "histogram":
        workload = section.section("histogram", _histogram)
    else:
        workload = section.section("lognormal", _lognormal)
    if output_tokens is None or "outputTokens" in section.keys:
        output_tokens = section.number("outputTokens")
    return workload, output_tokens


def _histogram(section: Section) -> Workload:
    return Workload.histogram(section.integers("edgesTokens"), section.numbers("counts"))


def _lognormal(section: Section) -> Workload:
    return Workload.lognormal(
        section.number("mu"), section.number("sigma"), section.whole("minTokens"), section.whole("maxTokens")
    )


def _instance(section: Section) -> _Instance:
    """Read a section of `profiles`: a built-in profile, or measurements and, if they are given, the devices."""
    if section.has("builtin"):
        return _built_in(section)
    profile = _profile(section)
    if not (section.has("gpu") or section.has("gpus") or section.has("weightsGb")):
        return _Instance(profile)
    memory = InstanceMemory(
        device=section.name_of("gpu", DEVICE_BYTES),
        devices=section.at_least(1, "gpus"),
        weights_bytes=1e9 * section.number("weightsGb"),
    )
    check_weights(section.where, memory)
    return _Instance(profile, memory)


def _built_in(section: Section) -> _Instance:
    builtin = read_builtin(f"{section.where}.builtin", section.text("builtin"))
    return _Instance(builtin.profile(), builtin.memory, builtin)


def _profile(section: Section) -> Profile:
    """Read a profile; a known `model` gives the sizes of the cache."""
    cache = None
    if section.has("model"):
        cache = MODEL_CACHES[section.name_of("model", MODEL_CACHES)]
    if section.one_of("points", "tokenSeconds") == "points":
        profile = fit(section.where, section.sections("points", partial(_point, cache)))
    else:
        profile = Profile(
            state_bytes=section.whole("stateBytes") if cache is None else cache.state_bytes,
            token_bytes=section.whole("tokenBytes") if cache is None else cache.token_bytes,
            fixed_seconds=section.number("fixedSeconds", 0.0),
            token_seconds=section.number("tokenSeconds"),
            squared_seconds=section.number("squaredSeconds", 0.0),
        )
    check_profile(section.where, profile)
    return profile


def _point(cache: ModelCache | None, section: Section) -> MeasuredPoint:
    tokens = section.whole("tokens")
    size = section.number("cacheMib") * MIB if cache is None else cache.state_bytes + cache.token_bytes * tokens
    return MeasuredPoint(tokens=tokens, seconds=section.number("seconds"), cache_bytes=size)


def fit(where: str, points: Sequence[MeasuredPoint]) -> Profile:
    """Fit a profile to measured points: no coefficient below zero, by relative error for the seconds.

    Raises ConfigError for fewer than two, or where a longer prompt takes less time or memory than a shorter one.
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


def _link(section: Section) -> LinkCapacity:
    return LinkCapacity(name=section.text("name"), capacity_mbps=section.number("capacityMbps"))


def _profile_of(profiles: dict[str, _Instance], section: Section) -> _Instance:
    """Read a pool's profile: the name of a section of `profiles`, or a mapping that names a built-in one."""
    if section.is_mapping("profile"):
        return section.section("profile", _built_in)
    return profiles[section.name_of("profile", profiles)]


def _offload_pool(profiles: dict[str, _Instance], section: Section) -> OffloadPool:
    instance = _profile_of(profiles, section)
    return OffloadPool(
        name=section.text("name"),
        profile=instance.profile,
        instances=section.whole("instances"),
        link=section.text("link"),
        cost_per_hour=section.optional("costPerHour"),
        memory=instance.memory,
    )


def _hub_pool(profiles: dict[str, _Instance], section: Section) -> HubPool:
    instance = _profile_of(profiles, section)
    max_batch = section.whole("maxBatch")
    return HubPool(
        name=section.text("name"),
        profile=instance.profile,
        instances=section.whole("instances"),
        max_batch=max_batch,
        step_seconds=_step_seconds(section, instance.builtin, max_batch),
        min_prefill=section.whole("minPrefill", 0),
        min_decode=section.whole("minDecode", 0),
        cost_per_hour=section.optional("costPerHour"),
        memory=instance.memory,
    )


def _step_seconds(section: Section, builtin: Builtin | None, max_batch: int) -> float:
    """Read the decode step; a built-in profile may know the one of a batch."""
    if builtin is None or section.has("stepMillis"):
        return section.number("stepMillis") / 1000
    known = builtin.step_seconds(max_batch)
    if known is None:
        raise ConfigError(
            f"{section.where}.stepMillis is missing, and {builtin.name} knows no step of a batch of {max_batch}; add it"
        )
    return known


def _check_memory(system: System, workload: Workload) -> None:
    """Refuse pools whose instances cannot hold what they serve at once."""
    for pool in system.offload:
        if pool.memory is not None:
            longest = workload.max_tokens
            check_prompt(f"offloadPools.{pool.name}", pool.memory, longest, cache_bytes(pool.profile, longest))
    for pool in system.hub:
        if pool.memory is not None:
            mean_bytes = request_cache_bytes(pool.profile, system.output_tokens, workload)
            check_batch(f"hub.{pool.name}", pool.memory, pool.max_batch, mean_bytes)


def request_cache_bytes(profile: Profile, output_tokens: float, workload: Workload) -> int:
    """Return the bytes of the cache of a request of mean length in the middle of its answer."""
    return cache_bytes(profile, round(workload.mean_tokens + output_tokens / 2))


def _slo(system: System, section: Section) -> PlanSlo:
    slo = PlanSlo(ttft_millis=section.optional("ttftMillis"), tpot_millis=section.optional("tpotMillis"))
    for pool in system.hub:
        if slo.tpot_millis is not None and pool.step_seconds * 1000 > slo.tpot_millis * (1 + 1e-9):
            raise ConfigError(
                f"slo.tpotMillis is {slo.tpot_millis:g}, but a step of hub.{pool.name} takes stepMillis "
                f"{pool.step_seconds * 1000:g}: no plan keeps it; lower maxBatch and measure stepMillis anew"
            )
    return slo


def _published(section: Section) -> dict[str, dict[str, float]]:
    for name in section.keys:
        if name not in SYSTEMS:
            raise ConfigError(f"published.{name}: systems are {', '.join(SYSTEMS)}")
    return _named(numbers_of, section)


def numbers_of(section: Section) -> dict[str, float]:
    """Read a section of numbers only, whatever their names are."""
    return {key: section.number(key) for key in section.keys}


def _number(where: str, key: str, value: object) -> float:
    if isinstance(value, str):
        # YAML 1.1 reads 1e-4, without a dot, as a string.
        try:
            value = float(value)
        except ValueError:
            raise ConfigError(f"{where} is {_shown(value)}; {_number_advice(key, value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where} is {_shown(value)}; it must be a number")
    if not abs(value) < 1e300:
        raise ConfigError(f"{where} is {value}; it must be a finite number")
    return float(value)


def _whole(where: str, value: float) -> int:
    if value < 0 or not math.isfinite(value) or value != int(value):
        raise ConfigError(f"{where} is {value:g}; it must be a whole number of at least 0")
    return int(value)


def _number_advice(key: str, text: str) -> str:
    """Return the number to write instead of a number with a unit."""
    for ending, (unit, factors) in _UNITS.items():
        if key.endswith(ending):
            found = _WITH_UNIT.fullmatch(text)
            if found and found[2] in factors and found[1].count(".") < 2:
                return f"write the number alone, in {unit}: {float(found[1]) * factors[found[2]]:.15g}"
            return f"write a number alone, in {unit}"
    return "it must be a number"


def _alike(key: str, other: str) -> bool:
    """Return True when two names differ only in case, underscores or unit."""
    return _without_unit(key) == _without_unit(other)


def _without_unit(key: str) -> str:
    bare = re.sub(r"(?:_?(?:[KMGTkmgt]?i?[bB](?:it)?(?:p?s|/s)?|[sS]econds|[mM]illis|[mM]s|[bB]ytes))+$", "", key)
    return bare.lower().replace("_", "")


def _advice(key: str, known: list[str]) -> str:
    for name in known:
        if _alike(key, name) and key != name:
            for ending, (unit, factors) in _UNITS.items():
                factor = factors.get(key[len(name) - len(ending) :])
                if name.endswith(ending) and factor and factor != 1:
                    return f"it is {name}, in {unit}: multiply by {factor:.10g}"
            return f"it is {name}"
    close = difflib.get_close_matches(key, known, 1)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
