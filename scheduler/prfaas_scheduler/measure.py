"""Asks Prometheus for the figures of every link and pool, and makes samples of links and profiles of pools of them.

Our own figures of all clusters come from one query, so that they belong to one moment. Each is summed by the label
`cluster`, which the scrape configuration takes from the pods' own labels. The hub's row distinguishes a dead link (the
hub was measured, the member was not) from missing metrics (no cluster was measured). Only bytes that a member's
instances send to the hub, or to a peer of unknown name, cross its link. The traffic comes from each MemberCluster's own
utilisationQuery, which may also read a router.

Instances show points of exact curves. A parabola through three points is the curve again, and the mean over a pool's
instances is such a curve too. Points that make no such curve (absurd, falling, of another version) give no profile.
"""

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prfaas.capacity.profile import MeasuredPoint, profile_through
from prfaas.errors import PrfaasError
from prfaas.names import HUB
from prfaas.routing.links import LinkSample
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Cluster, RoutingTable
from prfaas_scheduler.prometheus import FIGURE_LABEL, Figure, Prometheus

_Points = dict[int, float]
_Key = tuple[str, str]  # cluster and pool

# Matchers: $at of the clusters, $link of them and the peer, $pools of this policy's pools. $window: seconds of rates.
FIGURES: Mapping[str, str] = {
    "sampled_at_seconds": "max by (cluster) (timestamp(prfaas_transfer_sent_bytes_total{$at}))",
    "backlogged_mbps": ("sum by (cluster) (rate(prfaas_link_backlogged_bytes_total{$link}[$windows])) * 8 / 1e6"),
    # The share of time in which at least one instance had data waiting, were they independent: 1 - prod(1 - share).
    # A sum would count time that they share twice, and take the link for narrower than it is.
    "backlogged_fraction": (
        "1 - exp(sum by (cluster) (ln(1 - clamp_max("
        "rate(prfaas_link_backlogged_seconds_total{$link}[$windows]), 0.999999))))"
    ),
    # The same over the latest two scrapes.
    "latest_backlogged_mbps": (
        "sum by (cluster) (irate(prfaas_link_backlogged_bytes_total{$link}[$windows])) * 8 / 1e6"
    ),
    "latest_backlogged_fraction": (
        "1 - exp(sum by (cluster) (ln(1 - clamp_max("
        "irate(prfaas_link_backlogged_seconds_total{$link}[$windows]), 0.999999))))"
    ),
    "unsent_bytes": "sum by (cluster) (prfaas_link_unsent_bytes{$link})",
    "waiting_prefills": "sum by (cluster) (prfaas_prefills_waiting{$at, $pools})",
    "prefill_seconds": "avg by (cluster, pool, tokens) (prfaas_profile_prefill_seconds{$at, $pools})",
    "cache_bytes": "avg by (cluster, pool, tokens) (prfaas_profile_cache_bytes{$at, $pools})",
    "profile_samples": "min by (cluster, pool) (prfaas_profile_samples{$at, $pools})",
}


class Measurements(NamedTuple):
    """One round of measurements. `errors` are whole sentences, empty when every query was answered."""

    samples: Mapping[str, LinkSample]
    hub_measured: bool
    """Whether some instance of the hub has a sample that is not stale."""
    errors: tuple[PrfaasError, ...]
    profiles: Mapping[tuple[str, str], Profile] = {}
    """By cluster and pool."""
    local_waiting_prefills: float = 0.0
    """In the hub."""


NOTHING = Measurements({}, hub_measured=False, errors=())


async def measure(prometheus: Prometheus, table: RoutingTable, window_seconds: int) -> Measurements:
    """Ask everything at once. Never raises: what failed is missing, and named in `errors`."""
    errors: list[PrfaasError] = []
    figures, traffic = await asyncio.gather(
        _own_figures(prometheus, own_query(table, window_seconds), errors),
        asyncio.gather(*(_traffic(prometheus, cluster, errors) for cluster in table.clusters)),
    )
    sampled = _of_hub(figures, "sampled_at_seconds")
    return Measurements(
        samples_of(figures, dict(traffic)),
        any(one.at_seconds - one.value <= table.stale_after_seconds for one in sampled),
        tuple(errors),
        profiles_of(figures),
        sum(one.value for one in _of_hub(figures, "waiting_prefills")),
    )


def _of_hub(figures: Sequence[Figure], name: str) -> list[Figure]:
    return [one for one in figures if (one.labels.get("cluster"), one.labels.get(FIGURE_LABEL)) == (HUB, name)]


async def _own_figures(prometheus: Prometheus, query: str, errors: list[PrfaasError]) -> list[Figure]:
    try:
        return await prometheus.vector(query)
    except PrfaasError as error:
        errors.append(error)
        return []


async def _traffic(prometheus: Prometheus, cluster: Cluster, errors: list[PrfaasError]) -> tuple[str, float | None]:
    """Return the cluster and the present traffic of its link in Mbit/s."""
    try:
        return cluster.name, await prometheus.value(cluster.utilisation_query.replace("$cluster", cluster.name))
    except PrfaasError as error:
        errors.append(type(error)(f"link of MemberCluster {cluster.name}: {error}"))
        return cluster.name, None


def own_query(table: RoutingTable, window_seconds: int) -> str:
    """Return the one query for every figure of every link; elements carry the labels `cluster` and `figure`."""
    at = matcher("cluster", [HUB, *(cluster.name for cluster in table.clusters)])
    pools = own_pools(table)
    named = (
        f'label_replace({_fill(expression, at, pools, window_seconds)}, "{FIGURE_LABEL}", "{name}", "", "")'
        for name, expression in FIGURES.items()
    )
    return " or ".join(named)


def own_pools(table: RoutingTable) -> str:
    return matcher("pool", sorted({instance.pool for instance in table.instances}))


def matcher(label: str, values: Sequence[str]) -> str:
    """Return a PromQL matcher of exactly these values, whatever characters they hold."""
    pattern = "|".join(re.escape(value) for value in values)
    escaped = pattern.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{label}=~"{escaped}"'


def _fill(expression: str, at: str, pools: str, window_seconds: int) -> str:
    link = f"{at}, {matcher('peer', [HUB, ''])}"
    filled = expression.replace("$windows", f"{window_seconds}s").replace("$link", link)
    return filled.replace("$pools", pools).replace("$at", at)


def samples_of(figures: Sequence[Figure], traffic_mbps: Mapping[str, float | None]) -> dict[str, LinkSample]:
    """Return a sample for every member cluster that has one; a figure without one leaves its default."""
    by_cluster: dict[str, dict[str, float]] = {}
    now_seconds = 0.0
    for figure in figures:
        by_cluster.setdefault(figure.labels.get("cluster", ""), {})[figure.labels.get(FIGURE_LABEL, "")] = figure.value
        now_seconds = figure.at_seconds
    return {
        cluster: _sample(values, now_seconds, traffic_mbps.get(cluster))
        for cluster, values in by_cluster.items()
        if cluster != HUB and "sampled_at_seconds" in values
    }


def _sample(values: Mapping[str, float], now_seconds: float, traffic_mbps: float | None) -> LinkSample:
    fraction, latest = values.get("backlogged_fraction", 0.0), values.get("latest_backlogged_fraction", 0.0)
    return LinkSample(
        sampled_at_seconds=values["sampled_at_seconds"],
        age_seconds=now_seconds - values["sampled_at_seconds"],
        traffic_mbps=traffic_mbps,
        delivery_mbps=values.get("backlogged_mbps", 0.0) / fraction if fraction > 0 else None,
        backlogged_fraction=fraction,
        latest_delivery_mbps=values.get("latest_backlogged_mbps", 0.0) / latest if latest > 0 else None,
        latest_backlogged_fraction=latest,
        unsent_bytes=values.get("unsent_bytes", 0.0),
        waiting_prefills=values.get("waiting_prefills", 0.0),
    )


def profiles_of(figures: Sequence[Figure]) -> Mapping[_Key, Profile]:
    """Return the profile of every pool that has one, by cluster and pool."""
    seconds: dict[_Key, _Points] = {}
    sizes: dict[_Key, _Points] = {}
    samples: dict[_Key, int] = {}
    for figure in figures:
        key = figure.labels.get("cluster", ""), figure.labels.get("pool", "")
        match figure.labels.get(FIGURE_LABEL):
            case "prefill_seconds":
                _note(seconds.setdefault(key, {}), figure)
            case "cache_bytes":
                _note(sizes.setdefault(key, {}), figure)
            case "profile_samples" if math.isfinite(figure.value):
                samples[key] = int(figure.value)
            case _:
                pass
    found = {
        key: profile_of(seconds[key], sizes[key], count)
        for key, count in samples.items()
        if count > 0 and key in seconds and key in sizes
    }
    return {key: profile for key, profile in found.items() if profile is not None}


def _note(points: _Points, figure: Figure) -> None:
    text = figure.labels.get("tokens", "")
    if text.isdecimal() and math.isfinite(figure.value):
        points[int(text)] = figure.value


def profile_of(seconds: _Points, sizes: _Points, samples: int) -> Profile | None:
    """Return the curve through the shortest, the middle and the longest point; None where there is none."""
    lengths = sorted(seconds.keys() & sizes.keys() - {0})
    if len(lengths) < 3:
        return None
    chosen = (lengths[0], lengths[len(lengths) // 2], lengths[-1])
    return profile_through([MeasuredPoint(tokens, seconds[tokens], sizes[tokens]) for tokens in chosen], samples)
