"""What Prometheus knows of a run: threshold and link over time, and whether emulated time kept up.

The time is judged by the worst instance, and by prefills and decodes for themselves. An instance with few steps of a
kind is judged with the others: one late step of three says little. An instance that Prometheus does not know is no
instance that kept its time, nor is one that was restarted or replaced. Where pools are scaled, others may come.

Prometheus gives its readings the times of its own clock, and a run begins and ends by the driver's. So both are
compared at either end.
"""

import asyncio
import math
import time
from collections.abc import Set
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from prfaas.errors import PeerError
from prfaas.evaluate.record import MachineTiming, Reading
from prfaas.measure.emulated import StepTiming, late_p99, step_timing
from prfaas.names import HUB
from prfaas_sandbox.demo.install import MEMBER
from prfaas_sandbox.evaluate.objects import CaseScale, utilisation_query

_RATES: Final = frozenset({"link_mbps", "egress_mbps"})
_LATE: Final = "prfaas_emulation_late_ratio_"
_COUNTERS: Final = (
    *(f"{_LATE}{part}" for part in ("sum", "count", "bucket")),
    *(f"prfaas_emulation_{state}_seconds_total" for state in ("busy", "idle")),
)
_KINDS: Final = ("prefill", "decode")
_MOST_POINTS: Final = 2000
_TIMEOUT_SECONDS: Final = 30.0
_SCRAPE_SECONDS: Final = 1.0
"""How often Prometheus reads all metrics, in the case's time."""
_READ_SECONDS: Final = 1.5
"""How long it may take for that."""
_MISSED_SECONDS: Final = 3.0
"""In the case's time. For so long an instance that did not answer Prometheus counts as there: it has not gone."""

_Result = list[Any]
"""A sample each, or the time and the value of a scalar."""


class Counter(NamedTuple):
    """Tells one instance's counters apart: `step` is prefill or decode, `le` a bound of lateness, where it has one."""

    name: str
    pod: str
    step: str = ""
    le: str = ""


_Counts = dict[Counter, float]


class RunMetrics:
    """Reads one run's metrics: `begin` right before its first request, the rest after its last answer."""

    def __init__(self, prometheus_url: str, scale: CaseScale):
        self._http = httpx.AsyncClient(base_url=prometheus_url, timeout=_TIMEOUT_SECONDS, trust_env=False)
        self._scale = scale
        self._queries = {
            "threshold_tokens": "max(prfaas_gateway_threshold_tokens)",
            "link_mbps": "max(prfaas_scheduler_link_effective_mbps)",
            "egress_mbps": utilisation_query(scale).replace("$cluster", MEMBER),
            "hub_prefills": _counted(f'cluster="{HUB}",role="prefill"', scale),
            "offload_instances": _counted(f'cluster="{MEMBER}"', scale),
        }
        self._before: _Counts = {}
        self._began = 0.0
        self._clock_off_seconds = 0.0

    async def close(self) -> None:
        await self._http.aclose()

    async def begin(self) -> None:
        self._before = await self._fresh_counts()
        await self._compare_clocks()
        self._began = time.time()

    async def machine(self, instances: int, is_scaled: bool = False) -> MachineTiming:
        """Return whether so many instances, and those that scaling added, kept their time since `begin`."""
        now = await self._fresh_counts()
        await self._compare_clocks()
        seconds = math.ceil(time.time() - self._began) + self._scale.whole_seconds(_SCRAPE_SECONDS)
        asked = {"query": f"sum(resets({_LATE}count[{max(1, seconds)}s]))"}
        was_restarted = any(float(one["value"][1]) > 0 for one in await self._get("/api/v1/query", asked))
        found = machine_timing(self._before, now, instances, was_restarted, is_scaled)
        return msgspec.structs.replace(found, clock_off_seconds=self._clock_off_seconds)

    async def readings(self) -> tuple[Reading, ...]:
        """Return what metrics said since `begin`, each time that they were read, or at fewer even times."""
        ended = time.time()
        step = max(self._scale.whole_seconds(_SCRAPE_SECONDS), (ended - self._began) / _MOST_POINTS)
        series = {name: await self._range(query, ended, step) for name, query in self._queries.items()}
        return tuple(self._reading(at, series) for at in sorted({at for points in series.values() for at in points}))

    def _reading(self, at: float, series: dict[str, dict[float, float]]) -> Reading:
        values: dict[str, Any] = {
            name: self._scale.case_mbps(points[at]) if name in _RATES else points[at]
            for name, points in series.items()
            if at in points
        }
        return Reading(at_seconds=(at - self._began) / self._scale.stretch, **values)

    async def _compare_clocks(self) -> None:
        """Note by how much Prometheus' clock is off this one, if it is more than before."""
        sent_at = time.time()
        _, theirs = await self._get("/api/v1/query", {"query": "time()"})
        allowed_seconds = self._scale.whole_seconds(_SCRAPE_SECONDS)
        off_seconds = clock_off_seconds(sent_at, float(theirs), time.time(), allowed_seconds)
        self._clock_off_seconds = max(self._clock_off_seconds, off_seconds)

    async def _fresh_counts(self) -> _Counts:
        """Return all counters once they have been scraped anew."""
        await asyncio.sleep(self._scale.whole_seconds(_SCRAPE_SECONDS) + _READ_SECONDS)
        found = await self._get("/api/v1/query", {"query": f'{{__name__=~"{"|".join(_COUNTERS)}"}}'})
        labels = [{"name": one["metric"].pop("__name__"), **one["metric"]} for one in found]
        return {
            Counter(**{name: each[name] for name in Counter._fields if name in each}): float(one["value"][1])
            for each, one in zip(labels, found, strict=True)
            if "pod" in each
        }

    async def _range(self, promql: str, ended: float, step: float) -> dict[float, float]:
        asked = {"query": promql, "start": f"{self._began:.3f}", "end": f"{ended:.3f}", "step": f"{step:.3f}"}
        found = await self._get("/api/v1/query_range", asked)
        points = found[0]["values"] if found else []
        return {float(at): float(value) for at, value in points if value not in {"NaN", "+Inf", "-Inf"}}

    async def _get(self, path: str, asked: dict[str, str]) -> _Result:
        try:
            answer = await self._http.get(path, params=asked)
            return answer.raise_for_status().json()["data"]["result"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise PeerError(f"Prometheus does not answer {asked['query']}: {error or type(error).__name__}") from error


def _counted(instances: str, scale: CaseScale) -> str:
    """Return the query of how many instances there are, chosen by the labels of their roles."""
    # By pod: one that has just converted has a series of its old role, and one of its new.
    window = scale.whole_seconds(_MISSED_SECONDS)
    return f"count(count by (pod) (last_over_time(prfaas_role{{{instances}}}[{window}s])))"


def clock_off_seconds(sent_at: float, theirs: float, answered_at: float, allowed_seconds: float) -> float:
    """Return by how much a clock is off ours that was read between these moments; 0 where no more than is allowed."""
    off_seconds = max(sent_at - theirs, theirs - answered_at)
    return off_seconds if off_seconds > allowed_seconds else 0.0


def machine_timing(
    before: _Counts, now: _Counts, instances: int, was_restarted: bool, is_scaled: bool = False
) -> MachineTiming:
    """Return whether so many instances kept their time between two readings of their counters.

    If `is_scaled`, others may have come, and those of the beginning have to be there still.
    """
    since = {counter: count - before.get(counter, 0.0) for counter, count in now.items()}
    pods, known = {one.pod for one in now}, {one.pod for one in before}
    timings = [one for kind in _KINDS for one in _timings(since, kind)]
    is_another_there = not (known <= pods if is_scaled else pods <= known)
    if was_restarted or is_another_there or len(pods) < instances or not timings:
        return MachineTiming(mean_late=None, p99_late=None, busy_share=None)
    p99 = [one for kind in _KINDS if (one := late_p99(_bounds(since, kind, pods))) is not None]
    return MachineTiming(
        mean_late=max(one.mean_late for one in timings),
        late_share=max((one.late_share for one in timings if one.late_share is not None), default=None),
        p99_late=max(p99, default=None),
        busy_share=_busy_share(since),
    )


def _timings(counts: _Counts, kind: str) -> list[StepTiming]:
    """Return how late the steps of this kind were of each instance that has enough, and of all instances together."""
    pods = {one.pod for one in counts}
    groups = [*({pod} for pod in pods), pods]
    found = [step_timing(_bounds(counts, kind, some), _late(counts, kind, some)) for some in groups]
    return [one for one in found if one is not None]


def _late(counts: _Counts, kind: str, pods: Set[str]) -> float:
    """Return the sum of the lateness of some instances' steps of this kind."""
    return sum(counts.get(Counter(f"{_LATE}sum", pod, kind), 0.0) for pod in pods)


def _bounds(counts: _Counts, kind: str, pods: Set[str]) -> dict[float, float]:
    """Return how many of some instances' steps of this kind do not exceed each bound of lateness."""
    bounds: dict[float, float] = {}
    for one, count in counts.items():
        if one.name == f"{_LATE}bucket" and one.step == kind and one.pod in pods:
            bounds[float(one.le)] = bounds.get(float(one.le), 0.0) + count
    return bounds


def _busy_share(counts: _Counts) -> float | None:
    busy, idle = (
        sum(count for one, count in counts.items() if one.name == f"prfaas_emulation_{state}_seconds_total")
        for state in ("busy", "idle")
    )
    return busy / (busy + idle) if busy + idle > 0 else None
