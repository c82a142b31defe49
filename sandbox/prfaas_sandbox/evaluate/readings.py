"""What Prometheus knows of a run: threshold and link over time, and whether emulated time kept up."""

import asyncio
import time
from typing import Any, Final

import httpx

from prfaas.errors import PeerError
from prfaas.evaluate.record import AnsweredRequest, MachineTruth, Reading
from prfaas_sandbox.demo.install import MEMBER
from prfaas_sandbox.evaluate.objects import CaseScale

_QUERIES: Final = {
    "threshold_tokens": "max(prfaas_gateway_threshold_tokens)",
    "utilisation_percent": "max(prfaas_scheduler_link_utilisation_percent)",
    "link_mbps": "max(prfaas_scheduler_link_effective_mbps)",
    "egress_mbps": f'sum(rate(prfaas_link_sent_bytes_total{{cluster="{MEMBER}"}}[WINDOW])) * 8 / 1e6',
}
_RATES: Final = frozenset({"link_mbps", "egress_mbps"})
_LATE: Final = "sum by (step, le) (prfaas_emulation_late_ratio_bucket)"
_CORES: Final = {state: f"sum(prfaas_emulation_{state}_seconds_total)" for state in ("busy", "idle")} | {
    f"late_{part}": f"sum(prfaas_emulation_late_ratio_{part})" for part in ("sum", "count")
}
_TOO_SLOW: Final = "max by (pod) (prfaas_emulation_too_slow) > 0"
_POINTS: Final = 200
_TIMEOUT_SECONDS: Final = 30.0
_SCRAPE_SECONDS: Final = 1.0
"""How often Prometheus reads all metrics, in the case's time."""
_READ_SECONDS: Final = 1.5
"""How long it may take for that."""

_Vector = list[dict[str, Any]]
_Counts = dict[tuple[str, str], float]


class RunMetrics:
    """Reads one run's metrics: `begin` before its first request, the rest after its last answer."""

    def __init__(self, prometheus_url: str, scale: CaseScale):
        self._http = httpx.AsyncClient(base_url=prometheus_url, timeout=_TIMEOUT_SECONDS, trust_env=False)
        self._scale = scale
        self._before: tuple[_Counts, _Counts] = ({}, {})
        self._began = 0.0

    async def close(self) -> None:
        await self._http.aclose()

    async def begin(self) -> None:
        await asyncio.sleep(self._scale.whole_seconds(_SCRAPE_SECONDS) + _READ_SECONDS)
        self._before = await self._counts()
        self._began = time.time()

    async def machine(self) -> MachineTruth:
        """Return whether time was kept since `begin`."""
        await asyncio.sleep(self._scale.whole_seconds(_SCRAPE_SECONDS) + _READ_SECONDS)
        late, cores = (
            {name: count - before.get(name, 0.0) for name, count in now.items()}
            for now, before in zip(await self._counts(), self._before, strict=True)
        )
        busy, idle = cores.get(("busy", ""), 0.0), cores.get(("idle", ""), 0.0)
        worst = [late_share(late, step) for step in ("prefill", "decode")]
        slow = await self._query(_TOO_SLOW)
        return MachineTruth(
            mean_late=cores[("late_sum", "")] / steps if (steps := cores[("late_count", "")]) else None,
            p99_late=max((one for one in worst if one is not None), default=None),
            busy_share=busy / (busy + idle) if busy + idle > 0 else None,
            too_slow=tuple(sorted(one["metric"].get("pod", "?") for one in slow)),
        )

    async def readings(self, answers: tuple[AnsweredRequest, ...]) -> tuple[Reading, ...]:
        """Return what metrics said since `begin`, at even times."""
        ended = time.time()
        step = max(1.0, (ended - self._began) / _POINTS)
        series = {name: await self._range(query, ended, step) for name, query in _QUERIES.items()}
        times = sorted({at for points in series.values() for at in points})
        return tuple(self._reading(at, series, answers) for at in times)

    def _reading(
        self, at: float, series: dict[str, dict[float, float]], answers: tuple[AnsweredRequest, ...]
    ) -> Reading:
        seconds = (at - self._began) / self._scale.stretch
        values = {
            name: self._scale.case_mbps(points[at]) if name in _RATES else points[at]
            for name, points in series.items()
            if at in points
        }
        in_flight = sum(
            one.at_seconds <= seconds < one.at_seconds + one.seconds for one in answers if one.seconds is not None
        )
        return Reading(at_seconds=seconds, in_flight=in_flight, **values)

    async def _counts(self) -> tuple[_Counts, _Counts]:
        late = await self._query(_LATE)
        cores = {(state, ""): sum(_value(one) for one in await self._query(query)) for state, query in _CORES.items()}
        return {(one["metric"]["step"], one["metric"]["le"]): _value(one) for one in late}, cores

    async def _query(self, promql: str) -> _Vector:
        return await self._get("/api/v1/query", {"query": promql})

    async def _range(self, promql: str, ended: float, step: float) -> dict[float, float]:
        query = promql.replace("WINDOW", f"{self._scale.whole_seconds(5)}s")
        asked = {"query": query, "start": f"{self._began:.0f}", "end": f"{ended:.0f}", "step": f"{step:.3f}"}
        found = await self._get("/api/v1/query_range", asked)
        points = found[0]["values"] if found else []
        return {float(at): float(value) for at, value in points if value not in {"NaN", "+Inf", "-Inf"}}

    async def _get(self, path: str, asked: dict[str, str]) -> _Vector:
        try:
            answer = await self._http.get(path, params=asked)
            return answer.raise_for_status().json()["data"]["result"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise PeerError(f"Prometheus does not answer {asked['query']}: {error or type(error).__name__}") from error


def late_share(counts: _Counts, step: str) -> float | None:
    """Return the smallest bound that 99 % of the steps of this kind do not exceed; None without any."""
    bounds = {float(le): count for (name, le), count in counts.items() if name == step}
    most = max(bounds.values(), default=0.0)
    return min(bound for bound, count in bounds.items() if count >= 0.99 * most) if most else None


def _value(one: dict[str, Any]) -> float:
    return float(one["value"][1])
