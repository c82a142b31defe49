"""The loop between a real Prometheus and a gateway's control socket: a cut link raises the threshold within seconds,
a silent one turns offload off at the next step, and without Prometheus the policy's own threshold comes back.
"""

import asyncio
from dataclasses import dataclass

import pytest
from tests.waiting import PATIENCE_SECONDS, eventually_async

from prfaas_scheduler.gateway import GatewayClient
from prfaas_scheduler.loop import Loop
from prfaas_scheduler.metrics import SchedulerMetrics

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Run:
    """A running loop and what it pushed."""

    gateway: object
    loop: Loop

    async def until(self, holds, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until the last update satisfies `holds`."""
        updates = self.gateway.updates
        await eventually_async(
            lambda: updates and holds(updates[-1]), lambda: f"the last updates are {updates[-5:]}", seconds
        )


async def offload_steadily(gateway):
    while True:
        gateway.offloaded += 1
        await asyncio.sleep(0.5)


@pytest.mark.quiet
async def test_a_cut_a_dead_link_and_a_dead_prometheus(site, http, gateway, table):
    one, *_ = in_eu = [worker for key, worker in site.workers.items() if key.startswith("eu/")]
    gateway.table = table(prometheus_url=site.prometheus_url, stale_after_seconds=4)
    async with gateway.listening(), GatewayClient(gateway.path) as client:
        loop = Loop(client, http, SchedulerMetrics())
        tasks = [asyncio.create_task(loop.run()), asyncio.create_task(offload_steadily(gateway))]
        run = Run(gateway, loop)
        try:
            one.move(mbps=24, backlogged_share=0.24)
            await run.until(lambda u: u.tokens == 512 and u.offload_clusters == ("eu",))
            await asyncio.sleep(5)  # the window is full of the wide link
            assert gateway.updates[-1].bandwidth == "Abundant"

            one.move(mbps=5, backlogged_share=1.0)
            await run.until(lambda u: u.tokens >= 1024, 9)
            assert gateway.updates[-1].bandwidth == "Scarce"

            for worker in in_eu:
                worker.answers = False
            await run.until(lambda u: u.offload_clusters == (), 3)
            assert loop.report.conditions["LinkHealthy"][:2] == ("False", "NoSamples")
            one.move(mbps=0, backlogged_share=0)
            for worker in in_eu:
                worker.answers = True
            await run.until(lambda u: u.offload_clusters == ("eu",))
            await run.until(lambda u: u.tokens == 512)

            gateway.table = table(prometheus_url="http://127.0.0.1:9", stale_after_seconds=4)
            before = len(gateway.updates)
            await run.until(lambda u: u.tokens == 1024)
            held = [update.tokens for update in gateway.updates[before:]].index(1024)
            assert held >= 3, "the last measurement counts for 4 s, which is at least three more steps"
            assert gateway.updates[-1].offload_clusters == ("eu",), "blind is not dead"
            assert loop.report.conditions["MetricsFresh"][:2] == ("False", "PrometheusUnreachable")
            assert loop.report.conditions["LinkHealthy"].status == "True"
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
