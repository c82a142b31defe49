"""Reads the running system through its real Prometheus: the threshold and the link, once a second."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import httpx

from prfaas_sandbox.demo.records import ThresholdSample

THRESHOLD_QUERY = "max(prfaas_gateway_threshold_tokens)"
UTILISATION_QUERY = "max(prfaas_scheduler_link_utilisation_percent)"
SENT_BYTES_QUERY = "sum(prfaas_transfer_sent_bytes_total{{cluster='{cluster}'}})"


class Watch:
    """Samples of the threshold since the start.

    Args:
        prometheus_url: Prometheus as the host reaches it.
        on_sample: called with every new sample.

    """

    def __init__(self, prometheus_url: str, on_sample: Callable[[ThresholdSample], None]):
        self.samples: list[ThresholdSample] = []
        self.link_mbps = 0
        self._on_sample = on_sample
        self._started = time.monotonic()
        self._http = httpx.AsyncClient(base_url=prometheus_url, timeout=2.0)

    async def query(self, promql: str) -> float | None:
        """Return the one value of an instant query, or None when there is none (yet)."""
        try:
            answer = await self._http.get("/api/v1/query", params={"query": promql})
            results = answer.raise_for_status().json()["data"]["result"]
        except httpx.HTTPError:
            return None
        return float(results[0]["value"][1]) if results else None

    async def _sample(self) -> None:
        threshold, utilisation = await asyncio.gather(self.query(THRESHOLD_QUERY), self.query(UTILISATION_QUERY))
        if threshold is None:
            return
        sample = ThresholdSample(
            seconds=round(time.monotonic() - self._started, 2),
            tokens=int(threshold),
            link_mbps=self.link_mbps,
            utilisation_percent=utilisation,
        )
        self.samples.append(sample)
        self._on_sample(sample)

    async def _run(self) -> None:
        while True:
            await self._sample()
            await asyncio.sleep(1.0)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Watch"]:
        """Sample in the background as long as the block runs."""
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self._http.aclose()

    async def until(self, holds: Callable[[int], bool], *, timeout_seconds: float) -> int:
        """Wait until a newly sampled threshold satisfies `holds`; return the last threshold either way."""
        deadline = time.monotonic() + timeout_seconds
        seen = len(self.samples)
        while time.monotonic() < deadline:
            if any(holds(sample.tokens) for sample in self.samples[seen:]):
                break
            await asyncio.sleep(0.2)
        return self.samples[-1].tokens if self.samples else 0
