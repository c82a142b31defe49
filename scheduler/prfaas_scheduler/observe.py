"""Sums up the last minutes: the gateway's counters, and the status that the operator's long loop plans with.

A distribution of lengths needs minutes of prompts, a share of offloads one minute, an arrival rate less. Counts of
lengths are hundreds of figures, so they are kept only every ten seconds. A gateway that restarted counts from zero; all
earlier counts are then forgotten.

The short loop's own figures cover seconds. The summary covers minutes, so its query runs seldom. A summary that cannot
be renewed keeps its time, by which its readers see its age. It holds integers only, as every custom resource does.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from operator import sub
from typing import Any, Final, NamedTuple

from prfaas.capacity.profile import points_of
from prfaas.capacity.workload import slices
from prfaas.names import HUB
from prfaas.routing.balance import find_work
from prfaas.routing.lengths import EDGES
from prfaas.wire.control import Counters, LinkReport
from prfaas.wire.profile import Profile
from prfaas.wire.routes import RoutingTable
from prfaas_scheduler.prometheus import FIGURE_LABEL, Figure
from prfaas_scheduler.queries import long_query
from prfaas_scheduler.slow_time import whole_seconds

OFFLOADED_WINDOW_SECONDS = 60.0
LENGTHS_WINDOW_SECONDS = 300.0
LENGTHS_STEP_SECONDS = 10.0
ARRIVALS_WINDOW_SECONDS = 30.0
MIN_MEAN_SECONDS = 30.0
OBSERVE_SECONDS: Final = 30.0
WINDOW_SECONDS: Final = 300


class CounterHistory:
    """Keeps the gateway's counters of the last minutes."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, Counters]] = deque()
        self._lengths: deque[tuple[float, Counters]] = deque()
        self._latest: tuple[float, Counters] | None = None

    def add(self, now_seconds: float, counters: Counters) -> None:
        """Add a new count; a gateway that restarted begins anew."""
        if self._counts and counters.offloaded < self._counts[-1][1].offloaded:
            self._counts.clear()
        self._counts.append((now_seconds, counters))
        while self._counts[0][0] < now_seconds - OFFLOADED_WINDOW_SECONDS:
            self._counts.popleft()
        self._add_lengths(now_seconds, counters)

    def _add_lengths(self, now_seconds: float, counters: Counters) -> None:
        lengths, before = counters.lengths, self._latest[1].lengths if self._latest else ()
        if len(lengths) != len(before) or any(map(int.__lt__, lengths, before)):
            self._lengths.clear()
        self._latest = (now_seconds, counters)
        if not self._lengths or now_seconds - self._lengths[-1][0] >= LENGTHS_STEP_SECONDS:
            self._lengths.append((now_seconds, counters))
        # The oldest one kept is at the window's edge or just beyond, so that the window is never short.
        while len(self._lengths) > 1 and self._lengths[1][0] <= now_seconds - LENGTHS_WINDOW_SECONDS:
            self._lengths.popleft()

    def offloaded_percent(self) -> int | None:
        """Return the share of offloaded requests; None when there was none, or the gateway restarted."""
        if not self._counts:
            return None
        first, last = self._counts[0][1], self._counts[-1][1]
        offloaded, local = last.offloaded - first.offloaded, last.local - first.local
        if offloaded < 0 or local < 0 or offloaded + local == 0:
            return None
        return round(100 * offloaded / (offloaded + local))

    def offloads_since(self, at_seconds: float) -> int | None:
        """Return how many prompts were offloaded after the last count before `at_seconds`; None without two counts."""
        if len(self._counts) < 2:
            return None
        earlier = [counters for at, counters in self._counts if at <= at_seconds]
        first = earlier[-1] if earlier else self._counts[0][1]
        return self._counts[-1][1].offloaded - first.offloaded

    def lengths(self) -> Sequence[int]:
        """Return the prompts of the last minutes by bin; empty when the gateway counts none."""
        if self._latest is None:
            return ()
        first, last = self._lengths[0][1].lengths, self._latest[1].lengths
        return list(map(sub, last, first))

    def work(self, cluster: str) -> float:
        """Return the tokens that a cluster's side computes of each that `lengths` counts, over the same minutes."""
        if self._latest is None:
            return 1.0
        first, last = self._lengths[0][1], self._latest[1]
        if cluster == HUB:
            return find_work(first.local_tokens, last.local_tokens)
        return find_work(first.offloaded_tokens, last.offloaded_tokens)

    def mean_arrivals_per_second(self) -> float | None:
        """Return the prompts a second over all that `lengths` counts; None while that is less than half a minute."""
        if self._latest is None:
            return None
        seconds = self._latest[0] - self._lengths[0][0]
        return sum(self.lengths()) / seconds if seconds >= MIN_MEAN_SECONDS else None

    def arrivals_per_second(self) -> float | None:
        """Return the prompts a second lately; None before there are two counts some time apart."""
        if self._latest is None:
            return None
        now_seconds, last = self._latest
        earlier = [one for one in self._lengths if one[0] <= now_seconds - ARRIVALS_WINDOW_SECONDS]
        at_seconds, first = earlier[-1] if earlier else self._lengths[0]
        if now_seconds - at_seconds < LENGTHS_STEP_SECONDS:
            return None
        return (sum(last.lengths) - sum(first.lengths)) / (now_seconds - at_seconds)


class SummaryInputs(NamedTuple):
    """The inputs of a summary beside the query's own figures."""

    lengths: Sequence[int]
    """Prompts of the last minutes by bin."""
    arrivals_per_second: float
    """At this gateway, over the same minutes."""
    links: Sequence[LinkReport]
    profiles: Mapping[tuple[str, str], Profile]
    """By cluster and pool."""


def query_of(table: RoutingTable) -> str:
    """Return the one query for all figures, told apart by the label `figure`; empty where nothing can be asked."""
    return long_query(table, whole_seconds(WINDOW_SECONDS, table.stretch))


def summarise(seen: SummaryInputs, figures: Sequence[Figure], now: str) -> dict[str, Any]:
    """Return the policy's status.observed; `now` in RFC 3339. Figures that are not known are left out."""
    values = {figure.labels.get(FIGURE_LABEL, ""): figure.value for figure in figures if "pool" not in figure.labels}
    by_pool: dict[str, dict[str, float]] = {}
    for figure in figures:
        if (pool := figure.labels.get("pool")) is not None:
            by_pool.setdefault(pool, {})[figure.labels.get(FIGURE_LABEL, "")] = figure.value
    known = {
        "outputMilliTokens": _quotient(1000, values.get("tokens"), values.get("answers")),
        "decodeStepMicros": _quotient(1_000_000, values.get("decode_seconds"), values.get("decode_steps")),
        "decodeBatch": _whole(values.get("batch")) or None,
        "firstTokenP90Millis": _quotient(1000, values.get("first_token_seconds"), 1.0),
    }
    profiles = {pool: profile for (_, pool), profile in seen.profiles.items()}
    return {
        "time": now,
        "prompts": sum(seen.lengths),
        "gatewayArrivalMilliPerSecond": round(1000 * seen.arrivals_per_second),
        "lengthTokens": slices(EDGES, seen.lengths),
        **{name: value for name, value in known.items() if value is not None},
        "links": [
            {"clusterName": link.cluster, "effectiveMbps": round(link.effective_mbps)}
            for link in seen.links
            if link.state == "Alive"
        ],
        "pools": [_pool(name, profiles.get(name), by_pool.get(name, {})) for name in sorted(profiles.keys() | by_pool)],
    }


def _pool(name: str, profile: Profile | None, values: Mapping[str, float]) -> dict[str, Any]:
    pool: dict[str, Any] = {"name": name, "waitingPrefills": _whole(values.get("waiting"))}
    if "running" in values:
        pool["running"] = _whole(values["running"])
    if "cache_used" in values:
        pool["cacheUsedPercent"] = min(100, _whole(100 * values["cache_used"]))
    if profile is None:
        return pool
    points = [
        {"tokens": one.tokens, "prefillMicros": round(1e6 * one.seconds), "cacheBytes": round(one.cache_bytes)}
        for one in points_of(profile)
    ]
    return {**pool, "samples": profile.samples, "profile": points}


def _quotient(scale: int, amount: float | None, each: float | None) -> int | None:
    """Return scale * amount / each, rounded; None where either is missing or out of bounds."""
    if amount is None or each is None or not (0 < amount < 1e12 and 1e-9 < each < 1e12):
        return None
    return round(scale * amount / each)


def _whole(value: float | None) -> int:
    return round(value) if value is not None and 0 <= value < 1e9 else 0
