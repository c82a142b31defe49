"""Reads the file that describes a system to a planner or a simulator: parsed YAML in, typed facts out.

docs/understand/capacity.md lists the fields. People write these files by hand, from data sheets in other units. So no
field is ignored, every message names field, value and fix, and what cannot be meant is refused: a figure of such a plan
would be worse than none. That is a profile that was measured with much shorter prompts, an instance that is too small,
and figures that are 8 or 1,000 times what they can be, as bits and other units are.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from prfaas.capacity.builtin import Builtin, read_builtin
from prfaas.capacity.memory import DEVICE_BYTES, InstanceMemory, check_memory
from prfaas.capacity.models import MODEL_CACHES, MODEL_WEIGHTS_BYTES, ModelCache
from prfaas.capacity.profile import Curve, MeasuredPoint, Sample, cache_bytes
from prfaas.capacity.section import Section
from prfaas.capacity.system import HubPool, LinkCapacity, OffloadPool, System, check, check_profile, present
from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError
from prfaas.util import MIB
from prfaas.wire.profile import Profile

T = TypeVar("T")
SYSTEMS: Final = ("hub_alone", "homogeneous", "naive_heterogeneous", "prfaas_pd")
_COVERED: Final = 2
"""Times the longest measured prompt: as far as a fitted curve may be followed."""
_ALIKE: Final = 4
"""Times that caches of the same prompt may differ between pools. Compression halves them; bits are 8 times as many."""
_LONGEST_SECONDS: Final = 60.0
"""In which a link carries the cache of a mean prompt, at most."""
_FASTEST_MBPS: Final = 1e8
"""The most that a MemberCluster may declare, too."""
_QUICKEST_STEP_MILLIS: Final = 0.1
_MOST_BATCH: Final = 16_384
_MOST_INSTANCES: Final = 50_000


class PlanSlo(msgspec.Struct, frozen=True, kw_only=True):
    """The promises to users, in milliseconds: P90 of the first token, and the time of each later token."""

    ttft_millis: float | None = None
    tpot_millis: float | None = None


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file's contents, without pools that have no instances. `simulation` is handed on as it stands."""

    system: System
    workload: Workload
    slo: PlanSlo
    published: dict[str, dict[str, float]]
    simulation: dict[str, Any]
    notes: tuple[str, ...] = ()
    """What a reader of the plan has to know of its input."""


class _Instance(NamedTuple):
    """What a section of `profiles` says of an instance."""

    profile: Profile
    memory: InstanceMemory | None = None
    model: str = ""
    builtin: Builtin | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of a pool that it gives."""
        name = self.builtin.name if self.builtin else ""
        return {"profile": self.profile, "memory": self.memory, "model": self.model, "builtin": name}


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
    system = present(check(system))
    _check_profiles(system, workload)
    _check_links(system, workload)
    _check_memory(system, workload)
    result = PlanFile(
        system=system,
        workload=workload,
        slo=top.section("slo", partial(_slo, system), {}),
        published=top.section("published", _published, {}),
        simulation=top.mapping("simulation", {}),
        notes=_notes(system, workload),
    )
    top.end()
    return result


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
        workload = section.section("lognormal", read_lognormal)
    if output_tokens is None or "outputTokens" in section.keys:
        output_tokens = section.number("outputTokens")
    return workload, output_tokens


def _histogram(section: Section) -> Workload:
    return Workload.histogram(section.integers("edgesTokens"), section.numbers("counts"))


def read_lognormal(section: Section) -> Workload:
    """Read lengths of prompts that are distributed so."""
    return Workload.lognormal(
        section.number("mu"), section.number("sigma"), section.whole("minTokens"), section.whole("maxTokens")
    )


def _instance(section: Section) -> _Instance:
    """Read a section of `profiles`: a built-in profile, or measurements and, if they are given, the devices."""
    if section.has("builtin"):
        return _built_in(section)
    profile = _profile(section)
    model = section.text("model") if section.has("model") else ""
    if not (section.has("gpu") or section.has("gpus") or section.has("weightsGb")):
        return _Instance(profile, model=model)
    weights, weights_bytes = _weights(section)
    devices = section.at_least(1, "gpus")
    memory = InstanceMemory(
        device=section.name_of("gpu", DEVICE_BYTES),
        devices=devices,
        weights_bytes=weights_bytes,
        row_copies=MODEL_CACHES[model].row_copies(devices) if model else 1,
    )
    check_memory(section.where, memory, weights)
    return _Instance(profile, memory, model)


def _weights(section: Section) -> tuple[str, float]:
    """Return what the weights are called, and their bytes: those given, or those of the model as it is published."""
    if section.has("model") and not section.has("weightsGb"):
        model = section.text("model")
        return f"the weights of {model} as published (give weightsGb for others)", MODEL_WEIGHTS_BYTES[model]
    return "the weights", 1e9 * section.positive("weightsGb")


def _built_in(section: Section) -> _Instance:
    builtin = read_builtin(f"{section.where}.builtin", section.text("builtin"))
    return _Instance(builtin.profile(), builtin.memory, builtin.cache_model, builtin)


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
    link = LinkCapacity(name=section.text("name"), capacity_mbps=section.number("capacityMbps"))
    if link.capacity_mbps > _FASTEST_MBPS:
        raise ConfigError(
            f"{section.where}.capacityMbps is {link.capacity_mbps:g}: no link carries 100 Tbit/s, so this looks like "
            "bit/s; give Mbit/s"
        )
    return link


def _profile_of(profiles: dict[str, _Instance], section: Section) -> _Instance:
    """Read a pool's profile: the name of a section of `profiles`, or a mapping that names a built-in one."""
    if section.is_mapping("profile"):
        return section.section("profile", _built_in)
    return profiles[section.name_of("profile", profiles)]


def _offload_pool(profiles: dict[str, _Instance], section: Section) -> OffloadPool:
    instance = _profile_of(profiles, section)
    return OffloadPool(
        name=section.text("name"),
        instances=_instances(section),
        link=section.text("link"),
        cost_per_hour=section.optional("costPerHour"),
        **instance.fields,
    )


def _hub_pool(profiles: dict[str, _Instance], section: Section) -> HubPool:
    instance = _profile_of(profiles, section)
    max_batch = section.whole("maxBatch")
    if max_batch > _MOST_BATCH:
        raise ConfigError(
            f"{section.where}.maxBatch is {max_batch}: no engine decodes more than {_MOST_BATCH} requests together; "
            "give its --max-num-seqs, or what its memory holds"
        )
    return HubPool(
        name=section.text("name"),
        instances=_instances(section),
        max_batch=max_batch,
        step_seconds=_step_seconds(section, instance.builtin, max_batch),
        min_prefill=section.whole("minPrefill", 0),
        min_decode=section.whole("minDecode", 0),
        cost_per_hour=section.optional("costPerHour"),
        **instance.fields,
    )


def _instances(section: Section) -> int:
    count = section.whole("instances")
    if count > _MOST_INSTANCES:
        raise ConfigError(
            f"{section.where}.instances is {count}: no pool has more than {_MOST_INSTANCES}; give its size"
        )
    return count


def _step_seconds(section: Section, builtin: Builtin | None, max_batch: int) -> float:
    """Read the decode step; a built-in profile may know the one of a batch."""
    if builtin is None or section.has("stepMillis"):
        millis = section.number("stepMillis")
        if 0 < millis < _QUICKEST_STEP_MILLIS:
            raise ConfigError(
                f"{section.where}.stepMillis is {millis:g}: no step is that quick, so this looks like seconds; "
                f"write {1000 * millis:g}"
            )
        return millis / 1000
    known = builtin.step_seconds(max_batch)
    if known is None:
        raise ConfigError(
            f"{section.where}.stepMillis is missing, and {builtin.name} knows no step of a batch of {max_batch}; add it"
        )
    return known


def _pools(system: System) -> Iterator[tuple[str, OffloadPool | HubPool]]:
    yield from ((f"offloadPools.{pool.name}", pool) for pool in system.offload)
    yield from ((f"hub.{pool.name}", pool) for pool in system.hub)


def _check_profiles(system: System, workload: Workload) -> None:
    """Refuse profiles that do not reach as far as the prompts, or are not of one model."""
    models = {pool.model: where for where, pool in _pools(system) if pool.model}
    if len(models) > 1:
        (first, there), (second, here) = list(models.items())[:2]
        raise ConfigError(
            f"{here}.profile is of {second}, and {there}.profile of {first}: only the model that computed a cache can "
            "read it; give all pools profiles of one"
        )
    longest, mean = workload.quantile(1.0), round(workload.mean_tokens)
    sizes: dict[str, int] = {}
    for where, pool in _pools(system):
        known = pool.profile.max_tokens
        if 0 < _COVERED * known < longest:
            raise ConfigError(
                f"{where}.profile was measured up to {known:,} tokens and prompts reach {longest:,}, where it is a "
                f"guess; measure one of {longest:,}, or leave prompts above {_COVERED * known:,} out of the workload"
            )
        sizes[where] = cache_bytes(pool.profile, mean)
    small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[large] > _ALIKE * sizes[small]:
        raise ConfigError(
            f"{large}.profile: the cache of {mean:,} tokens takes {sizes[large] / MIB:,.4g} MiB, "
            f"{sizes[large] / sizes[small]:.3g} times as much as in {small}, and all pools serve one model; "
            "give both in bytes (a byte is 8 bits), and once where several ranks hold the same"
        )


def _check_links(system: System, workload: Workload) -> None:
    """Refuse links over which not even a single cache comes in time."""
    for pool in system.offload:
        link, size = system.link(pool.link), cache_bytes(pool.profile, round(workload.mean_tokens))
        seconds = 8e-6 * size / link.capacity_mbps
        if seconds > _LONGEST_SECONDS:
            raise ConfigError(
                f"links.{link.name}.capacityMbps is {link.capacity_mbps:g}: the cache of a mean prompt, "
                f"{size / MIB:,.0f} MiB, would take {seconds:,.0f} s; if these are Gbit/s, write "
                f"{1000 * link.capacity_mbps:g}, else give {pool.name} 0 instances"
            )


def _check_memory(system: System, workload: Workload) -> None:
    """Refuse instances that cannot hold the longest request, or the batch that they decode."""
    longest = workload.quantile(1.0)
    for where, pool in _pools(system):
        if pool.memory is None:
            continue
        answer = round(system.output_tokens) if isinstance(pool, HubPool) else 0
        one = pool.memory.cache_bytes(pool.profile, longest + answer)
        check_memory(where, pool.memory, f"weights and the cache of {longest + answer:,} tokens", one)
        if isinstance(pool, HubPool):
            mean = request_cache_bytes(pool.profile, pool.memory, system.output_tokens, workload)
            check_memory(
                f"{where}.maxBatch is {pool.max_batch}",
                pool.memory,
                "weights and so many caches of the mean request",
                pool.max_batch * mean,
                f"give at most {pool.memory.left_bytes // mean:.0f}",
            )


def request_cache_bytes(profile: Profile, memory: InstanceMemory, output_tokens: float, workload: Workload) -> int:
    """Return the bytes that a request of mean length takes in an instance, its answer included."""
    return memory.cache_bytes(profile, round(workload.mean_tokens + output_tokens))


def _notes(system: System, workload: Workload) -> tuple[str, ...]:
    """Return what the file leaves open, and what its built-in profiles do not know."""
    notes: list[str] = []
    if unchecked := [pool.name for _, pool in _pools(system) if pool.memory is None]:
        notes.append(
            f"Memory was not checked for {', '.join(unchecked)}: add gpu and gpus to the profile, and weightsGb unless "
            "it names a model, or take a built-in one."
        )
    builtins = {pool.name: read_builtin(pool.name, pool.builtin) for _, pool in _pools(system) if pool.builtin}
    if estimated := [name for name, one in builtins.items() if one.basis == "estimated"]:
        notes.append(
            f"Prefills of {', '.join(estimated)} are estimated from measured kernels, without a scheduler. "
            "`prfaas profile measure` measures yours."
        )
    notes += [f"Prefills of {name} are {one.source}." for name, one in builtins.items() if one.basis == "assumed"]
    held_tokens = workload.mean_tokens + system.output_tokens / 2
    for pool in system.hub:
        known = builtins.get(pool.name)
        if known is None or pool.step_seconds != known.step_seconds(pool.max_batch):
            continue
        if held_tokens > _COVERED * known.context_tokens:
            notes.append(
                f"The decode step of {pool.name}, {1000 * pool.step_seconds:.3g} ms, is that of requests with "
                f"{known.context_tokens:,} tokens. Here they hold {held_tokens:,.0f} in the mean, and it takes "
                "longer: measure stepMillis."
            )
    return tuple(notes)


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
