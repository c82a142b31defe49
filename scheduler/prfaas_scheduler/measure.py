"""Asks Prometheus for the figures of every link and pool, and makes samples of links and profiles of pools of them.

The figures of all clusters come from one query, so that they belong to one moment; what it asks follows from the
engines (prfaas_scheduler.engines). Figures are summed by the label `cluster`, which the scrape configuration takes from
the pods' own labels. The hub's row distinguishes a dead link (the hub was measured, the member was not) from missing
metrics (no cluster was measured). The traffic comes from each MemberCluster's own utilisationQuery, which may also read
a router. Where nobody counts a link's bytes, that query is the whole sample, at the time of the samples that it reads.

Instances of ours show points of exact curves. A parabola through three points is the curve again, and the mean over a
pool's instances is such a curve too. Points that make no such curve (absurd, falling, of another version) give no
profile. Other engines only count, and `prfaas_scheduler.profiles` learns curves from their counters.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from prfaas.capacity.profile import MeasuredPoint, profile_through
from prfaas.errors import PrfaasError
from prfaas.names import HUB
from prfaas.routing.links import LinkSample
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Cluster, RoutingTable
from prfaas_scheduler.prometheus import FIGURE_LABEL, Figure, Prometheus
from prfaas_scheduler.queries import sample_time_query, short_query

_Points = dict[int, float]
PoolKey = tuple[str, str]
"""Cluster and pool."""
MOST: Final = 1e15
"""No figure of a prompt or a process is larger, whatever a metric says; so sums and products of them are numbers."""
MOST_TOKENS_DIGITS: Final = 9


class Prefills(NamedTuple):
    """An engine process's counters of finished prompts since its start."""

    count: float
    seconds: float
    tokens: float
    """Computed."""
    cached_tokens: float


class CacheSizes(NamedTuple):
    """The size of a prompt's cache: a line in its length."""

    state_bytes: int
    token_bytes: int


class Measurements(NamedTuple):
    """One round of measurements. `errors` are whole sentences, empty when every query was answered."""

    samples: Mapping[str, LinkSample]
    hub_measured: bool
    """Whether some instance of the hub has a sample that is not stale."""
    errors: tuple[PrfaasError, ...]
    profiles: Mapping[PoolKey, Profile] = {}
    """Of pools whose instances show their own curves."""
    prefills: Mapping[tuple[str, ...], Prefills] = {}
    """By cluster, pool, and what else tells engine processes apart; of engines that only count."""
    cache_sizes: Mapping[PoolKey, CacheSizes] = {}
    local_waiting_prefills: float = 0.0
    """In the hub."""
    facts: frozenset[tuple[str, str]] = frozenset()
    """The names of the facts that came in, each with its cluster."""
    mismatches: tuple[tuple[str, str], ...] = ()
    """Clusters whose instances refused caches lately, and why."""


NOTHING = Measurements({}, hub_measured=False, errors=())


class LinkTraffic(NamedTuple):
    """The answer of one utilisationQuery, in Mbit/s."""

    mbps: float
    now_seconds: float
    sampled_at_seconds: float
    """When the newest sample that the query reads was taken, or when it was asked; by Prometheus's clock."""


async def measure(prometheus: Prometheus, table: RoutingTable, window_seconds: int) -> Measurements:
    """Ask everything at once. Never raises: what failed is missing, and named in `errors`."""
    errors: list[PrfaasError] = []
    figures, answers = await asyncio.gather(
        _own_figures(prometheus, short_query(table, window_seconds), errors),
        asyncio.gather(*(_traffic(prometheus, cluster, errors) for cluster in table.clusters)),
    )
    counted = {one.labels.get("cluster") for one in figures if one.labels.get(FIGURE_LABEL) == "sampled_at_seconds"}
    alone = [cluster for cluster in table.clusters if cluster.name not in counted]
    traffic = dict(zip((cluster.name for cluster in table.clusters), answers, strict=True))
    traffic |= await _with_times(prometheus, alone, traffic)
    seen = [one for name in ("sampled_at_seconds", "instances_sampled_at_seconds") for one in _of_hub(figures, name)]
    return Measurements(
        samples_of(figures, traffic),
        any(one.at_seconds - one.value <= table.stale_after_seconds * table.stretch for one in seen),
        tuple(errors),
        profiles_of(figures),
        prefills_of(figures),
        cache_sizes_of(figures),
        sum(one.value for one in _of_hub(figures, "waiting_prefills")),
        frozenset((one.labels.get(FIGURE_LABEL, ""), one.labels.get("cluster", "")) for one in figures),
        mismatches_of(figures),
    )


def mismatches_of(figures: Sequence[Figure]) -> tuple[tuple[str, str], ...]:
    found = [one.labels for one in figures if one.labels.get(FIGURE_LABEL) == "mismatched_at_seconds"]
    return tuple(sorted((labels.get("cluster", ""), labels.get("reason", "")) for labels in found))


def _of_hub(figures: Sequence[Figure], name: str) -> list[Figure]:
    return [one for one in figures if (one.labels.get("cluster"), one.labels.get(FIGURE_LABEL)) == (HUB, name)]


async def _own_figures(prometheus: Prometheus, query: str, errors: list[PrfaasError]) -> list[Figure]:
    try:
        return await prometheus.vector(query)
    except PrfaasError as error:
        errors.append(error)
        return []


async def _traffic(prometheus: Prometheus, cluster: Cluster, errors: list[PrfaasError]) -> LinkTraffic | None:
    """Return the present traffic of a cluster's link, as of now."""
    try:
        figure = await prometheus.figure(_traffic_query(cluster))
    except PrfaasError as error:
        errors.append(type(error)(f"link of MemberCluster {cluster.name}: {error}"))
        return None
    return LinkTraffic(figure.value, figure.at_seconds, figure.at_seconds) if figure else None


def _traffic_query(cluster: Cluster) -> str:
    return cluster.utilisation_query.replace("$cluster", cluster.name)


async def _with_times(
    prometheus: Prometheus, clusters: Sequence[Cluster], traffic: Mapping[str, LinkTraffic | None]
) -> dict[str, LinkTraffic | None]:
    """Return the traffic of these clusters with the time of its samples, where Prometheus can tell it.

    A rate over a window is a new number at every moment. Without its samples' own time the threshold would move many
    times on one of them.
    """

    async def timed(cluster: Cluster) -> tuple[str, LinkTraffic | None]:
        found, query = traffic[cluster.name], sample_time_query(_traffic_query(cluster))
        if found is None or not query:
            return cluster.name, found
        try:
            at_seconds = await prometheus.value(query)
        except PrfaasError:  # the selectors were taken out of a query by their looks
            return cluster.name, found
        return cluster.name, found._replace(sampled_at_seconds=at_seconds) if at_seconds else found

    return dict(await asyncio.gather(*map(timed, clusters)))


def samples_of(figures: Sequence[Figure], traffic: Mapping[str, LinkTraffic | None]) -> dict[str, LinkSample]:
    """Return a sample for every member cluster that has one; a figure without one leaves its default."""
    by_cluster: dict[str, dict[str, float]] = {name: {} for name, found in traffic.items() if found}
    now_seconds = max((found.now_seconds for found in traffic.values() if found), default=0.0)
    for figure in figures:
        values = by_cluster.setdefault(figure.labels.get("cluster", ""), {})
        name = figure.labels.get(FIGURE_LABEL, "")
        values[name] = values.get(name, 0.0) + figure.value  # waiting prefills come by pool, the rest by cluster alone
        now_seconds = figure.at_seconds
    samples = {
        cluster: _sample(values, now_seconds, traffic.get(cluster))
        for cluster, values in by_cluster.items()
        if cluster != HUB
    }
    return {cluster: sample for cluster, sample in samples.items() if sample is not None}


def _sample(values: Mapping[str, float], now_seconds: float, traffic: LinkTraffic | None) -> LinkSample | None:
    """Return one link's sample at the time of the link's own counters, or else of its traffic or its instances."""
    names = ("sampled_at_seconds", "instances_sampled_at_seconds")
    instances_at_seconds = max((values[name] for name in names if name in values), default=None)
    sampled_at_seconds = values.get("sampled_at_seconds")
    # A link that nobody counts: the sample is as old as what its query reads, or says only that instances live.
    if sampled_at_seconds is None:
        sampled_at_seconds = traffic.sampled_at_seconds if traffic else instances_at_seconds
    if sampled_at_seconds is None:
        return None
    fraction, latest = values.get("backlogged_fraction", 0.0), values.get("latest_backlogged_fraction", 0.0)
    return LinkSample(
        sampled_at_seconds=sampled_at_seconds,
        age_seconds=now_seconds - sampled_at_seconds,
        instances_age_seconds=None if instances_at_seconds is None else now_seconds - instances_at_seconds,
        traffic_mbps=traffic.mbps if traffic else None,
        delivery_mbps=values.get("backlogged_mbps", 0.0) / fraction if fraction > 0 else None,
        backlogged_fraction=fraction,
        latest_delivery_mbps=values.get("latest_backlogged_mbps", 0.0) / latest if latest > 0 else None,
        latest_backlogged_fraction=latest,
        unsent_bytes=values.get("unsent_bytes", 0.0),
        waiting_prefills=values.get("waiting_prefills", 0.0),
    )


def prefills_of(figures: Sequence[Figure]) -> dict[tuple[str, ...], Prefills]:
    """Return the counters of every engine process that counts its prefills, by cluster, pool, instance and engine."""
    names = ("prompts", "prompts_seconds", "prompts_tokens", "prompts_cached_tokens")
    counters: dict[tuple[str, ...], dict[str, float]] = {}
    for figure in figures:
        if (name := figure.labels.get(FIGURE_LABEL, "")) in names and _is_possible(figure):
            key = tuple(figure.labels.get(label, "") for label in ("cluster", "pool", "instance", "engine"))
            counters.setdefault(key, {})[name] = figure.value
    return {
        key: Prefills(*(values.get(name, 0.0) for name in names))
        for key, values in counters.items()
        if all(name in values for name in names[:3])
    }


def cache_sizes_of(figures: Sequence[Figure]) -> dict[PoolKey, CacheSizes]:
    """Return the line through the shown cache sizes of every pool that has two."""
    sizes: dict[PoolKey, _Points] = {}
    for figure in figures:
        if figure.labels.get(FIGURE_LABEL) == "cache_bytes":
            _note(sizes.setdefault(_pool_of(figure), {}), figure)
    found: dict[PoolKey, CacheSizes] = {}
    for key, points in sizes.items():
        short, long = min(points, default=0), max(points, default=0)
        token_bytes = (points[long] - points[short]) / (long - short) if short < long else 0.0
        if token_bytes > 0:
            found[key] = CacheSizes(max(0, round(points[short] - token_bytes * short)), round(token_bytes))
    return found


def _pool_of(figure: Figure) -> PoolKey:
    return figure.labels.get("cluster", ""), figure.labels.get("pool", "")


def profiles_of(figures: Sequence[Figure]) -> Mapping[PoolKey, Profile]:
    """Return the profile of every pool that has one, by cluster and pool."""
    seconds: dict[PoolKey, _Points] = {}
    sizes: dict[PoolKey, _Points] = {}
    samples: dict[PoolKey, int] = {}
    for figure in figures:
        key = _pool_of(figure)
        match figure.labels.get(FIGURE_LABEL):
            case "prefill_seconds":
                _note(seconds.setdefault(key, {}), figure)
            case "cache_bytes":
                _note(sizes.setdefault(key, {}), figure)
            case "profile_samples" if _is_possible(figure):
                samples[key] = int(figure.value)
            case _:
                pass
    found = {
        key: profile_of(seconds[key], sizes[key], count)
        for key, count in samples.items()
        if count > 0 and key in seconds and key in sizes
    }
    return {key: profile for key, profile in found.items() if profile is not None}


def _is_possible(figure: Figure) -> bool:
    return -MOST <= figure.value <= MOST


def _note(points: _Points, figure: Figure) -> None:
    text = figure.labels.get("tokens", "")
    if text.isdecimal() and len(text) <= MOST_TOKENS_DIGITS and _is_possible(figure):
        points[int(text)] = figure.value


def profile_of(seconds: _Points, sizes: _Points, samples: int) -> Profile | None:
    """Return the curve through the shortest, the middle and the longest point; None where there is none."""
    lengths = sorted(seconds.keys() & sizes.keys() - {0})
    if len(lengths) < 3:
        return None
    chosen = (lengths[0], lengths[len(lengths) // 2], lengths[-1])
    return profile_through([MeasuredPoint(tokens, seconds[tokens], sizes[tokens]) for tokens in chosen], samples)
